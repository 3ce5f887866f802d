"""The batch rule of Adaptive Hogbatch (Y. Ma, F. Rusu, arXiv 2004.08771)."""

from __future__ import annotations

import numpy as np

from hetjax.sync.hogbatch.rules import BatchBounds

ALPHA = 2.0
DEAD_ZONE = 4


def adapted_batch(
    worker: int,
    batch_W: np.ndarray,
    updates_W: np.ndarray,
    bounds: BatchBounds,
    *,
    alpha: float = ALPHA,
    dead_zone: int = DEAD_ZONE,
    taking_part_W: np.ndarray | None = None,
) -> int:
    """The batch of a worker E that asks for work, from u, the updates each worker has made:

        u_E < min of the others - dead_zone:  b_E = max(b_E / alpha, bmin_E)     smaller batches, so more updates
        u_E > max of the others + dead_zone:  b_E = min(b_E alpha, bmax_E)

    Batches are multiples of the smallest one, so they move by that at least. A worker alone keeps its batch. As
    published the dead zone is 0, and then a batch that has to settle between two sizes flips on up to two of three
    requests. Only workers that take part are compared with.
    """
    others_W = np.ones(len(updates_W), bool) if taking_part_W is None else np.array(taking_part_W, bool)
    others_W[worker] = False
    now, mine, least = int(batch_W[worker]), int(updates_W[worker]), int(bounds.lower_W[worker])
    if not others_W.any():
        return now
    if mine < updates_W[others_W].min() - dead_zone:
        return bounds.clip(worker, min(now / alpha, now - least))
    if mine > updates_W[others_W].max() + dead_zone:
        return bounds.clip(worker, max(now * alpha, now + least))
    return now
