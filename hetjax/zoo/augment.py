"""Augmentation of one training image from its own random key, so that no split of a batch can change it."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def shift(image: jax.Array, key: jax.Array, *, pixels: int = 1, share: float = 0.5) -> jax.Array:
    """The image [height, width, channels] moved by up to `pixels` either way with probability `share`, edges zero."""
    where, whether = jax.random.split(key)
    moved = jax.random.bernoulli(whether, share).astype(jnp.int32)
    row, column = pixels + moved * jax.random.randint(where, (2,), -pixels, pixels + 1)
    padded = jnp.pad(image, ((pixels, pixels), (pixels, pixels), (0, 0)))
    return jax.lax.dynamic_slice(padded, (row, column, 0), image.shape)
