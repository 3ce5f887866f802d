"""Precision: compute may be coarse, what leaves a model is at least float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

# The dtype of a model's compute: None takes that of its parameters and inputs, bfloat16 halves the traffic. Parameters
# are float32 either way.
Compute = DTypeLike | None


def wide(x: jax.Array) -> jax.Array:
    """The array in float32, or in its own type if that is wider."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))
