"""The interface of a sync: what the devices hold between steps, and how the sums of a step update it.

`allreduce` holds one set of parameters, identical on all workers. Other syncs hold several replicas, stacked along a
leading axis of length `State.replicas`; `Sync.answer` reduces them to one set.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from hetjax.data.source import Source
from hetjax.devices.workers import DeviceChoice, Workers
from hetjax.engines.session import Session
from hetjax.history import History, Record, Recorder
from hetjax.reduce.base import Reduce, Replicas
from hetjax.reduce.layout import Layout
from hetjax.reduce.transports import ReduceOptions
from hetjax.reduce.update import UpdateRule
from hetjax.sampling.order import Sampler
from hetjax.simulation.speeds import Simulation
from hetjax.state import State

Tree = Any


@dataclass(frozen=True)
class SyncContext:
    """What a sync works with in one run."""

    workers: Workers
    layout: Layout
    rule: UpdateRule
    options: ReduceOptions  # how sums travel
    batch: int
    seed: int = 0
    capacity: int = 0  # the most samples that these workers can take in one step
    samples: int | None = None  # per epoch; None: unknown
    end: int | None = None  # the cursor at which training ends; None: unknown


class Sync:
    """When and how the workers' models agree.

    Subclasses implement `open` and override what differs from the default: one set of parameters for all workers, and
    steps that all workers take together.
    """

    name: ClassVar[str]
    own_parameters: ClassVar[bool] = False  # each worker has its own parameters, along a leading axis of workers
    stepped: ClassVar[bool] = True  # there are global steps; False for asynchronous methods

    @property
    def by_node(self) -> bool:
        """Whether this process plans only for its own workers, as one node of several."""
        return False

    def workers(self, devices: DeviceChoice) -> Workers:
        """The workers that this process plans for, out of these devices or this choice of them (default: all)."""
        return Workers.of(devices)

    def sampler(self, order: Any, quantum: int) -> Any:
        """The sampler of this process's part of every step, in multiples of `quantum`, given the global sampler."""
        return order

    def engine_options(
        self, workers: Workers, quantum: int, simulation: Any, options: dict[str, Any]
    ) -> dict[str, Any]:
        """The options of the training engine, derived from the user's."""
        return options

    def open(self, context: SyncContext, state: State) -> tuple[Reduce, Any]:
        """Start a run.

        Args:
            context: workers, layout and update rule of the run.
            state: one set of parameters, or the replicas that this sync held before.

        Returns:
            The reduce, and the core that it updates, in buffers of its own.
        """
        raise NotImplementedError

    def answer(self, state: State) -> State:
        """The state with one set of parameters: the one to evaluate and to use."""
        return state

    def end_of(self, sampler: Any, cursor: int, steps: int) -> int | None:
        """The cursor after this number of further steps, if this sync counts samples instead of steps; else None."""
        return None

    def fit(self, job: FitJob, state: State) -> tuple[State, History]:
        """Train to the end of the job; by default step by step."""
        return job.by_steps(state)

    def state_dict(self) -> dict[str, Any]:
        """The state on the host as JSON values, saved beside the controller's."""
        return {}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Continue from a `state_dict`."""


@dataclass(frozen=True)
class FitJob:
    """One call of `Trainer.fit`, as a sync sees it. What only some syncs need is a callable, made on demand."""

    workers: Workers
    sampler: Any
    source: Source
    end: int  # the cursor at which training ends
    simulation: Simulation | None
    wait_limit: float
    by_steps: Callable[[State], tuple[State, History]]  # trains step by step
    open_session: Callable[[State], Session]  # engine, clocks and layout for this source
    rule: Callable[[State], UpdateRule]
    record: Callable[[History], Recorder]  # writes the history of this call
    stopping: Callable[[], bool]
    saving: Callable[[], bool]  # whether a checkpoint was requested since the last call
    check: Callable[[Record], None]  # raises for a loss or gradient that is not finite
    calibrate: Callable[[Session, Replicas], None]  # fixes the simulated row time

    @property
    def order(self) -> Sampler:
        """The global order of samples; only without shards."""
        assert isinstance(self.sampler, Sampler)
        return self.sampler

    @property
    def batch(self) -> int:
        """The global batch."""
        return self.sampler.batch
