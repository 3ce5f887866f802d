"""The rule `parts`: workers of unequal rates own unequal numbers of equal parts.

Turns among blocks of unequal size do harm: whoever chooses first in a round, or more often, takes what lies in the
middle and leaves the edges to the others. Blocks of equal size come out alike. So each worker stands for several
parts of nearly one size, the greedy rule deals to the parts, and a worker's block is the union of its parts.
"""

from __future__ import annotations

import numpy as np

_ALIKE = 1.2  # sizes of parts need not be closer than this factor
_MOST = 32  # parts in all, or two a worker if that is more: small parts are no better and cost time


def parts_per_worker(rates_W: np.ndarray) -> np.ndarray:
    """How many parts each worker has: as few as make the largest part at most 20% larger than the smallest.

    Where that takes more than some 32 parts in all, the number below that with the most even sizes.
    """
    share_W = rates_W / rates_W.sum()
    used_W = share_W > 0
    workers = int(used_W.sum())
    best_W, least = used_W.astype(np.int64), np.inf
    for total in range(workers, max(_MOST, 2 * workers) + 1):
        parts_W = np.where(used_W, np.maximum(np.rint(share_W * total), 1), 0).astype(np.int64)
        size_U = share_W[used_W] / parts_W[used_W]
        spread = float(size_U.max() / size_U.min())
        if spread < least:
            best_W, least = parts_W, spread
        if spread <= _ALIKE:
            break
    return best_W


def part_quotas(quota_W: np.ndarray, parts_W: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The quota of every part, a worker's samples spread evenly over its own, and the worker of every part.

    A worker with a quota but no rate (what rounding owed it) has one part.
    """
    parts_W = np.where((parts_W == 0) & (quota_W > 0), 1, parts_W)
    worker_P = np.repeat(np.arange(len(quota_W)), parts_W)
    place_P = np.arange(len(worker_P)) - (np.cumsum(parts_W) - parts_W)[worker_P]
    each_W, odd_W = np.divmod(quota_W, np.maximum(parts_W, 1))
    return each_W[worker_P] + (place_P < odd_W[worker_P]), worker_P
