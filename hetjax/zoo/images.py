"""Small image models: a multi-layer perceptron, a convolutional network and a residual network.

All take one input, or any number of leading batch axes (ResNet: if its norm does), and return logits in float32 or
wider.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import jax
from flax import nnx

from hetjax.adapters.nnx_versions import List
from hetjax.zoo.layers import ComputeDtype, Dropout, GroupNorm, at_least_float32, max_pool


class MLP(nnx.Module):
    """A multi-layer perceptron with relu on flattened inputs.

    Args:
        input_shape: Shape of one input.
        classes: Number of logits.
        hidden: Widths of the hidden layers.
        dropout: Rate of dropout after each of them.
        dtype: dtype of the computation. Default: that of the parameters.
        rngs: Initialize the parameters.
    """

    def __init__(
        self,
        input_shape: Sequence[int],
        classes: int,
        *,
        hidden: Sequence[int] = (256, 256),
        dropout: float = 0.0,
        dtype: ComputeDtype = None,
        rngs: nnx.Rngs,
    ):
        self.axes = len(input_shape)
        sizes = [math.prod(input_shape), *hidden]
        self.layers = List([nnx.Linear(a, b, dtype=dtype, rngs=rngs) for a, b in pairwise(sizes)])
        self.dropout = Dropout(dropout)
        self.head = nnx.Linear(sizes[-1], classes, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array, *, rngs: nnx.Rngs | None = None) -> jax.Array:
        x = x.reshape(*x.shape[: x.ndim - self.axes], -1)
        for layer in self.layers:
            x = self.dropout(jax.nn.relu(layer(x)), rngs)
        return at_least_float32(self.head(x))


class CNN(nnx.Module):
    """For each width a 3x3 convolution, relu and 2x2 max-pooling; then a hidden dense layer and the logits.

    With the default widths, for images [height, width, channels] of at least 4x4 pixels.

    Args:
        input_shape: (height, width, channels).
        classes: Number of logits.
        widths: Features of the convolutions.
        hidden: Width of the dense layer.
        dropout: Rate of dropout after it.
        dtype: dtype of the computation. Default: that of the parameters.
        rngs: Initialize the parameters.

    Raises:
        ValueError: If the images are too small.
    """

    def __init__(
        self,
        input_shape: Sequence[int],
        classes: int,
        *,
        widths: Sequence[int] = (32, 64),
        hidden: int = 128,
        dropout: float = 0.0,
        dtype: ComputeDtype = None,
        rngs: nnx.Rngs,
    ):
        height, width, channels = input_shape
        shrink = 2 ** len(widths)
        if height < shrink or width < shrink:
            raise ValueError(
                f"Images of {height}x{width} pixels are too small for a CNN that halves them {len(widths)} times: use "
                f"at least {shrink}x{shrink} pixels, fewer widths, or the mlp."
            )
        sizes = [channels, *widths]
        self.convs = List([nnx.Conv(a, b, (3, 3), dtype=dtype, rngs=rngs) for a, b in pairwise(sizes)])
        self.dense = nnx.Linear((height // shrink) * (width // shrink) * sizes[-1], hidden, dtype=dtype, rngs=rngs)
        self.dropout = Dropout(dropout)
        self.head = nnx.Linear(hidden, classes, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array, *, rngs: nnx.Rngs | None = None) -> jax.Array:
        for conv in self.convs:
            x = max_pool(jax.nn.relu(conv(x)))
        x = jax.nn.relu(self.dense(x.reshape(*x.shape[:-3], -1)))
        return at_least_float32(self.head(self.dropout(x, rngs)))


# norm(features, dtype=..., rngs=...) returns a layer that is called with x [..., height, width, features] only.
NormFactory = Callable[..., Callable[[jax.Array], jax.Array]]


class ResidualBlock(nnx.Module):
    """relu(x + norm(conv(relu(norm(conv(x)))))), with a 1x1 convolution of x if the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int, norm: NormFactory, dtype: ComputeDtype, rngs: nnx.Rngs):
        conv = lambda a, b, size, stride: nnx.Conv(
            a, b, (size, size), (stride, stride), use_bias=False, dtype=dtype, rngs=rngs
        )
        self.conv1 = conv(inputs, outputs, 3, stride)
        self.norm1 = norm(outputs, dtype=dtype, rngs=rngs)
        self.conv2 = conv(outputs, outputs, 3, 1)
        self.norm2 = norm(outputs, dtype=dtype, rngs=rngs)
        self.project = conv(inputs, outputs, 1, stride) if stride > 1 or inputs != outputs else None

    def __call__(self, x: jax.Array) -> jax.Array:
        y = jax.nn.relu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        return jax.nn.relu(y + (x if self.project is None else self.project(x)))


class ResNet(nnx.Module):
    """The residual network for CIFAR (He et al., "Deep Residual Learning", CVPR 2016, section 4.2), of depth 6n + 2.

    A 3x3 convolution, three stages of n = `blocks` blocks (each stage halves the image and doubles the width), global
    mean, logits. `norm` is "group" or a NormFactory; batch normalization has to be a factory because its statistics
    depend on how the batch is split.
    """

    def __init__(
        self,
        input_shape: Sequence[int],
        classes: int,
        *,
        blocks: int = 1,
        width: int = 16,
        norm: str | NormFactory = "group",
        dtype: ComputeDtype = None,
        rngs: nnx.Rngs,
    ):
        if isinstance(norm, str):
            if norm != "group":
                raise ValueError(
                    f"norm={norm!r}: expected 'group' or a function norm(features, dtype=, rngs=) that makes a layer. "
                    "Plain batch normalization would make the result depend on how the batch is split."
                )
            norm = GroupNorm
        self.stem = nnx.Conv(input_shape[-1], width, (3, 3), use_bias=False, dtype=dtype, rngs=rngs)
        self.stem_norm = norm(width, dtype=dtype, rngs=rngs)
        stages = []
        features = width
        for stage in range(3):
            for block in range(blocks):
                stride = 2 if stage > 0 and block == 0 else 1
                stages.append(ResidualBlock(features, width * 2**stage, stride, norm, dtype, rngs))
                features = width * 2**stage
        self.blocks = List(stages)
        self.head = nnx.Linear(features, classes, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array, *, rngs: nnx.Rngs | None = None) -> jax.Array:
        x = jax.nn.relu(self.stem_norm(self.stem(x)))
        for block in self.blocks:
            x = block(x)
        return at_least_float32(self.head(x.mean(axis=(-3, -2))))
