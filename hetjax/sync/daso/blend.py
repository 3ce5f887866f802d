"""How an average that comes late is taken into parameters that have moved on.

    paper   x <- (2 S x + P mean) / (2 S + P)      S steps late, P nodes (Coquelin et al., arXiv 2104.05588)
    delta   x <- x + (mean - sent)                 sent: the node's own part of that mean

The paper's rule takes P / (2 S + P) of the steps made since sending back; the second one keeps all of them and moves a
node only by how far it was from the mean when it sent. Both are x <- keep x + take mean - back sent.

The mean is weighted by the samples that a node has in ONE step, w_j = b_j / sum b. A node that makes more steps than
others has moved that much more often already: weights by the samples since the last exchange would count that twice.
"""

from __future__ import annotations

from typing import NamedTuple

BLENDS = ("paper", "delta")


class Terms(NamedTuple):
    """x <- keep x + take mean - back sent."""

    keep: float
    take: float
    back: float


ALL_OF_IT = Terms(0.0, 1.0, 0.0)  # go on from the mean: where nodes wait for each other


def terms(blend: str, late: int, nodes: int) -> Terms:
    """The rule for an average that comes `late` steps after it was sent."""
    if blend == "delta":
        return Terms(1.0, 1.0, 1.0)
    weight = 2.0 * late if late else 1.0
    return Terms(weight / (weight + nodes), nodes / (weight + nodes), 0.0)


def receives_first(blend: str) -> bool:
    """Whether what is pending is blended in before the next parameters are sent, where both fall into one step.

    As published, it is sent first. With `delta` that would never settle: the deviation d of a node from the mean would
    follow d' = d - d_before, which oscillates for ever.
    """
    return blend == "delta"
