"""How finely an optimizer can be sliced, found by trying it out, never by its name.

    elements   every parameter is updated by itself: SGD, Adam, Lion
    leaves     the parameters of one array are updated together: LAMB, Adafactor, Muon
    whole      arrays depend on each other: clipping by the global norm

An optimizer is run on a whole tree and on pieces of it, in which the tree keeps its structure and other leaves are
empty. Any difference, or any error, means the coarser slice.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from hetjax.devices.compile import expected
from hetjax.reduce.slices import Granularity

log = logging.getLogger("hetjax")
Tree = Any
Range = tuple[int, int, int]  # (leaf, start, stop)

_MAGNITUDES = (1e-6, 1.0, 1e6)  # of gradients: some optimizers mix leaves only above a threshold
_WITHOUT = 0.0  # a last trial without gradients: weight decay, however small, is the whole update
_UPDATES = 2  # steps that change something
_MOST_STEPS = 16  # gradient accumulation and warm-up start with steps that do not
_TOLERANCE = 1e-4  # of the largest update of a leaf: rounding of another program


def granularity(optimizer: optax.GradientTransformation, params: Tree) -> Granularity:
    """The finest slices on which the optimizer does the same as on the whole tree.

    Args:
        optimizer: any optax optimizer.
        params: trainable parameters, of which only shapes and dtypes are used.

    Returns:
        'elements', 'leaves' or 'whole'.
    """
    leaves, tree = jax.tree.flatten(params)
    size = [int(np.prod(leaf.shape)) for leaf in leaves]
    halves = [[(i, 0, n // 2) for i, n in enumerate(size)], [(i, n // 2, n) for i, n in enumerate(size)]]
    # Any two leaves are apart in one of these splits.
    bits = range(max(1, (len(leaves) - 1).bit_length()))
    groups = [
        [[(i, 0, n) for i, n in enumerate(size) if _has_bit(bit, i) == bool(side)] for side in (0, 1)] for bit in bits
    ]
    leaf_S = leaf_of_state(optimizer, params)
    if leaf_S is None:
        return "whole"
    with expected():
        trial = _Trial(optimizer, leaves, tree, leaf_S)
        if not trial.informative:
            return "whole"
        if trial.agrees(halves, flat=True):
            return "elements"
        if all(trial.agrees(group, flat=False) for group in groups):
            return "leaves"
    return "whole"


def sliced(leaves: Sequence[Any], ranges: Sequence[Range], flat: bool) -> list[Any]:
    """The leaves restricted to these ranges, as vectors if flat. Others are as small as optimizers bear.

    That is an empty vector, or else a single zero of the same rank: some divide by the sizes of an array.
    """
    found: list[Any] = [np.zeros((0,) if flat else (1,) * leaf.ndim, leaf.dtype) for leaf in leaves]
    for i, start, stop in ranges:
        found[i] = leaves[i].reshape(-1)[start:stop] if flat else leaves[i]
    return found


def leaf_of_state(optimizer: optax.GradientTransformation, params: Tree) -> list[int] | None:
    """The parameter that each array of the optimizer's state belongs to; -1: to none; None: unknown.

    An array belongs to the parameter whose shape decides its own. Parameters are numbered by their leaves, and those
    with a given bit in their number are enlarged: one trial per bit instead of one per parameter.
    """
    leaves, tree = jax.tree.flatten(params)

    def shapes(enlarged: Callable[[int], bool]) -> list[tuple[int, ...]]:
        larger = lambda shape: tuple(d + 1 for d in shape) or (2,)
        made = [
            jax.ShapeDtypeStruct(larger(leaf.shape) if enlarged(i) else leaf.shape, leaf.dtype)
            for i, leaf in enumerate(leaves)
        ]
        return [x.shape for x in jax.tree.leaves(jax.eval_shape(optimizer.init, jax.tree.unflatten(tree, made)))]

    try:
        plain, all_larger = shapes(lambda i: False), shapes(lambda i: True)
        bits = [shapes(partial(_has_bit, bit)) for bit in range(len(leaves).bit_length())]
    except Exception as error:
        log.debug("The state of the optimizer cannot be sliced: %s", error)
        return None
    found = []
    for j, (mine, larger) in enumerate(zip(plain, all_larger, strict=True)):
        number = sum(1 << bit for bit, changed in enumerate(bits) if changed[j] != mine)
        if any(changed[j] not in (mine, larger) for changed in bits) or number >= len(leaves):
            return None
        found.append(-1 if mine == larger else number)
    return found


def _has_bit(bit: int, number: int) -> bool:
    return bool(number >> bit & 1)


class _Trial:
    """The updates of an optimizer on a whole tree, and whether those on pieces are the same."""

    def __init__(self, optimizer: optax.GradientTransformation, leaves: Sequence[Any], tree: Any, leaf_S: list[int]):
        self.optimizer, self.tree = optimizer, tree
        state = jax.tree.leaves(jax.eval_shape(optimizer.init, jax.tree.unflatten(tree, leaves)))
        is_key = [jnp.issubdtype(x.dtype, jax.dtypes.prng_key) for x in state]
        self.leaf_S = [leaf for leaf, key in zip(leaf_S, is_key, strict=True) if not key]
        random = np.random.default_rng(0)
        draw = lambda: [random.standard_normal(leaf.shape, np.float32).astype(leaf.dtype) for leaf in leaves]
        self.params, self.grads = draw(), [draw() for _ in range(2)]
        self.expected: dict[float, list[list[np.ndarray]]] = {}
        self.states: dict[float, list[np.ndarray]] = {}
        self.steps = 0
        run = self._compiled(self.params)
        for magnitude in _MAGNITUDES:
            found = self._updates(run, self.params, lambda grads: grads, magnitude, self.steps)
            self.expected[magnitude], self.states[magnitude] = found
            self.steps = max(self.steps, len(self.expected[magnitude]))
        changed = [step for steps in self.expected.values() for step in steps if _nonzero(step)]
        self.informative = len(changed) >= _UPDATES * len(_MAGNITUDES)
        found = self._updates(run, self.params, lambda grads: grads, _WITHOUT, self.steps)
        self.expected[_WITHOUT], self.states[_WITHOUT] = found

    def agrees(self, pieces: Sequence[Sequence[Range]], flat: bool) -> bool:
        """Whether all pieces are updated as in the whole tree."""
        return all(self._piece_agrees([r for r in ranges if r[2] > r[1]], flat) for ranges in pieces)

    def _piece_agrees(self, ranges: Sequence[Range], flat: bool) -> bool:
        take = lambda leaves: sliced(leaves, ranges, flat)
        params = take(self.params)
        try:
            run = self._compiled(params)
            for magnitude, expected_steps in self.expected.items():
                found, state = self._updates(run, params, take, magnitude, len(expected_steps))
                if not self._states_agree(state, self.states[magnitude], ranges, flat):
                    return False
                for mine, whole in zip(found, expected_steps, strict=True):
                    for i, start, stop in ranges:
                        if not _close(mine[i].reshape(-1), whole[i].reshape(-1)[start:stop], whole[i]):
                            return False
        except Exception as error:  # an optimizer may do anything with empty leaves
            log.debug("The optimizer cannot be sliced %s: %s", "into elements" if flat else "into leaves", error)
            return False
        return True

    def _states_agree(self, mine: Sequence[Any], whole: Sequence[Any], ranges: Sequence[Range], flat: bool) -> bool:
        """Whether the state of a piece is what the whole one has for it; so it can be cut and joined."""
        own = {leaf: (start, stop) for leaf, start, stop in ranges}
        for a, b, leaf in zip(mine, whole, self.leaf_S, strict=True):
            if leaf >= 0 and leaf not in own:
                continue
            b = b.reshape(-1)[slice(*own[leaf])] if leaf >= 0 and flat else b
            if a.shape != b.shape and leaf < 0:
                continue  # of a leaf that another piece owns
            if a.shape != b.shape or not _close(a, b, b):
                return False
        return True

    def _compiled(self, params: Sequence[Any]) -> Any:
        update = optax.with_extra_args_support(self.optimizer).update

        def run(grads: list[Any], state: Any, params: list[Any]) -> Any:
            unflat = lambda leaves: jax.tree.unflatten(self.tree, leaves)
            updates, state = update(unflat(grads), state, unflat(params), value=jnp.float32(1.0))
            leaves = [
                jnp.zeros_like(p) if u is None else u for u, p in zip(jax.tree.leaves(updates), params, strict=True)
            ]
            return leaves, state, optax.apply_updates(params, leaves)  # some compare with the first parameters

        return jax.jit(run)

    def _updates(
        self, run: Any, params: list[Any], take: Any, magnitude: float, steps: int
    ) -> tuple[list[list[np.ndarray]], list[np.ndarray]]:
        """Updates of a number of steps (0: until enough of them changed something), and the state after them."""
        state = jax.jit(self.optimizer.init)(jax.tree.unflatten(self.tree, params))
        made: list[list[np.ndarray]] = []
        useful = 0
        while len(made) < (steps or _MOST_STEPS) and (steps or useful < _UPDATES):
            grads = take([g * np.asarray(magnitude, g.dtype) for g in self.grads[len(made) % 2]])
            updates, state, params = run(grads, state, params)
            made.append([np.asarray(u, np.float64) for u in updates])
            useful += _nonzero(made[-1])
        numbers = [leaf for leaf in jax.tree.leaves(state) if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)]
        return made, [np.asarray(leaf, np.float64) for leaf in numbers]


def _close(a: np.ndarray, b: np.ndarray, whole: np.ndarray) -> bool:
    """Whether two parts of an array are the same up to rounding, which is relative to the largest value of `whole`."""
    scale = _TOLERANCE * float(np.max(np.abs(whole), initial=0.0, where=np.isfinite(whole)))
    return np.allclose(a, b, rtol=0.0, atol=scale, equal_nan=True)


def _nonzero(leaves: Sequence[np.ndarray]) -> bool:
    return any(np.any(leaf) for leaf in leaves)
