"""The protocol of a reduce: turns the sums of one step into the parameters that workers read in the next."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax

from hetjax.reduce.layout import MANY, Parts, StepReport
from hetjax.sampling.order import PlannedStep
from hetjax.state import State

Tree = Any


@dataclass(frozen=True)
class Replicas:
    """Parameters and model state as the workers of this process read them in one step."""

    leaves_w: Sequence[list[jax.Array]]  # on each worker's device; leaves, because flattening trees is slow
    ready_w: Sequence[jax.Array]  # one array per worker that is ready when its leaves are
    on_mesh: Callable[[], Tree]  # the same values as global arrays, for SPMD engines


class OnDemand(Sequence[Any]):
    """A sequence whose entries are made when they are first read: a worker without samples costs no copy."""

    def __init__(self, length: int, make: Callable[[int], Any]):
        self._length, self._make, self._made = length, make, dict[int, Any]()

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, k: Any) -> Any:
        if not 0 <= k < self._length:
            raise IndexError(k)
        if k not in self._made:
            self._made[k] = self._make(k)
        return self._made[k]


def own_slots(
    seconds: float | None, rows: int, checksum: int, stop: bool = False, save: bool = False, left: int = MANY,
    before: float | None = None, entry: int = 0,
) -> list[float]:  # fmt: skip
    """The values that the host of a worker adds to its sums, in the order of `SLOTS`."""
    us = lambda seconds: -1.0 if seconds is None else round(seconds * 1e6)
    return [us(seconds), rows, checksum, stop, save, left, us(before), entry]


class Reduce(Protocol):
    """Reduces and updates: (core, parts, slots) -> (core, tail).

    A reduce holds programs, not parameters. The caller keeps `core` and passes it to every call, which donates its
    buffers.
    """

    name: str

    def __call__(
        self, core: Any, parts_w: Sequence[Parts], slots_w: Sequence[list[float]], step: PlannedStep, /
    ) -> tuple[Any, Any]:
        """Sum over all workers and update.

        Args:
            core: The arrays on the devices; donated.
            parts_w: The sums of each local worker; () for one without samples.
            slots_w: The host's values of each local worker (`own_slots`).
            step: The step they belong to.

        Returns:
            The new core, and the tail from which `read` makes a report.
        """
        ...

    def read(self, tail: Any) -> StepReport:
        """The report of a step; blocks until its sum is ready."""
        ...

    def replicas(self, core: Any, tail: Any, /) -> Replicas:
        """What workers read in the next step. `tail` was returned with `core`; None before the first step."""
        ...

    def state(self, core: Any, step: int, cursor: int, /) -> State:
        """The state with the arrays of `core` after `step` steps and `cursor` samples."""
        ...
