"""Group normalisation of one image at a time: no statistics across samples, so no split of a batch can change it.

Y. Wu, K. He: Group Normalization, ECCV 2018. Flax's own layer insists on exactly one batch axis in front.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from flax import nnx

from hetjax.zoo.precision import Compute, wide


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
        dtype: Compute = None,
        rngs: nnx.Rngs,
    ):
        self.groups = math.gcd(features, groups)
        self.epsilon = epsilon
        self.dtype = dtype
        self.scale = nnx.Param(jnp.ones(features))
        self.bias = nnx.Param(jnp.zeros(features))

    def __call__(self, x: jax.Array) -> jax.Array:
        grouped = wide(x).reshape(*x.shape[:-1], self.groups, -1)
        axes = (-4, -3, -1)
        centred = grouped - grouped.mean(axes, keepdims=True)
        variance = jnp.square(centred).mean(axes, keepdims=True)
        normal = (centred * jax.lax.rsqrt(variance + self.epsilon)).reshape(x.shape)
        return (normal * self.scale + self.bias).astype(self.dtype or x.dtype)
