"""Test arrays on the devices for NaN and infinity."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Tree = Any

NONFINITE = 1.0
LARGE = 2.0**-10  # levels are summed over workers: a thousand times LARGE stays below NONFINITE
_SMALL = 2**14  # elements: on accelerators, smaller arrays are tested together


def nonfinite_level(tree: Tree) -> jax.Array:
    """NONFINITE if the tree holds NaN or infinity, LARGE if only the squares of its values may do, else 0.

    On a CPU the dot product of each array with itself is the fastest test, and sufficient if finite. Squares overflow
    first (values above 1e19 in float32); only then is every value checked. On accelerators one pass over each array is
    as fast, and half of the kernels to compile.
    """
    arrays = [jnp.ravel(x) for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.inexact) and x.size]
    if not arrays:
        return jnp.float32(0)
    return jax.lax.platform_dependent(arrays, cpu=_by_squares, default=_in_one_pass)


def all_finite(tree: Tree) -> jax.Array:
    """Whether the tree is free of NaN and infinity."""
    return nonfinite_level(tree) < NONFINITE


def _by_squares(arrays: list[jax.Array]) -> jax.Array:
    squares = [jnp.isfinite(jnp.vdot(x, x, preferred_element_type=_wide(x.dtype))) for x in arrays]

    def check_values(arrays: list[jax.Array]) -> jax.Array:
        finite = jnp.all(jnp.stack([jnp.all(jnp.isfinite(x)) for x in arrays]))
        return jnp.where(finite, jnp.float32(LARGE), NONFINITE)

    return jax.lax.cond(jnp.all(jnp.stack(squares)), lambda _: jnp.float32(0), check_values, arrays)


def _in_one_pass(arrays: list[jax.Array]) -> jax.Array:
    """The largest grade of all values: 0, 1 above the root of the largest number, 2 if not finite."""
    together: dict[Any, list[jax.Array]] = {}
    for k, x in enumerate(arrays):
        together.setdefault(x.dtype if x.size < _SMALL else k, []).append(x)
    grades = [jnp.max(_grades(xs[0] if len(xs) == 1 else jnp.concatenate(xs))) for xs in together.values()]
    grade = jnp.max(jnp.stack(grades))
    return jnp.where(grade == 2, NONFINITE, jnp.where(grade == 1, LARGE, 0.0)).astype(jnp.float32)


def _grades(x: jax.Array) -> jax.Array:
    size = jnp.abs(x)
    root = np.sqrt(float(jnp.finfo(_wide(x.dtype)).max)) / 2**16  # a sum of squares overflows before a square
    large = (size > min(root, float(jnp.finfo(x.dtype).max))).astype(jnp.int32)
    return jnp.where(jnp.isfinite(x), large, 2)


def _wide(dtype: Any) -> Any:
    return jnp.promote_types(dtype, jnp.float32)
