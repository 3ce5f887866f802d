"""The one test for NaN and infinity, on the devices."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

Tree = Any

NONFINITE = 1.0
LARGE = 2.0**-10  # levels of workers are added up: a thousand LARGE ones stay below NONFINITE


def nonfinite_level(tree: Tree) -> jax.Array:
    """NONFINITE if an array of the tree holds NaN or infinity, LARGE if only squares of its numbers do, else 0.

    A dot product of each array with itself is the fastest way through it, and a finite one settles the matter. Squares
    overflow before numbers do (above 1e19 in float32): only then is every number looked at.
    """
    arrays = [jnp.ravel(x) for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.inexact) and x.size]
    if not arrays:
        return jnp.float32(0)
    wide = lambda x: jnp.promote_types(x.dtype, jnp.float32)
    squares = [jnp.isfinite(jnp.vdot(x, x, preferred_element_type=wide(x))) for x in arrays]

    def look(arrays: list[jax.Array]) -> jax.Array:
        finite = jnp.all(jnp.stack([jnp.all(jnp.isfinite(x)) for x in arrays]))
        return jnp.where(finite, jnp.float32(LARGE), NONFINITE)

    return jax.lax.cond(jnp.all(jnp.stack(squares)), lambda _: jnp.float32(0), look, arrays)


def all_finite(tree: Tree) -> jax.Array:
    """Whether no array of the tree holds NaN or infinity."""
    return nonfinite_level(tree) < NONFINITE
