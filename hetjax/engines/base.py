"""The engine protocol: run the local phase of every worker for given counts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from hetjax.data.prefetch import Rows
from hetjax.devices.workers import Workers
from hetjax.engines.clocks import LocalResult
from hetjax.engines.precision import cast, common_dtype
from hetjax.planning.limits import Limits
from hetjax.reduce.base import Replicas
from hetjax.reduce.layout import Parts
from hetjax.sampling.order import Span

Tree = Any


@dataclass(frozen=True)
class Program:
    """The computation of an engine: sums over rows, with the shapes of its arguments and results.

    Attributes:
        row_sums: (params, model_state, rows, ctl) -> sums.
        sizes: Lengths of the parts of the sums.
        dtype: dtype of the sums.
        params: Shapes of the parameters, a tree of ShapeDtypeStruct.
        model_state: Shapes of the model state.
        row: Shapes of one sample.
        own_parameters: Parameters differ between workers and have a leading axis of 1.
        dtypes: Compute dtypes by kind of device.
        keeps_rows: Results are one output per row, which are kept instead of added.
    """

    row_sums: Callable[[Tree, Tree, Tree, jax.Array], Parts]
    sizes: tuple[int, ...]
    dtype: Any
    params: Tree
    model_state: Tree
    row: Tree
    own_parameters: bool = False
    dtypes: Mapping[str, str] = field(default_factory=dict)
    keeps_rows: bool = False

    def with_own_parameters(self) -> Program:
        """The program for workers that each hold their own parameters."""
        add_axis = lambda tree: jax.tree.map(lambda x: jax.ShapeDtypeStruct((1, *x.shape), x.dtype), tree)
        own = lambda tree: jax.tree.map(lambda x: x[0], tree)
        row_sums = lambda params, state, rows, ctl: self.row_sums(own(params), own(state), rows, ctl)
        params, model_state = add_axis(self.params), add_axis(self.model_state)
        return replace(self, row_sums=row_sums, params=params, model_state=model_state, own_parameters=True)

    def for_kinds(self, kinds: Iterable[str]) -> Program:
        """The program in the compute dtype of these kinds of device.

        Parameters and rows are cast before the loss function. Gradients come out in that dtype and are widened where
        `Layout.pack` lays out the sums, as are the losses before they are added.
        """
        dtype = common_dtype(kinds, self.dtypes)
        if dtype is None:
            return self
        row_sums = lambda params, state, rows, ctl: self.row_sums(cast(params, dtype), state, cast(rows, dtype), ctl)
        return replace(self, row_sums=row_sums)

    def block(self, rows: int) -> Tree:
        """Shapes of a block of rows."""
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct((rows, *x.shape), x.dtype), self.row)

    def zeros(self) -> Parts:
        """The sums over no rows, with a leading axis of 1."""
        return tuple(jnp.zeros((1, size), self.dtype) for size in self.sizes)

    @property
    def ctl(self) -> jax.ShapeDtypeStruct:
        """Shape of the control vector (`adapters.contract.control`)."""
        return jax.ShapeDtypeStruct((4,), np.uint32)


class Engine(Protocol):
    """Compiles ahead of time in its constructor; afterwards counts are data and nothing recompiles."""

    name: str
    program: Program
    workers: Workers
    compiling: bool  # a background compile disturbs the timings

    def limits(self) -> Limits:
        """Current constraints on plans: capacities, quantum, and the price staircase of each kind."""
        ...

    def rows_of(self, worker: int, count: int) -> int:
        """Rows that a worker computes for a count, including padding."""
        ...

    def pack(self, rows: Rows, step: Span, counts_W: np.ndarray, seed: int) -> Any:
        """Lay out the rows of an upcoming step; called while the previous step runs."""
        ...

    def start(self, replicas: Replicas, packed: Any) -> list[Future[LocalResult]]:
        """Start the local phase of this process's workers."""
        ...

    def price_like(self, reference: Any, share: float, bucket: int) -> None:
        """Express work in the unit of another engine of this kind, for rows of another shape.

        Args:
            reference: the engine for the longest rows.
            share: size of a row relative to one of the reference: its price, where prices are not measured.
            bucket: number of the shape.
        """
        ...

    def grow(self, counts_W: np.ndarray | None) -> None:
        """Called between steps: improve the ladder for these counts, in the background; None: for no further ones."""
        ...

    def close(self) -> None:
        """Stop the engine's threads."""
        ...
