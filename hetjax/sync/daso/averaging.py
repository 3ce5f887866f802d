"""Sums and weighted means over nodes, and how a stale mean is blended into parameters that have moved on.

The reductions are written for a named axis `node`: of processes, or of a stacked array on one device (`vmap`).
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from hetjax.sync.replicas import replica_mean

NODE = "node"
Leaves = list[jax.Array]


def total(leaves: Leaves) -> Leaves:
    """The sum over nodes."""
    return jax.lax.psum(leaves, NODE)


def mean(leaves: Leaves, weight: jax.Array) -> Leaves:
    """The weighted mean over nodes (`replica_mean`).

        sum_j w_j x_j,   w_j = b_j / sum_i b_i

    b_j are the samples of node j in ONE step. A node that takes more steps than others has already moved more often:
    weights by the samples since the last exchange would count that twice.
    """
    share = weight / jax.lax.psum(weight, NODE)
    over_nodes = functools.partial(jax.lax.psum, axis_name=NODE)
    return [replica_mean(x, over_nodes, share=share) for x in leaves]


def compressed_mean(leaves: Leaves, weight: jax.Array, base: Leaves, nodes: int) -> Leaves:
    """The weighted mean of floats, sent as bfloat16 differences to `base`, the last mean, which all nodes have.

        base + bf16(sum_j w_j bf16(x_j - base))

    The 8 bits of precision are thus those of a small change, never those of the parameters. Each node adds up one part
    of the vector in full precision and distributes it: 2 (P - 1) / P times the vector in 16 bits, as in the best
    all-reduce over P nodes.
    """
    share_N = jax.lax.all_gather(weight, NODE)
    change = _flat([x - y for x, y in zip(leaves, base, strict=True)])
    mean_change = _sum_in_16_bits(change, share_N / share_N.sum(), nodes)
    return [y + step for y, step in zip(base, _like(mean_change, base), strict=True)]


def compressed_total(leaves: Leaves, nodes: int) -> Leaves:
    """The sum over nodes with 16 bits per number on the wire: the control for `compressed_mean`.

    bf16(sum_j bf16(x_j)), of all leaves but the last, which holds loss, counts and small gradients and stays exact.
    """
    *large, rest = leaves
    if not large:
        return total(leaves)
    return [*_like(_sum_in_16_bits(_flat(large), jnp.ones(nodes), nodes), large), jax.lax.psum(rest, NODE)]


def _sum_in_16_bits(vector: jax.Array, weight_N: jax.Array, nodes: int) -> jax.Array:
    """The weighted sum over nodes of a flat vector; see `compressed_mean`."""
    padded = jnp.pad(vector, (0, -len(vector) % nodes)).reshape(nodes, -1)
    received_NxC = jax.lax.all_to_all(_bfloat16_bits(padded), NODE, split_axis=0, concat_axis=0)
    # Three times as fast as a `sum` over the axis.
    part_C = functools.reduce(jnp.add, [weight_N[j] * _from_bfloat16_bits(received_NxC[j]) for j in range(nodes)])
    return _from_bfloat16_bits(jax.lax.all_gather(_bfloat16_bits(part_C), NODE, tiled=True))[: len(vector)]


def gathered(message: jax.Array) -> jax.Array:
    """The messages of all nodes, in node order."""
    return jax.lax.all_gather(message, NODE)


def bytes_sent(kind: str, leaves: list[Any], nodes: int) -> int:
    """The bytes that one node sends for a reduction of these leaves over a ring; `kind` as in `exchange.KINDS`."""
    exact = 1 if kind == "compressed-total" else 0 if kind == "compressed" else len(leaves)  # leaves, from the end
    width = lambda k, x: 2 if k < len(leaves) - exact else jnp.dtype(x.dtype).itemsize
    return 2 * (nodes - 1) * sum(x.size * width(k, x) for k, x in enumerate(leaves)) // nodes


def _bfloat16_bits(x: jax.Array) -> jax.Array:
    """Rounded to bfloat16, as uint16: XLA's CPU collectives would widen a 16-bit float again."""
    return jax.lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.uint16)


def _from_bfloat16_bits(x: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(x, jnp.bfloat16).astype(jnp.float32)


def _flat(leaves: Leaves) -> jax.Array:
    return jnp.concatenate([jnp.ravel(x).astype(jnp.float32) for x in leaves])


def _like(flat: jax.Array, leaves: Leaves) -> Leaves:
    """A flat vector cut into arrays of the shapes and dtypes of `leaves`."""
    parts, at = [], 0
    for x in leaves:
        parts.append(flat[at : at + x.size].reshape(x.shape).astype(x.dtype))
        at += x.size
    return parts


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
