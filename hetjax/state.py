"""Training states: `State` holds plain arrays, `LiveState` is the result of a step that may still be running."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from hetjax.arguments import whole

Tree = Any
Core = tuple[Tree, Tree, Tree, Tree]  # params, model_state, opt_state, ema: what the devices hold


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class State:
    """Everything that training continues from; a pytree.

    The cursor does not depend on the split, so a run can be resumed on any number of workers.

    Attributes:
        params: parameters, any tree of arrays.
        model_state: what the model carries from step to step, such as BatchNorm statistics; None without.
        opt_state: state of the optax optimizer.
        ema: exponential moving average of the parameters; None without.
        step: number of steps made.
        cursor: number of samples consumed since the start of training.
        replicas: number of parameter sets, where a sync keeps several: all arrays then have a leading axis of this
            size. 0: one set, without that axis.
        more: further arrays of a sync, such as an exchange in flight; None without.
    """

    params: Tree
    model_state: Tree
    opt_state: Tree
    ema: Tree
    step: int = 0
    cursor: int = 0
    replicas: int = 0
    more: Tree = None

    @classmethod
    def of(cls, core: Core, step: int, cursor: int) -> State:
        """Build a state of one parameter set.

        Args:
            core: params, model_state, opt_state and ema.
            step: number of steps made.
            cursor: number of samples consumed.

        Returns:
            The state.
        """
        params, model_state, opt_state, ema = core
        return cls(params, model_state, opt_state, ema, step, cursor)

    @property
    def evaluated(self) -> tuple[Tree, Tree]:
        """The parameters to evaluate, averaged where there is a moving average, and the model state."""
        return (self.params if self.ema is None else self.ema), self.model_state

    @property
    def core(self) -> Core:
        """The arrays: params, model_state, opt_state and ema."""
        return self.params, self.model_state, self.opt_state, self.ema


class Deferred:
    """A part of a state that several processes hold in slices; gathered where it is read, in all processes at once.

    Args:
        gather: gathers it; collective.
        of_state: whether that is the whole state: where members may be lost, its parts are gathered at once.
    """

    def __init__(self, gather: Callable[[], Tree], of_state: bool = False):
        self.gather, self.of_state = gather, of_state


jax.tree_util.register_pytree_node(Deferred, lambda part: ((part.gather(),), None), lambda _, whole: whole[0])


def gathered(state: State, *names: str) -> State:
    """The state with these parts (default: all) gathered where they are deferred; collective if there are any."""
    parts = {name: getattr(state, name) for name in names or ("opt_state", "ema", "params", "model_state", "more")}
    if whole := [part for part in parts.values() if isinstance(part, Deferred) and part.of_state]:
        return whole[0].gather()
    return replace(state, **{name: part.gather() for name, part in parts.items() if isinstance(part, Deferred)})


class ReplicaStack:
    """An array [replicas, ...] of which this process holds some replicas, on devices that may be of several kinds.

    It stands in a `State` where no single JAX array can: every process may have its own backend, and so may devices of
    different kinds. It reads as a NumPy array if all replicas are in this process.

    Args:
        pieces: the replicas of this process, each [1, ...].
        first: index of the first of them.
        count: number of replicas of all processes.
    """

    def __init__(self, pieces: Sequence[Any], first: int, count: int):
        self.pieces, self.first, self.count = tuple(pieces), first, count
        self.shape, self.dtype = (count, *pieces[0].shape[1:]), pieces[0].dtype

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of entries of all replicas."""
        return math.prod(self.shape)

    @property
    def is_fully_addressable(self) -> bool:
        """Whether all replicas are in this process."""
        return len(self.pieces) == self.count

    def addressable_data(self, index: int) -> Any:
        """A replica of this process, counted from its first, with a leading axis of one."""
        return self.pieces[index]

    def own(self) -> np.ndarray:
        """The replicas of this process on the host."""
        return np.concatenate([np.asarray(piece) for piece in self.pieces])

    def map(self, fn: Callable[[Any], Any]) -> ReplicaStack:
        """Apply a function to every replica."""
        return ReplicaStack([fn(piece) for piece in self.pieces], self.first, self.count)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: Any) -> np.ndarray:
        return np.asarray(self)[index]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if not self.is_fully_addressable:
            raise ValueError(
                f"This process holds {len(self.pieces)} of {self.count} replicas. Use trainer.answer(state), which "
                "averages those of all processes, or save a checkpoint, which gathers them."
            )
        return np.asarray(self.own(), dtype)

    def __repr__(self) -> str:
        return f"ReplicaStack({self.dtype}{list(self.shape)}, {len(self.pieces)} of them here)"


class LiveState:
    """The state after a step that may still be running.

    Reading `params`, `model_state` or `ema` waits for the step. The next call of `hetjax.Step` takes the state over and
    reuses its buffers; from then on only the state returned by that call is valid. As a pytree it is the plain `State`.

    Args:
        pipeline: the pipeline that runs the step.
        step: number of steps made, this one included.
        cursor: number of samples consumed, those of this step included.
    """

    def __init__(self, pipeline: Any, step: int, cursor: int):
        self.pipeline, self.step, self.cursor = pipeline, step, cursor

    def whole(self) -> State:
        """Wait for the step and return its plain state. Collective, if several processes hold it in slices."""
        return self.pipeline.state(self.step, self.cursor)

    def view(self) -> State:
        """Wait for the step and return its state; what other processes hold is a `Deferred`."""
        return self.pipeline.state(self.step, self.cursor, "view")

    @property
    def params(self) -> Tree:
        """Parameters after this step."""
        shown = gathered(self.view(), "params").params
        return jax.tree.map(lambda x: x.copy() if isinstance(x, np.ndarray) else x, shown)

    @property
    def model_state(self) -> Tree:
        """Model state, such as BatchNorm statistics; None without."""
        return gathered(self.view(), "model_state").model_state

    @property
    def ema(self) -> Tree:
        """Exponential moving average of the parameters; None without. Read it in all processes."""
        return gathered(self.view(), "ema").ema

    def __repr__(self) -> str:
        return f"LiveState(step={self.step}, cursor={self.cursor})"


jax.tree_util.register_pytree_node(LiveState, lambda state: ((state.whole(),), None), lambda _, whole: whole[0])


def checked(state: Any) -> State:
    """Return the state with Python integers for step and cursor, which a checkpoint may hold as arrays.

    Raises:
        TypeError: if it is not a `State`, for instance the bare parameters.
        ValueError: if step or cursor are out of range.
    """
    if not isinstance(state, State):
        raise TypeError(
            f"state is a {type(state).__module__}.{type(state).__name__}: expected what `init` or an earlier `fit` "
            "returned, as in trainer.fit(trainer.init(params), source, steps=100)."
        )
    return replace(state, step=whole("state.step", state.step, 0), cursor=whole("state.cursor", state.cursor, 0))
