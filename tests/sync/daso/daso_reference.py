"""DASO in NumPy, from the paper's recursion and its corrections, without any code of the package."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np


@dataclass
class Reference:
    """P nodes with momentum SGD. `gradient(x, rows)` returns the SUM over rows of gradients at x, and of losses.

    An epoch is a list of steps, a step a list with one array of samples per node. `faithful`: equal weights, nodes
    average parameters where they block, nothing is received right before a send, the wait is capped at the steps left,
    and blending uses the wait that was capped when sending.
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
        """Put all nodes at x."""
        self.x, self.m = [x.copy() for _ in range(self.nodes)], [np.zeros_like(x) for _ in range(self.nodes)]
        self.samples, self.steps, self.batch = (np.zeros(self.nodes) for _ in range(3))
        return self

    def weights(self) -> np.ndarray:
        """By samples per step since the last exchange, or earlier for a node without steps since then."""
        if self.faithful:
            return np.full(self.nodes, 1 / self.nodes)
        some = self.steps > 0
        self.batch[some] = self.samples[some] / self.steps[some]
        return self.batch / self.batch.sum()

    def update(self, j: int, g: np.ndarray) -> None:
        self.m[j] = self.momentum * self.m[j] + g
        self.x[j] = self.x[j] - self.rate * self.m[j]

    def mean(self, values: Sequence[np.ndarray]) -> np.ndarray:
        return sum(w * v for w, v in zip(self.weights(), values, strict=True))

    def receive(self, b: int, wait: int, left: int) -> None:
        sent_at, mean, sent = self.pending
        for j in range(self.nodes):
            if self.blend == "delta":
                self.x[j] = self.x[j] + mean - sent[j]
            else:
                staleness = min(wait, left + b - sent_at) if self.faithful else b - sent_at
                self.x[j] = (2 * staleness * self.x[j] + self.nodes * mean) / (2 * staleness + self.nodes)
        self.pending = None

    def epoch(self, steps: list[list[np.ndarray]], skip: int, wait: int, complete: bool = True) -> float:
        """One epoch, or its beginning if not `complete`; wait = 0 blocks on every exchange. Returns the mean loss."""
        loss = samples = 0.0
        self.samples[:] = self.steps[:] = 0
        for b, parts in enumerate(steps):
            last = complete and b == len(steps) - 1
            sums = [self.gradient(x, rows) if len(rows) else (0.0, 0.0) for x, rows in zip(self.x, parts, strict=True)]
            loss, samples = loss + sum(own for _, own in sums), samples + sum(map(len, parts))
            if skip == 0 and not self.faithful:
                for j in range(self.nodes):
                    self.update(j, sum(g for g, _ in sums) / sum(map(len, parts)))
                continue
            for j, (g, _) in enumerate(sums):
                if len(parts[j]):
                    self.update(j, g / len(parts[j]))
                    self.samples[j], self.steps[j] = self.samples[j] + len(parts[j]), self.steps[j] + 1
            send, left = last or skip == 0 or b % skip == 0, len(steps) - 1 - b
            if send:
                due = self.pending is not None
            elif self.faithful:
                due = self.pending is not None and (b + 1) % skip != 0 and b % skip == min(wait, left)
            else:
                due = self.pending is not None and b - self.pending[0] >= wait
            if send:
                if due and self.blend == "delta":
                    self.receive(b, wait, left)
                sent = [x.copy() for x in self.x]
                fresh = (b, self.mean(sent), sent)
                self.weights_sent = self.weights()
                self.samples[:] = self.steps[:] = 0
                if due and self.blend != "delta":
                    self.receive(b, wait, left)
                self.pending = fresh
                if last or wait == 0:
                    self.x = [fresh[1].copy() for _ in range(self.nodes)]
                    self.pending = None
            elif due:
                self.receive(b, wait, left)
        return loss / samples

    def average_optimizer(self) -> None:
        """With the weights of the parameters sent last."""
        mean = sum(w * m for w, m in zip(self.weights_sent, self.m, strict=True))
        self.m = [mean.copy() for _ in range(self.nodes)]
