"""A small convolutional network for images of 4x4 pixels and more."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import jax
from flax import nnx

from hetjax.zoo.dropout import Dropout
from hetjax.zoo.pool import max_pool
from hetjax.zoo.precision import Compute, wide


class CNN(nnx.Module):
    """For each width a 3x3 convolution, relu and 2x2 max-pooling; then a hidden dense layer and the logits.

    Works on one image [height, width, channels] or on any number of them stacked in front.
    """

    def __init__(
        self,
        input_shape: Sequence[int],
        classes: int,
        *,
        widths: Sequence[int] = (32, 64),
        hidden: int = 128,
        dropout: float = 0.0,
        dtype: Compute = None,
        rngs: nnx.Rngs,
    ):
        height, width, channels = input_shape
        shrink = 2 ** len(widths)
        if height < shrink or width < shrink:
            raise ValueError(
                f"Images of {height}x{width} pixels are too small for a CNN that halves them {len(widths)} times: give "
                f"at least {shrink}x{shrink}, fewer widths, or use the mlp."
            )
        sizes = [channels, *widths]
        self.convs = nnx.List([nnx.Conv(a, b, (3, 3), dtype=dtype, rngs=rngs) for a, b in pairwise(sizes)])
        self.dense = nnx.Linear((height // shrink) * (width // shrink) * sizes[-1], hidden, dtype=dtype, rngs=rngs)
        self.dropout = Dropout(dropout)
        self.head = nnx.Linear(hidden, classes, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array, *, rngs: nnx.Rngs | None = None) -> jax.Array:
        for conv in self.convs:
            x = max_pool(jax.nn.relu(conv(x)))
        x = jax.nn.relu(self.dense(x.reshape(*x.shape[:-3], -1)))
        return wide(self.head(self.dropout(x, rngs)))
