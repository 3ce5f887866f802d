"""How a step is shared between nodes that plan on their own: from what all of them know, so that all decide alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from hetjax.planning import controllers
from hetjax.planning.controllers.base import Controller, Observation
from hetjax.planning.limits import Limits

RULES = ("balanced", "equal", "steps")
_MEMORY = 0.3  # of the latest exchange in a node's rate


class BetweenNodes:
    """balanced: all nodes make the same steps, with samples by the controller of that name; equal: with equal samples;
    steps: the same samples a step, and steps in proportion to speed."""

    def __init__(self, nodes: int, rule: str):
        if rule not in RULES:
            raise ValueError(f"Between nodes is {rule!r}: choose one of {', '.join(RULES)}.")
        self.nodes, self.rule = nodes, rule
        self.controller: Controller = controllers.make("equal" if rule == "equal" else "balanced")
        self.rate_N: np.ndarray | None = None  # samples a second
        self.capacity_N: np.ndarray | None = None  # most samples that a node can take in one step; None: all of it

    def limit(self, capacity_N: Sequence[int], batch: int) -> None:
        """Say how many samples each node can take in one step, of at most `batch` in all."""
        self.capacity_N = np.asarray(capacity_N, np.int64)
        if self.capacity_N.sum() < batch:
            raise ValueError(
                f"The nodes can take {self.capacity_N.sum()} samples a step in all (capacities "
                f"{self.capacity_N.tolist()}), but batch_size is {batch}. Raise the capacities or lower batch_size."
            )

    def counts(self, batch: int, epoch: int, quantum: int) -> np.ndarray:
        """How many samples of a step that all nodes make each one takes."""
        least = quantum if batch >= quantum * self.nodes else 0
        limits = Limits.plain(self.nodes, -(-batch // quantum) * quantum, minimum=least, quantum=quantum)
        if self.capacity_N is not None:
            limits = replace(limits, capacity_W=np.minimum(limits.capacity_W, self.capacity_N))
        return self.controller.plan(batch, limits, epoch).counts_W

    def cut(self, samples: int, batch: int) -> np.ndarray:
        """Steps in proportion to speed: how many of so many samples each node takes in every step, [steps, nodes].

        Node j gets a share D_j by its rate, in steps of about batch / nodes. The steps of the others are spread evenly
        between those of the fastest; all of them take part in the last.
        """
        rate_N = np.ones(self.nodes) if self.rate_N is None else self.rate_N
        ideal_N = samples * (rate_N / rate_N.sum())
        share_N = np.floor(ideal_N).astype(np.int64)
        share_N[np.argsort(-(ideal_N - share_N), kind="stable")[: samples - int(share_N.sum())]] += 1
        steps_N = np.maximum(-(-share_N * self.nodes // batch), 1)
        if self.capacity_N is not None:
            steps_N = np.maximum(steps_N, -(-share_N // self.capacity_N))
        slot_T1 = np.arange(int(steps_N.max()) + 1)[:, None]
        done_T1xN = slot_T1 * steps_N // steps_N.max()
        counts_TxN = np.diff(share_N * done_T1xN // steps_N, axis=0)
        return counts_TxN[counts_TxN.any(axis=1)]

    def observe(self, steps_N: np.ndarray, samples_N: np.ndarray, seconds_N: np.ndarray) -> None:
        """What the nodes did since they were asked last: steps, the samples in them, and how long they took."""
        some_N = (steps_N > 0) & (seconds_N > 0)
        if not some_N.all():
            return
        times_N = np.round(seconds_N / steps_N, 6)
        counts_N = np.rint(samples_N / steps_N).astype(np.int64)
        self.controller.observe(Observation(counts_N, counts_N.astype(np.float64), times_N))
        rate_N = samples_N / seconds_N
        self.rate_N = rate_N if self.rate_N is None else self.rate_N + _MEMORY * (rate_N - self.rate_N)

    def state_dict(self) -> dict[str, Any]:
        return {
            "nodes": self.nodes,
            "controller": self.controller.state_dict(),
            "rates": None if self.rate_N is None else self.rate_N.tolist(),
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Go on with what was known, if it was about as many nodes and by the same rule."""
        if saved["nodes"] != self.nodes or saved["controller"]["controller"] != self.controller.name:
            return
        self.controller.load_state_dict(saved["controller"])
        self.rate_N = None if saved["rates"] is None else np.array(saved["rates"])
