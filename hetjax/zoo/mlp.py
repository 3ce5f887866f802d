"""A multi-layer perceptron on flattened inputs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import jax
from flax import nnx

from hetjax.zoo.dropout import Dropout
from hetjax.zoo.precision import Compute, wide


class MLP(nnx.Module):
    """Dense layers with relu; works on one input of `input_shape` or on any number of them stacked in front."""

    def __init__(
        self,
        input_shape: Sequence[int],
        classes: int,
        *,
        hidden: Sequence[int] = (256, 256),
        dropout: float = 0.0,
        dtype: Compute = None,
        rngs: nnx.Rngs,
    ):
        self.axes = len(input_shape)
        sizes = [math.prod(input_shape), *hidden]
        self.layers = nnx.List([nnx.Linear(a, b, dtype=dtype, rngs=rngs) for a, b in pairwise(sizes)])
        self.dropout = Dropout(dropout)
        self.head = nnx.Linear(sizes[-1], classes, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array, *, rngs: nnx.Rngs | None = None) -> jax.Array:
        x = x.reshape(*x.shape[: x.ndim - self.axes], -1)
        for layer in self.layers:
            x = self.dropout(jax.nn.relu(layer(x)), rngs)
        return wide(self.head(x))
