"""What a sync is: it says what the devices hold between steps, and how the sums of a step move that on.

`allreduce` holds one set of parameters, the same on all workers. Other syncs hold several at once, stacked along a
leading axis (`State.replicas` says how many); their answer is one set again.

One call of `Trainer.fit`, as a sync gets it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import optax

from hetjax.data.source import Source
from hetjax.devices.workers import Workers
from hetjax.engines.session import Session
from hetjax.history import History, Record, Recorder
from hetjax.reduce.base import Reduce, Replicas
from hetjax.reduce.layout import Layout
from hetjax.reduce.update import Finish, State, Update, optimizer_step
from hetjax.sampling.order import Sampler
from hetjax.simulation.speeds import Simulation

if TYPE_CHECKING:
    from hetjax.history import History


Tree = Any


@dataclass(frozen=True)
class UpdateRule:
    """How summed gradients become new parameters."""

    optimizer: optax.GradientTransformation
    advance: Callable[[Tree, Tree], Tree] | None  # for the model state, where there is one
    ema_decay: float | None
    undo: bool = False  # an update that is not finite

    def finish(self) -> Finish:
        return optimizer_step(self.optimizer, self.advance, self.ema_decay)

    def update(self) -> Update:
        return Update(self.finish(), self.undo)


@dataclass(frozen=True)
class SyncContext:
    """What a sync has to work with in one run."""

    workers: Workers
    layout: Layout
    rule: UpdateRule
    transport: str  # 'auto', 'psum' or 'hub'
    batch: int
    seed: int = 0
    capacity: int = 0  # most samples that these workers can take in one step
    samples: int | None = None  # in an epoch, where that is known
    end: int | None = None  # the cursor where this training will end, where that is known


class Sync:
    """When and how the workers agree. Subclasses fill in `open`, and override what differs from one set for all."""

    name: ClassVar[str]
    own_parameters: ClassVar[bool] = False  # of every worker, along a leading axis of workers; else one set for all
    stepped: ClassVar[bool] = True  # whether there are steps of all workers together

    @property
    def by_node(self) -> bool:
        """Whether this process plans for its own workers only, as one node of several."""
        return False

    def workers(self, devices: Sequence[jax.Device] | None) -> Workers:
        """Those of these devices (None: all) that this process plans for."""
        return Workers.of(devices)

    def sampler(self, order: Any, quantum: int) -> Any:
        """The sampler of this process's part of every step, out of that of all; parts are multiples of the quantum."""
        return order

    def engine_options(
        self, workers: Workers, quantum: int, simulation: Any, options: dict[str, Any]
    ) -> dict[str, Any]:
        """The options to build a training engine with, from those of the user."""
        return options

    def open(self, setting: SyncContext, state: State) -> tuple[Reduce, Any]:
        """What moves `state` on, and the state on the devices in buffers of its own.

        The state is one set of parameters, or what this sync held before.
        """
        raise NotImplementedError

    def answer(self, state: State) -> State:
        """One set of parameters out of what this sync holds: what is evaluated and used."""
        return state

    def end_of(self, sampler: Any, cursor: int, steps: int) -> int | None:
        """The cursor after so many further steps, if this sync counts samples instead of steps; else None."""
        return None

    def fit(self, job: FitJob, state: State) -> tuple[State, History]:
        """Train: step by step, unless a sync has a way of its own."""
        return job.by_steps(state)

    def state_dict(self) -> dict[str, Any]:
        """What the host has to remember, as plain JSON values; it is saved with the controller's."""
        return {}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Continue from a `state_dict`."""


@dataclass(frozen=True)
class FitJob:
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
    rule: Callable[[State], UpdateRule]
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
