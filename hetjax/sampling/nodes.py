"""Splits every step of the global order between nodes, each of which plans its own part.

The split is computed from data that all nodes have, so all agree on it without communication.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from hetjax.planning import controllers
from hetjax.planning.controllers.base import Controller, Observation, Plan
from hetjax.planning.limits import Limits
from hetjax.planning.rounding import round_to_total
from hetjax.sampling.order import PlanFn, Sampler, Span

RULES = ("balanced", "equal", "steps")
_EMA_WEIGHT = 0.3  # of the latest measurement in the moving average of a node's rate


class NodeAllocator:
    """Decides how many samples of a step each node takes.

    Args:
        nodes: Number of nodes.
        rule: "balanced": all nodes take part in every step, with counts from the `balanced` controller; "equal": the
            same with equal counts; "steps": equal counts per step, and steps in proportion to a node's speed.
    """

    def __init__(self, nodes: int, rule: str):
        if rule not in RULES:
            raise ValueError(f"There is no rule {rule!r} between nodes: choose one of {', '.join(RULES)}.")
        self.nodes, self.rule = nodes, rule
        self.controller: Controller = controllers.make("equal" if rule == "equal" else "balanced")
        self.rate_N: np.ndarray | None = None  # samples/s
        self.capacity_N: np.ndarray | None = None  # largest count of a node in one step; None: no limit

    def limit(self, capacity_N: Sequence[int], batch: int) -> None:
        """Set each node's capacity; raise ValueError if they cannot hold a global batch of `batch` samples."""
        self.capacity_N = np.asarray(capacity_N, np.int64)
        if self.capacity_N.sum() < batch:
            raise ValueError(
                f"The nodes can take {self.capacity_N.sum()} samples a step in all (capacities "
                f"{self.capacity_N.tolist()}), but batch_size is {batch}. Raise the capacities or lower batch_size."
            )

    def counts(self, batch: int, epoch: int, quantum: int) -> np.ndarray:
        """Each node's count in a step that all nodes take part in."""
        least = quantum if batch >= quantum * self.nodes else 0
        limits = Limits.plain(self.nodes, -(-batch // quantum) * quantum, minimum=least, quantum=quantum)
        if self.capacity_N is not None:
            limits = replace(limits, capacity_W=np.minimum(limits.capacity_W, self.capacity_N))
        return self.controller.plan(batch, limits, epoch).counts_W

    def unequal_steps(self, samples: int, batch: int) -> np.ndarray:
        """Counts [steps, nodes] that divide `samples` with steps in proportion to speed.

        Node j gets D_j samples in proportion to its rate, in steps of about batch / nodes. The steps of slower nodes
        are spread evenly over those of the fastest; all nodes take part in the last step.
        """
        rate_N = np.ones(self.nodes) if self.rate_N is None else self.rate_N
        share_N = round_to_total(samples * (rate_N / rate_N.sum()), samples)
        steps_N = np.maximum(-(-share_N * self.nodes // batch), 1)
        if self.capacity_N is not None:
            steps_N = np.maximum(steps_N, -(-share_N // self.capacity_N))
        slot_T1 = np.arange(int(steps_N.max()) + 1)[:, None]
        done_T1xN = slot_T1 * steps_N // steps_N.max()
        counts_TxN = np.diff(share_N * done_T1xN // steps_N, axis=0)
        return counts_TxN[counts_TxN.any(axis=1)]

    def observe(self, steps_N: np.ndarray, samples_N: np.ndarray, seconds_N: np.ndarray) -> None:
        """Update the rates from each node's steps, samples and seconds since the last call."""
        active_N = (steps_N > 0) & (seconds_N > 0)
        if not active_N.all():
            return
        times_N = np.round(seconds_N / steps_N, 6)
        counts_N = np.rint(samples_N / steps_N).astype(np.int64)
        self.controller.observe(Observation(counts_N, counts_N.astype(np.float64), times_N))
        rate_N = samples_N / seconds_N
        self.rate_N = rate_N if self.rate_N is None else self.rate_N + _EMA_WEIGHT * (rate_N - self.rate_N)

    def state_dict(self) -> dict[str, Any]:
        """The learned rates, as plain JSON values."""
        return {
            "nodes": self.nodes,
            "controller": self.controller.state_dict(),
            "rates": None if self.rate_N is None else self.rate_N.tolist(),
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Restore the learned rates if they belong to the same number of nodes and the same controller."""
        if saved["nodes"] != self.nodes or saved["controller"]["controller"] != self.controller.name:
            return
        self.controller.load_state_dict(saved["controller"])
        self.rate_N = None if saved["rates"] is None else np.array(saved["rates"])


class NodeSampler:
    """One node's part of every step of the global order.

    Steps run through the positions of the global order, and within a step through the nodes. So the cursor has the
    same meaning as there, every sample is read once per epoch, and a run can resume anywhere with other nodes.

    Args:
        order: The global order.
        node: Index of this node.
        allocator: Splits a step between the nodes.
        blocking: Whether nodes synchronize in every step of an epoch, and so have to make the same steps.
        quantum: Counts are multiples of this, except in the last step of an epoch.
    """

    def __init__(
        self, order: Sampler, node: int, allocator: NodeAllocator, blocking: Callable[[int], bool], quantum: int = 1
    ):
        self.order, self.node, self.allocator, self.quantum = order, node, allocator, quantum
        self.blocking = blocking
        self.size, self.batch, self.partition = order.size, order.batch, order.partition
        self._counts_N = np.full(allocator.nodes, order.batch // allocator.nodes)  # of the last planned step
        # The last epoch with unequal steps, and its counts by position.
        self._unequal: tuple[int, dict[int, np.ndarray]] = (-1, {})

    def next(self, cursor: int, plan_fn: PlanFn) -> tuple[Span, Plan]:
        """Return this node's part of the step at the cursor, and its plan."""
        epoch, start = divmod(cursor, self.size)
        if self.allocator.rule == "steps" and not self.blocking(epoch):
            if epoch != self._unequal[0] or start not in self._unequal[1]:
                self._unequal = epoch, self._by_position(start)
            counts_N = self._unequal[1][start]
        else:
            counts_N = self.allocator.counts(self.order.step(cursor).batch, epoch, self.quantum)
        self._counts_N = counts_N
        step = self._part(epoch, start, counts_N)
        return step, plan_fn(step.batch, epoch)

    def _by_position(self, start: int) -> dict[int, np.ndarray]:
        counts_TxN = self.allocator.unequal_steps(self.size - start, self.batch)
        starts_T = start + np.cumsum(counts_TxN.sum(axis=1)) - counts_TxN.sum(axis=1)
        return {int(position): counts_N for position, counts_N in zip(starts_T, counts_TxN, strict=True)}

    def _part(self, epoch: int, start: int, counts_N: np.ndarray) -> Span:
        first = start + int(counts_N[: self.node].sum())
        return Span(epoch, first, first + int(counts_N[self.node]), (start, start + int(counts_N.sum())))

    def ahead(self, cursor: int) -> Span | None:
        """Predict this node's part of a step that is not planned yet, to prefetch it; None if unknown."""
        epoch, start = divmod(cursor, self.size)
        if epoch == self._unequal[0]:
            known_N = self._unequal[1].get(start)
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
