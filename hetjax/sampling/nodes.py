"""Which samples are one node's: its part of every step of the global order, known to all without a message."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from hetjax.planning.controllers.base import Plan
from hetjax.sampling.between_nodes import BetweenNodes
from hetjax.sampling.order import Decide, Sampler, Span


class NodeSampler:
    """Steps run through the positions of the global order, and within a step through the nodes. So the cursor means the
    same as there, every sample comes once, and a run can go on with other nodes anywhere.

    blocking: whether nodes agree in every step of an epoch, and so have to make the same steps.
    """

    def __init__(
        self, order: Sampler, node: int, between: BetweenNodes, blocking: Callable[[int], bool], quantum: int = 1
    ):
        self.order, self.node, self.between, self.quantum = order, node, between, quantum
        self.blocking = blocking
        self.size, self.batch, self.partition = order.size, order.batch, order.partition
        self._counts_N = np.full(between.nodes, order.batch // between.nodes)  # of the step planned last
        self._cut: tuple[int, dict[int, np.ndarray]] = (-1, {})  # an epoch with unequal steps: counts by position

    def next(self, cursor: int, decide: Decide) -> tuple[Span, Plan]:
        """This node's part of the step at the cursor, and its plan."""
        epoch, start = divmod(cursor, self.size)
        if self.between.rule == "steps" and not self.blocking(epoch):
            if epoch != self._cut[0] or start not in self._cut[1]:
                self._cut = epoch, self._by_position(start)
            counts_N = self._cut[1][start]
        else:
            counts_N = self.between.counts(self.order.step(cursor).batch, epoch, self.quantum)
        self._counts_N = counts_N
        step = self._part(epoch, start, counts_N)
        return step, decide(step.batch, epoch)

    def _by_position(self, start: int) -> dict[int, np.ndarray]:
        counts_TxN = self.between.cut(self.size - start, self.batch)
        starts_T = start + np.cumsum(counts_TxN.sum(axis=1)) - counts_TxN.sum(axis=1)
        return {int(at): counts_N for at, counts_N in zip(starts_T, counts_TxN, strict=True)}

    def _part(self, epoch: int, start: int, counts_N: np.ndarray) -> Span:
        first = start + int(counts_N[: self.node].sum())
        return Span(epoch, first, first + int(counts_N[self.node]), (start, start + int(counts_N.sum())))

    def ahead(self, cursor: int) -> Span | None:
        """This node's part of a step that has not been planned yet, as far as it can be guessed."""
        epoch, start = divmod(cursor, self.size)
        if epoch == self._cut[0]:
            known_N = self._cut[1].get(start)
            return None if known_N is None else self._part(epoch, start, known_N)
        whole = self.order.step(cursor)
        if whole.batch != self._counts_N.sum():
            return None
        return self._part(epoch, start, self._counts_N)

    def steps_between(self, cursor: int, end: int) -> int:
        return self.order.steps_between(cursor, end)

    def indices(self, epoch: int, start: int, stop: int) -> np.ndarray:
        return self.order.indices(epoch, start, stop)

    def state_dict(self, cursor: int) -> dict[str, Any]:
        return self.order.state_dict(cursor)

    def load_state_dict(self, saved: Mapping[str, Any], cursor: int) -> None:
        self.order.load_state_dict(saved, cursor)
