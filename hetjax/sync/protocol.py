"""What a sync is: it says what the devices hold between steps, and how the sums of a step move that on.

`allreduce` holds one set of parameters, the same on all workers. Other syncs hold several at once, stacked along a
leading axis (`State.replicas` says how many); their answer is one set again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import jax
import optax

from hetjax.run.layout import Layout
from hetjax.run.reduce import Reduce
from hetjax.run.update import Finish, State, optimiser_step
from hetjax.run.workers import Workers

Tree = Any


@dataclass(frozen=True)
class Rule:
    """How summed gradients become new parameters."""

    optimizer: optax.GradientTransformation
    advance: Callable[[Tree, Tree], Tree] | None  # for the model state, where there is one
    ema_decay: float | None

    def finish(self) -> Finish:
        return optimiser_step(self.optimizer, self.advance, self.ema_decay)


@dataclass(frozen=True)
class Setting:
    """What a sync has to work with in one call of `fit`."""

    workers: Workers
    layout: Layout
    rule: Rule
    transport: str  # 'auto', 'psum' or 'hub'
    samples: int  # in an epoch
    batch: int
    seed: int = 0
    end: int = 0  # the cursor where this training will end, for what depends on how long it is
    capacity: int = 0  # most samples that these workers can take in one step


@runtime_checkable
class Sync(Protocol):
    name: str
    own_parameters: bool  # of every worker, along a leading axis of workers; otherwise one set for all

    def open(self, setting: Setting, state: State) -> Reduce:
        """What moves `state` on, step by step. The state is one set of parameters, or what this sync held before."""
        ...

    def answer(self, state: State) -> State:
        """One set of parameters out of what this sync holds: what is evaluated and used."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """What the host has to remember, as plain JSON values; it is saved with the controller's."""
        ...

    def load_state_dict(self, saved: dict[str, Any]) -> None: ...


@runtime_checkable
class PlansByNode(Protocol):
    """A sync under which every process plans for its own workers only, because steps send nothing between processes."""

    def workers(self, devices: Sequence[jax.Device] | None) -> Workers:
        """Those of these devices (None: all) that this process plans for."""
        ...

    def sampler(self, order: Any, quantum: int) -> Any:
        """The sampler of this process's part of every step, out of that of all; parts are multiples of the quantum."""
        ...
