"""What the trainer hands over to an asynchronous sync for one call of `fit`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hetjax.data.source import Source
from hetjax.history import History, Record
from hetjax.plan.sampler import Sampler
from hetjax.run.engines.protocol import Replicas
from hetjax.run.session import Session
from hetjax.run.simulate import Simulation
from hetjax.run.update import State
from hetjax.run.workers import Workers
from hetjax.sync.protocol import Rule

Hook = Callable[[Record, State], None]


@dataclass(frozen=True)
class Job:
    """`end`: samples since the start of training at which it is over."""

    session: Session
    rule: Rule
    workers: Workers
    sampler: Sampler
    source: Source
    end: int
    simulation: Simulation | None
    wait_limit: float
    hooks: Sequence[Hook]
    tell: Callable[[Sequence[Hook], str, History], None]  # begin and end, to hooks that want to know
    stopping: Callable[[], bool]
    saving: Callable[[], bool]  # whether a checkpoint was asked for since the last time
    check: Callable[[Record], None]  # raises for a loss or gradient that is not finite
    calibrate: Callable[[Session, Replicas], None]  # fixes the simulated row time

    @property
    def batch(self) -> int:
        return self.sampler.batch
