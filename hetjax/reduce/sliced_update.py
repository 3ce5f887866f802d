"""The update of one slice of the model by its owner: optimizer, moving average, and the check for finite values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from hetjax.devices.compile import compile_for, expected
from hetjax.reduce.finite import all_finite
from hetjax.reduce.granularity import Range, leaf_of_state, sliced
from hetjax.reduce.layout import Layout, StepSums
from hetjax.reduce.slices import Granularity, Piece
from hetjax.reduce.update import optimizer_step, state_finite

Tree = Any
Runs = list[np.ndarray]


class StateSlices:
    """Cuts the state of an optimizer into those of pieces, and puts it together again.

    Args:
        optimizer: the optimizer.
        params: trainable parameters, whole; only shapes and dtypes are used.
        granularity: how the pieces were cut.
    """

    def __init__(self, optimizer: optax.GradientTransformation, params: Tree, granularity: Granularity):
        self.optimizer, self.granularity = optimizer, granularity
        self.leaves, self.tree = jax.tree.flatten(params)
        self.flat = granularity == "elements"
        self.whole = jax.eval_shape(optimizer.init, params)
        found = leaf_of_state(optimizer, params) if granularity != "whole" else None
        self.leaf_S = [-1] * len(jax.tree.leaves(self.whole)) if found is None else found

    def params_like(self, ranges: Sequence[Range]) -> list[Any]:
        """Shapes of the parameters of a piece."""
        shape = lambda *leaves: sliced([jnp.zeros(x.shape, x.dtype) for x in leaves], ranges, self.flat)
        return jax.eval_shape(shape, *self.leaves)

    def state_like(self, ranges: Sequence[Range]) -> Tree:
        """Shapes of the state of a piece."""
        return jax.eval_shape(self.optimizer.init, jax.tree.unflatten(self.tree, self.params_like(ranges)))

    def cut(self, opt_state: Tree, ranges: Sequence[Range]) -> Tree:
        """The state of a piece, from the whole one."""
        own = {leaf: (start, stop) for leaf, start, stop in ranges}
        shapes, tree = jax.tree.flatten(self.state_like(ranges))
        found = []
        for value, shape, leaf in zip(jax.tree.leaves(opt_state), shapes, self.leaf_S, strict=True):
            if (leaf < 0 or (leaf in own and not self.flat)) and np.shape(value) == shape.shape:
                found.append(value)
            elif leaf in own:
                start, stop = own[leaf]
                found.append(jnp.asarray(value).reshape(-1)[start:stop])
            else:
                found.append(jnp.zeros(shape.shape, shape.dtype))
        return jax.tree.unflatten(tree, found)

    def own_arrays(self, piece_state: Tree, ranges: Sequence[Range]) -> list[np.ndarray]:
        """What a piece contributes to the whole state: the arrays of its parameters, and all that belong to none."""
        return [np.asarray(data_of(value)) for value in self._selected(piece_state, ranges)]

    def _selected(self, piece_state: Tree, ranges: Sequence[Range]) -> list[Any]:
        own = {leaf for leaf, *_ in ranges}
        leaves = zip(jax.tree.leaves(piece_state), self.leaf_S, strict=True)
        return [value for value, leaf in leaves if leaf < 0 or leaf in own or self.granularity == "whole"]

    def own_arrays_like(self, piece_state: Tree, ranges: Sequence[Range]) -> list[Any]:
        """Shapes of `own_arrays`."""
        return [jax.eval_shape(data_of, x) for x in self._selected(piece_state, ranges)]

    def joined(self, arrays_K: Sequence[Sequence[np.ndarray]], ranges_K: Sequence[Sequence[Range]]) -> Tree:
        """The whole state, from the `own_arrays` of all pieces."""
        shapes, tree = jax.tree.flatten(self.whole)
        found: list[Any] = [None] * len(shapes)
        for arrays, ranges in zip(arrays_K, ranges_K, strict=True):
            own, rest = {leaf: (start, stop) for leaf, start, stop in ranges}, iter(arrays)
            for j, (shape, leaf) in enumerate(zip(shapes, self.leaf_S, strict=True)):
                if leaf >= 0 and leaf not in own:
                    continue
                value = next(rest)
                if leaf >= 0 and self.flat:
                    if found[j] is None:
                        found[j] = np.empty(shape.size, value.dtype)
                    start, stop = own[leaf]
                    found[j][start:stop] = value
                elif found[j] is None or np.shape(found[j]) != shape.shape:  # of a leaf that another piece owns
                    found[j] = value
        made = [value_like(value, shape) for value, shape in zip(found, shapes, strict=True)]
        return jax.tree.unflatten(tree, made)


def _is_key(value: Any) -> bool:
    return hasattr(value, "dtype") and jnp.issubdtype(value.dtype, jax.dtypes.prng_key)


def data_of(value: Any) -> Any:
    """A PRNG key as integers; other values unchanged."""
    return jax.random.key_data(value) if _is_key(value) else value


def value_like(value: np.ndarray, shape: jax.ShapeDtypeStruct) -> Any:
    """The inverse of `data_of`."""
    if _is_key(shape):
        return jax.random.wrap_key_data(jnp.asarray(value).reshape(*shape.shape, -1), impl=jax.random.key_impl(shape))  # type: ignore[arg-type]
    return value.reshape(shape.shape)


@dataclass
class OwnedPiece:
    """What the owner of a piece holds: the state of its optimizer, its moving average, and parameters of its own."""

    opt_state: Tree
    ema: Runs | None
    masters: Runs | None = None  # None: those of all processes


class PieceProgram:
    """The compiled update of one piece, on its owner's device or host."""

    def __init__(
        self,
        piece: Piece,
        slices: StateSlices,
        layout: Layout,
        ema_decay: float | None,
        device: jax.Device,
    ):
        self.piece, self.slices, self.layout, self.device = piece, slices, layout, device
        self.has_ema = ema_decay is not None
        self.finish = optimizer_step(slices.optimizer, None, ema_decay)
        run = [jax.ShapeDtypeStruct((stop - start,), layout.dtype) for _, start, stop in piece.runs]
        self.state_like = opt_state = slices.state_like(piece.ranges)
        scalar = jax.ShapeDtypeStruct((), layout.dtype)
        arguments = run, opt_state, run if self.has_ema else None, run, (scalar,) * 4
        with expected():
            (self._run,) = compile_for(self._update, arguments, [device])

    def _tree(self, runs: Sequence[jax.Array]) -> Tree:
        """The tree of a piece from its runs: other leaves are as in `sliced`."""
        vector = jnp.concatenate(list(runs)) if len(runs) > 1 else runs[0]
        leaves = [jnp.zeros((0,) if self.slices.flat else (1,) * leaf.ndim, leaf.dtype) for leaf in self.slices.leaves]
        at = 0
        for leaf, start, stop in self.piece.ranges:
            like = self.slices.leaves[leaf]
            part = vector[at : at + stop - start]
            leaves[leaf] = (part if self.slices.flat else part.reshape(like.shape)).astype(like.dtype)
            at += stop - start
        return jax.tree.unflatten(self.slices.tree, leaves)

    def _runs(self, tree: Tree) -> list[jax.Array]:
        leaves = jax.tree.leaves(tree)
        vector = jnp.concatenate([leaves[leaf].reshape(-1).astype(self.layout.dtype) for leaf, *_ in self.piece.ranges])
        cuts = np.cumsum([stop - start for _, start, stop in self.piece.runs])[:-1]
        return jnp.split(vector, cuts)

    def _update(
        self,
        params: list[jax.Array],
        opt_state: Tree,
        ema: list[jax.Array] | None,
        grads: list[jax.Array],
        scalars: Any,
    ) -> tuple[list[jax.Array], Tree, list[jax.Array] | None, jax.Array]:
        weight, loss, scale, level = scalars
        sums = StepSums(self._tree([g * scale for g in grads]), None, loss, weight, weight, {})
        core = self._tree(params), None, opt_state, None if ema is None else self._tree(ema)
        new = self.finish(core, sums)
        fine = all_finite(new[0]) & jax.lax.cond(level > 0, state_finite, lambda _: jnp.bool_(True), new)
        return self._runs(new[0]), new[2], None if ema is None else self._runs(new[3]), ~fine

    def place(self, owned: OwnedPiece) -> OwnedPiece:
        """Copy the state of a piece to the device."""
        put = lambda tree: jax.tree.map(jnp.copy, jax.device_put(tree, self.device))
        with expected():
            return OwnedPiece(put(owned.opt_state), None if owned.ema is None else put(owned.ema))

    def __call__(
        self, params: Runs, owned: OwnedPiece, grads: Runs, weight: float, loss: float, scale: float, level: float
    ) -> tuple[Runs, OwnedPiece, bool]:
        """Apply the optimizer to g = scale * grads / weight.

        Returns:
            The new parameters as host arrays, the new state, and whether the update was not finite.
        """
        scalars = tuple(np.asarray(x, self.layout.dtype) for x in (weight, loss, scale, level))
        new, opt_state, ema, bad = self._run(params, owned.opt_state, owned.ema, grads, scalars)
        return [np.asarray(run) for run in new], OwnedPiece(opt_state, ema), bool(bad)
