"""DASO written out in NumPy, from the paper's recursion and its corrections, without any of the package's code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np


@dataclass
class Reference:
    """P nodes with SGD and momentum. `gradient(x, rows)` is the SUM over the rows of the gradients at x, and of losses.

    An epoch is a list of steps, a step a list of one array of samples per node. `faithful`: all nodes count alike, they
    average parameters where they block, nothing is received right before a send, and blending goes by the wait.
    """

    gradient: Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, float]]
    nodes: int
    rate: float
    momentum: float = 0.0
    blend: str = "delta"
    faithful: bool = False
    x: list[np.ndarray] = field(default_factory=list)
    m: list[np.ndarray] = field(default_factory=list)
    pending: tuple[int, np.ndarray, list[np.ndarray]] | None = None

    def start(self, x: np.ndarray) -> Reference:
        self.x, self.m = [x.copy() for _ in range(self.nodes)], [np.zeros_like(x) for _ in range(self.nodes)]
        self.batch, self.made = np.zeros(self.nodes), np.zeros(self.nodes)
        return self

    def weights(self) -> np.ndarray:
        if self.faithful:
            return np.full(self.nodes, 1 / self.nodes)
        per_step = self.batch / self.made
        return per_step / per_step.sum()

    def update(self, j: int, g: np.ndarray) -> None:
        self.m[j] = self.momentum * self.m[j] + g
        self.x[j] = self.x[j] - self.rate * self.m[j]

    def mean(self, values: Sequence[np.ndarray]) -> np.ndarray:
        return sum(w * v for w, v in zip(self.weights(), values, strict=True))

    def receive(self, b: int, wait: int) -> None:
        sent_at, mean, sent = self.pending
        for j in range(self.nodes):
            if self.blend == "delta":
                self.x[j] = self.x[j] + mean - sent[j]
            else:
                late = min(b - sent_at, wait) if self.faithful else b - sent_at
                self.x[j] = (2 * late * self.x[j] + self.nodes * mean) / (2 * late + self.nodes)
        self.pending = None

    def epoch(self, steps: list[list[np.ndarray]], gs: int, wait: int) -> float:
        """One epoch with a global skip and a wait; its mean loss."""
        loss = samples = 0.0
        self.batch[:] = self.made[:] = 0
        for b, parts in enumerate(steps):
            last = b == len(steps) - 1
            sums = [self.gradient(x, rows) if len(rows) else (0.0, 0.0) for x, rows in zip(self.x, parts, strict=True)]
            loss, samples = loss + sum(told for _, told in sums), samples + sum(map(len, parts))
            if gs == 0 and not self.faithful:
                for j in range(self.nodes):
                    self.update(j, sum(g for g, _ in sums) / sum(map(len, parts)))
                continue
            for j, (g, _) in enumerate(sums):
                if len(parts[j]):
                    self.update(j, g / len(parts[j]))
                    self.batch[j], self.made[j] = self.batch[j] + len(parts[j]), self.made[j] + 1
            send = last or gs == 0 or b % gs == 0
            slips = self.faithful and not send and (b + 1) % gs == 0
            due = self.pending is not None and (send or (b - self.pending[0] >= wait and not slips))
            if send:
                if due and self.blend == "delta":
                    self.receive(b, wait)
                sent = [x.copy() for x in self.x]
                fresh = (b, self.mean(sent), sent)
                self.weights_sent = self.weights()
                self.batch[:] = self.made[:] = 0
                if due and self.blend != "delta":
                    self.receive(b, wait)
                self.pending = fresh
                if last or gs == 0:
                    self.x = [fresh[1].copy() for _ in range(self.nodes)]
                    self.pending = None
            elif due:
                self.receive(b, wait)
        return loss / samples

    def average_optimizer(self) -> None:
        """With the weights of the parameters sent last."""
        mean = sum(w * m for w, m in zip(self.weights_sent, self.m, strict=True))
        self.m = [mean.copy() for _ in range(self.nodes)]
