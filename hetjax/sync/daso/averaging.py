"""Weighted means over nodes, and how a late mean is blended into parameters that have moved on.

The sums and weighted means over nodes, written for an axis `node`: of processes, or stacked on one device.

bfloat16 on the wire: what travels is the difference to the last mean, which all nodes know, so that its 8 bits of
precision are those of a small change and never of the parameters. Each node adds up one part of the vector in full
precision and hands it on: 2 (P - 1) / P times the vector in 16 bits, as in the best sum of P nodes.

How an average that comes late is taken into parameters that have moved on.

    paper   x <- (2 S x + P mean) / (2 S + P)      S steps late, P nodes (Coquelin et al., arXiv 2104.05588)
    delta   x <- x + (mean - sent)                 sent: the node's own part of that mean

The paper's rule takes P / (2 S + P) of the steps made since sending back; the second one keeps all of them and moves a
node only by how far it was from the mean when it sent. Both are x <- keep x + take mean - back sent.

The mean is weighted by the samples that a node has in ONE step, w_j = b_j / sum b. A node that makes more steps than
others has moved that much more often already: weights by the samples since the last exchange would count that twice.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

NODE = "node"
Leaves = list[jax.Array]


def total(parts: Leaves) -> Leaves:
    return jax.lax.psum(parts, NODE)


def mean(leaves: Leaves, weight: jax.Array) -> Leaves:
    """Weighted by `weight` over its sum; counters are rounded."""
    share = weight / jax.lax.psum(weight, NODE)

    def one(x: jax.Array) -> jax.Array:
        if jnp.issubdtype(x.dtype, jnp.floating):
            wide = jnp.promote_types(x.dtype, jnp.float32)
            return jax.lax.psum(x.astype(wide) * share.astype(wide), NODE).astype(x.dtype)
        return jnp.round(jax.lax.psum(x.astype(jnp.float32) * share, NODE)).astype(x.dtype)

    return [one(x) for x in leaves]


def short_mean(leaves: Leaves, weight: jax.Array, before: Leaves, nodes: int) -> Leaves:
    """The weighted mean of floats, with 16 bits a number on the wire; `before` is the mean that all nodes had last."""
    share_N = jax.lax.all_gather(weight, NODE)
    share_N = share_N / share_N.sum()
    moved = _flat([x - y for x, y in zip(leaves, before, strict=True)])
    padded = jnp.pad(moved, (0, -len(moved) % nodes)).reshape(nodes, -1)
    came_NxC = jax.lax.all_to_all(_short(padded), NODE, split_axis=0, concat_axis=0)
    part_C = functools.reduce(jnp.add, [share_N[j] * _long(came_NxC[j]) for j in range(nodes)])  # a `sum` takes thrice
    whole = _long(jax.lax.all_gather(_short(part_C), NODE, tiled=True))[: len(moved)]
    return [y + step for y, step in zip(before, _like(whole, before), strict=True)]


def gathered(notes: jax.Array) -> jax.Array:
    """What every node says, in the order of nodes."""
    return jax.lax.all_gather(notes, NODE)


def bytes_sent(kind: str, leaves: list[Any], nodes: int) -> int:
    """What one node sends for a sum or mean of such leaves, over a ring."""
    width = lambda x: 2 if kind == "short" else jnp.dtype(x.dtype).itemsize
    return 2 * (nodes - 1) * sum(x.size * width(x) for x in leaves) // nodes


def _short(x: jax.Array) -> jax.Array:
    """Rounded to bfloat16, as whole numbers: collectives of XLA's CPU backend would widen floats of 16 bits again."""
    return jax.lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.uint16)


def _long(x: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(x, jnp.bfloat16).astype(jnp.float32)


def _flat(leaves: Leaves) -> jax.Array:
    return jnp.concatenate([jnp.ravel(x).astype(jnp.float32) for x in leaves])


def _like(flat: jax.Array, leaves: Leaves) -> Leaves:
    found, at = [], 0
    for x in leaves:
        found.append(flat[at : at + x.size].reshape(x.shape).astype(x.dtype))
        at += x.size
    return found


BLENDS = ("paper", "delta")


class BlendWeights(NamedTuple):
    """x <- keep x + take mean - back sent."""

    keep: float
    take: float
    back: float


ALL_OF_IT = BlendWeights(0.0, 1.0, 0.0)  # go on from the mean: where nodes wait for each other


def terms(blend: str, late: int, nodes: int) -> BlendWeights:
    """The rule for an average that comes `late` steps after it was sent."""
    if blend == "delta":
        return BlendWeights(1.0, 1.0, 1.0)
    weight = 2.0 * late if late else 1.0
    return BlendWeights(weight / (weight + nodes), nodes / (weight + nodes), 0.0)


def receives_first(blend: str) -> bool:
    """Whether what is pending is blended in before the next parameters are sent, where both fall into one step.

    As published, it is sent first. With `delta` that would never settle: the deviation d of a node from the mean would
    follow d' = d - d_before, which oscillates for ever.
    """
    return blend == "delta"
