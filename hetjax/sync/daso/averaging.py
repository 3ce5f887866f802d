"""Sums and weighted means over nodes, and how a stale mean is blended into parameters that have moved on.

Nodes agree by way of their hosts, so the reductions are NumPy: computed once per number, in node order, and therefore
identical on nodes of any kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from hetjax.sync.replicas import narrowed, wide_sum

Leaves = list[Any]  # arrays with a leading axis of one, on a device or on the host
KINDS = ("total", "compressed-total", "mean", "compressed")  # sums and weighted means, also with 16 bits on the wire


def outgoing(kind: str, leaves: Leaves, base: Sequence[np.ndarray]) -> list[np.ndarray]:
    """What a node sends: its leaves, or one vector of differences to `base`, the last mean, which all nodes have.

    The 8 bits of precision of a bfloat16 are thus those of a small change, never those of the parameters. A compressed
    total cuts all leaves but the last, which holds loss, counts and small gradients.
    """
    own = [np.asarray(leaf).reshape(-1) for leaf in leaves]
    if kind == "compressed-total" and len(own) > 1:
        return [np.concatenate(own[:-1]).astype(ml_dtypes.bfloat16), own[-1]]
    if kind != "compressed":
        return own
    change = [(x - y.reshape(-1)).astype(np.float32, copy=False) for x, y in zip(own, base, strict=True)]
    return [np.concatenate(change).astype(ml_dtypes.bfloat16)]


def combine(kind: str, part_N: Sequence[np.ndarray], weight_N: np.ndarray) -> np.ndarray:
    """The reduction over nodes of one part of what they sent.

        total        sum_j x_j;   compressed-total: bf16(sum_j bf16(x_j))
        mean         sum_j w_j x_j,   w_j = b_j / sum_i b_i
        compressed   bf16(sum_j w_j x_j),   x_j = bf16(own - base)

    b_j are the samples of node j in ONE step. A node that takes more steps than others has already moved more often:
    weights by the samples since the last exchange would count that twice.
    """
    if kind in ("total", "compressed-total"):
        return narrowed(wide_sum(part_N), part_N[0].dtype)
    return narrowed(wide_sum(part_N, weight_N / weight_N.sum()), part_N[0].dtype)


def incoming(kind: str, reduced: Sequence[np.ndarray], shapes: Leaves, base: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The result for leaves of these shapes: what came, or `base` + the mean change."""
    if kind == "compressed":
        changes = _cut(reduced[0], shapes)
        return [y + change.astype(y.dtype) for y, change in zip(base, changes, strict=True)]
    if kind == "compressed-total" and len(shapes) > 1:
        *large, rest = shapes
        cut = [part.astype(x.dtype) for part, x in zip(_cut(reduced[0], large), large, strict=True)]
        return [*cut, reduced[1].reshape(rest.shape)]
    return [part.reshape(x.shape) for part, x in zip(reduced, shapes, strict=True)]


def _cut(vector: np.ndarray, shapes: Leaves) -> list[np.ndarray]:
    """A vector of 16-bit numbers, cut into arrays of these shapes."""
    parts = np.split(vector.astype(np.float32), np.cumsum([x.size for x in shapes])[:-1])
    return [part.reshape(x.shape) for part, x in zip(parts, shapes, strict=True)]


def bytes_sent(kind: str, leaves: list[Any], nodes: int) -> int:
    """The bytes that one node sends for a reduction of these leaves: slices to their owners, and its own to all."""
    exact = 1 if kind == "compressed-total" else 0 if kind == "compressed" else len(leaves)  # leaves, from the end
    width = lambda k, x: 2 if k < len(leaves) - exact else jnp.dtype(x.dtype).itemsize
    return 2 * (nodes - 1) * sum(x.size * width(k, x) for k, x in enumerate(leaves)) // nodes


BLENDS = ("paper", "delta")


class BlendWeights(NamedTuple):
    """x <- keep x + take mean - back sent."""

    keep: float
    take: float
    back: float


TAKE_MEAN = BlendWeights(0.0, 1.0, 0.0)  # continue from the mean: where nodes wait for each other


def blend_weights(blend: str, staleness: int, nodes: int) -> BlendWeights:
    """How a mean that was sent `staleness` = S steps ago enters the parameters of one of P nodes.

        paper   x <- (2 S x + P mean) / (2 S + P)      (Coquelin et al., arXiv 2104.05588)
        delta   x <- x + (mean - sent)                 sent: this node's own parameters in that mean

    The paper's rule undoes P / (2 S + P) of the steps taken since sending. `delta` keeps all of them, and moves a node
    only by its distance from the mean when it sent. A staleness of 0 weighs x as S = 1/2 would.
    """
    if blend == "delta":
        return BlendWeights(1.0, 1.0, 1.0)
    weight = 2.0 * staleness if staleness else 1.0
    return BlendWeights(weight / (weight + nodes), nodes / (weight + nodes), 0.0)


def receives_before_sending(blend: str) -> bool:
    """Whether a pending mean is blended in before the next parameters are sent, if both fall into one step.

    The published method sends first. With `delta` this would never settle: the deviation d of a node from the mean
    would follow d' = d - d_before, which oscillates forever.
    """
    return blend == "delta"
