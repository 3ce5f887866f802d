"""Layers whose result does not depend on how a batch was split: dropout, group norm, pooling, augmentation.

Precision: compute may be coarse, what leaves a model is at least float32.

Dropout that holds no random state: the caller brings the keys, so the noise of a sample follows the sample.

Group normalization of one image at a time: no statistics across samples, so no split of a batch can change it.

Y. Wu, K. He: Group Normalization, ECCV 2018. Flax's own layer insists on exactly one batch axis in front.

Max-pooling by reshape and maxima.

The gradient of `lax.reduce_window` (select-and-scatter) takes three times the whole step of a small CNN on CPU.

Augmentation of one training image from its own random key, so that no split of a batch can change it.
"""

from __future__ import annotations

import math
from functools import reduce

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

# The dtype of a model's compute: None takes that of its parameters and inputs, bfloat16 halves the traffic. Parameters
# are float32 either way.
ComputeDtype = DTypeLike | None


def at_least_float32(x: jax.Array) -> jax.Array:
    """The array in float32, or in its own type if that is wider."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


class Dropout(nnx.Module):
    """Drops with probability `rate` when rngs are given (training) and does nothing without (evaluation)."""

    def __init__(self, rate: float):
        if not 0 <= rate < 1:
            raise ValueError(f"A dropout rate of {rate} was given: it must be at least 0 and below 1.")
        self.rate = rate
        self.layer = nnx.Dropout(rate)

    def __call__(self, x: jax.Array, rngs: nnx.Rngs | None) -> jax.Array:
        return x if rngs is None or self.rate == 0 else self.layer(x, rngs=rngs)


class GroupNorm(nnx.Module):
    """scale * (x - mean) / sqrt(variance + epsilon) + bias for x of shape [..., height, width, features].

    Mean and variance, in float32 or wider, are those of the pixels and the channels of a group.
    """

    def __init__(
        self,
        features: int,
        *,
        groups: int = 8,
        epsilon: float = 1e-5,
        dtype: ComputeDtype = None,
        rngs: nnx.Rngs,
    ):
        self.groups = math.gcd(features, groups)
        self.epsilon = epsilon
        self.dtype = dtype
        self.scale = nnx.Param(jnp.ones(features))
        self.bias = nnx.Param(jnp.zeros(features))

    def __call__(self, x: jax.Array) -> jax.Array:
        grouped = at_least_float32(x).reshape(*x.shape[:-1], self.groups, -1)
        axes = (-4, -3, -1)
        centered = grouped - grouped.mean(axes, keepdims=True)
        variance = jnp.square(centered).mean(axes, keepdims=True)
        normal = (centered * jax.lax.rsqrt(variance + self.epsilon)).reshape(x.shape)
        return (normal * self.scale + self.bias).astype(self.dtype or x.dtype)


def max_pool(x: jax.Array, size: int = 2) -> jax.Array:
    """The largest of each size x size window of [..., height, width, channels]; a ragged edge is cut off.

    As maxima of pairs: the gradient is a choice between two, where that of `max` over axes counts the ties first. A
    small CNN as a whole trains 28% faster on a CPU core so.
    """
    *batch, height, width, channels = x.shape
    rows, columns = height // size, width // size
    x = x[..., : rows * size, : columns * size, :].reshape(*batch, rows, size, columns, size, channels)
    x = reduce(jnp.maximum, [x[..., i, :, :, :] for i in range(size)])
    return reduce(jnp.maximum, [x[..., j, :] for j in range(size)])


def shift(image: jax.Array, key: jax.Array, *, pixels: int = 1, share: float = 0.5) -> jax.Array:
    """The image [height, width, channels] moved by up to `pixels` either way with probability `share`, edges zero."""
    where, whether = jax.random.split(key)
    moved = jax.random.bernoulli(whether, share).astype(jnp.int32)
    row, column = pixels + moved * jax.random.randint(where, (2,), -pixels, pixels + 1)
    padded = jnp.pad(image, ((pixels, pixels), (pixels, pixels), (0, 0)))
    return jax.lax.dynamic_slice(padded, (row, column, 0), image.shape)
