"""Dropout that holds no random state: the caller brings the keys, so the noise of a sample follows the sample."""

from __future__ import annotations

import jax
from flax import nnx


class Dropout(nnx.Module):
    """Drops with probability `rate` when rngs are given (training) and does nothing without (evaluation)."""

    def __init__(self, rate: float):
        if not 0 <= rate < 1:
            raise ValueError(f"A dropout rate of {rate} was given: it must be at least 0 and below 1.")
        self.rate = rate
        self.layer = nnx.Dropout(rate)

    def __call__(self, x: jax.Array, rngs: nnx.Rngs | None) -> jax.Array:
        return x if rngs is None or self.rate == 0 else self.layer(x, rngs=rngs)
