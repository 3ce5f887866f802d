"""The greedy partition of one class (He & Dube, arXiv 2211.00839): blocks take turns, each takes its best sample.

    A_j = {} for all j;  J = all workers;  R = V
    while R and J:
        j = argmin over J of the rule's key
        if |A_j| < C_j:  v = argmax over R of f(A_j + v) - f(A_j);  move v from R to A_j
        else:            J = J - {j}

Ties go to the lowest worker and the lowest sample.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from hetjax.sampling.submodular.objectives import Objective

# Who chooses next: the smallest of these.
TURNS = {
    "min-block": "f(A_j): the poorest block, as published",
    "per-rate": "f(A_j) / r_j: the poorest for its rate",
    "fill": "|A_j| / C_j: the emptiest for its quota",
}
Progress = Callable[[int], None]  # told how many samples were placed since it was last told
_TELL_EVERY = 64


def fill_blocks(
    objective: Objective,
    owner_V: np.ndarray,
    quota_W: np.ndarray,
    rate_W: np.ndarray,
    rule: str,
    progress: Progress | None = None,
) -> Iterator[tuple[int, int]]:
    """Give the samples without an owner (-1) to blocks below their quota, one by one: (worker, sample) of each turn.

    `owner_V` is filled in on the way, and `objective` has to hold the blocks that it starts with.
    """
    workers = len(quota_W)
    size_W = np.bincount(owner_V[owner_V >= 0], minlength=workers)
    objective.gain_WxV[:, owner_V >= 0] = -np.inf
    key = _key(rule, objective, size_W, quota_W, rate_W)
    open_W = size_W < quota_W
    left = untold = min(int((owner_V < 0).sum()), int((quota_W - size_W)[open_W].sum()))
    while left:
        worker = int(np.argmin(np.where(open_W, key(), np.inf)))
        sample = int(np.argmax(objective.gain_WxV[worker]))
        objective.add(worker, sample)
        objective.gain_WxV[:, sample] = -np.inf
        owner_V[sample] = worker
        size_W[worker] += 1
        open_W[worker] = size_W[worker] < quota_W[worker]
        left -= 1
        if progress is not None and (left % _TELL_EVERY == 0):
            progress(untold - left)
            untold = left
        yield worker, sample


def _key(
    rule: str, objective: Objective, size_W: np.ndarray, quota_W: np.ndarray, rate_W: np.ndarray
) -> Callable[[], np.ndarray]:
    # A worker without rate or quota never takes a turn: its divisor is of no account, but must not be zero.
    if rule == "min-block":
        return lambda: objective.value_W
    if rule == "per-rate":
        divisor_W = np.where(rate_W > 0, rate_W, 1.0)
        return lambda: objective.value_W / divisor_W
    if rule == "fill":
        divisor_W = np.where(quota_W > 0, quota_W, 1)
        return lambda: size_W / divisor_W
    raise ValueError(f"There is no rule {rule!r}. Choose one of {', '.join(TURNS)}.")
