"""Test arrays on the devices for NaN and infinity."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

Tree = Any

NONFINITE = 1.0
LARGE = 2.0**-10  # levels are summed over workers: a thousand times LARGE stays below NONFINITE


def nonfinite_level(tree: Tree) -> jax.Array:
    """NONFINITE if the tree holds NaN or infinity, LARGE if only the squares of its values do, else 0.

    The dot product of each array with itself is the fastest test, and sufficient if finite. Squares overflow first
    (values above 1e19 in float32); only then is every value checked.
    """
    arrays = [jnp.ravel(x) for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.inexact) and x.size]
    if not arrays:
        return jnp.float32(0)
    wide = lambda x: jnp.promote_types(x.dtype, jnp.float32)
    squares = [jnp.isfinite(jnp.vdot(x, x, preferred_element_type=wide(x))) for x in arrays]

    def check_values(arrays: list[jax.Array]) -> jax.Array:
        finite = jnp.all(jnp.stack([jnp.all(jnp.isfinite(x)) for x in arrays]))
        return jnp.where(finite, jnp.float32(LARGE), NONFINITE)

    return jax.lax.cond(jnp.all(jnp.stack(squares)), lambda _: jnp.float32(0), check_values, arrays)


def all_finite(tree: Tree) -> jax.Array:
    """Whether the tree is free of NaN and infinity."""
    return nonfinite_level(tree) < NONFINITE
