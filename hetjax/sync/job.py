"""One call of `Trainer.fit`, as a sync gets it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hetjax.data.source import Source
from hetjax.devices.workers import Workers
from hetjax.engines.base import Replicas
from hetjax.engines.session import Session
from hetjax.history import History, Record
from hetjax.recorder import Recorder
from hetjax.reduce.update import State
from hetjax.sampling.order import Sampler
from hetjax.simulation.speeds import Simulation
from hetjax.sync.base import Rule


@dataclass(frozen=True)
class Job:
    """What there is to do, and what it can be done with.

    `end` is the cursor at which training is over. What only some syncs need is made when it is asked for.
    """

    workers: Workers
    sampler: Any
    source: Source
    end: int
    simulation: Simulation | None
    wait_limit: float
    by_steps: Callable[[State], tuple[State, History]]  # train step by step
    open_session: Callable[[State], Session]  # engine, clocks and layout for this source
    rule: Callable[[State], Rule]
    record: Callable[[History], Recorder]  # the bookkeeping of this call
    stopping: Callable[[], bool]
    saving: Callable[[], bool]  # whether a checkpoint was asked for since the last time
    check: Callable[[Record], None]  # raises for a loss or gradient that is not finite
    calibrate: Callable[[Session, Replicas], None]  # fixes the simulated row time

    @property
    def order(self) -> Sampler:
        """The global order of samples, where there are no shards."""
        assert isinstance(self.sampler, Sampler)
        return self.sampler

    @property
    def batch(self) -> int:
        return self.sampler.batch
