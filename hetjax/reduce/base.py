"""The protocol of a reduce: how the sums of one step move the parameters on, and what the workers read next."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax

from hetjax.reduce.layout import MANY, Parts, StepReport
from hetjax.reduce.update import State
from hetjax.sampling.order import PlannedStep

Tree = Any


@dataclass(frozen=True)
class Replicas:
    """Parameters and model state as this process's workers read them in one step."""

    leaves_w: list[list[jax.Array]]  # on each worker's own device; leaves, because trees are slow to take apart
    ready_w: list[jax.Array]  # an array of each worker that is ready when its leaves are
    on_mesh: Callable[[], Tree]  # the same as global arrays, for engines that are one program over all workers


def own_slots(
    seconds: float | None, rows: int, checksum: int, stop: bool = False, save: bool = False, left: int = MANY
) -> list[float]:
    """What the host says of one worker: it travels with the worker's sums (see `SLOTS`)."""
    return [-1.0 if seconds is None else round(seconds * 1e6), rows, checksum, stop, save, left]


class Reduce(Protocol):
    """Moves what the devices hold on by one step: (core, parts, slots) -> (core, tail).

    A reduce holds programs, not parameters: the caller keeps `core` from step to step and gives it up with every call,
    for its buffers are donated.
    """

    name: str

    def __call__(
        self, core: Any, parts_w: Sequence[Parts], slots_w: Sequence[list[float]], step: PlannedStep, /
    ) -> tuple[Any, Any]:
        """Sum and update.

        Args:
            core: what the devices hold; donated.
            parts_w: the sums of each local worker.
            slots_w: what the host says of each local worker (`own_slots`).
            step: the step that they belong to.

        Returns:
            The new core, and the tail that `read` turns into a report.
        """
        ...

    def read(self, tail: Any) -> StepReport:
        """The report of a step; waits for its sum."""
        ...

    def replicas(self, core: Any, tail: Any, /) -> Replicas:
        """What the workers read in the next step; `tail` came with `core`, and is None before the first step."""
        ...

    def state(self, core: Any, step: int, cursor: int, /) -> State:
        """The state that `core` stands for, after so many steps and samples."""
        ...
