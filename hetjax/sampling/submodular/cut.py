"""The submodular partition of a data set (He & Dube, arXiv 2211.00839): class by class, quotas, greedy.

The greedy partition of one class (He & Dube, arXiv 2211.00839): blocks take turns, each takes its best sample.

    A_j = {} for all j;  J = all workers;  R = V
    while R and J:
        j = argmin over J of the rule's key
        if |A_j| < C_j:  v = argmax over R of f(A_j + v) - f(A_j);  move v from R to A_j
        else:            J = J - {j}

Ties go to the lowest worker and the lowest sample.

The rule `parts`: workers of unequal rates own unequal numbers of equal parts.

Turns among blocks of unequal size do harm: whoever chooses first in a round, or more often, takes what lies in the
middle and leaves the edges to the others. Blocks of equal size come out alike. So each worker stands for several
parts of nearly one size, the greedy rule deals to the parts, and a worker's block is the union of its parts.

The submodular partition of a data set: class by class, kernel, quotas, greedy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from hetjax.sampling.blocks import Blocks, encode_classes, quotas, validate_rates
from hetjax.sampling.submodular.features import flat_features, split_large
from hetjax.sampling.submodular.objectives import OBJECTIVES, Objective, gaussian_kernel, median_bandwidth

# Who chooses next: the smallest of these.
TURNS = {
    "min-block": "f(A_j): the poorest block, as published",
    "per-rate": "f(A_j) / r_j: the poorest for its rate",
    "fill": "|A_j| / C_j: the emptiest for its quota",
}
ProgressFn = Callable[[int], None]  # told how many samples were placed since it was last told
_TELL_EVERY = 64


def fill_blocks(
    objective: Objective,
    owner_V: np.ndarray,
    quota_W: np.ndarray,
    rate_W: np.ndarray,
    rule: str,
    progress: ProgressFn | None = None,
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


RULES = {**TURNS, "parts": "equal parts, several for a worker of a high rate (ours)"}

LARGEST = 16_384  # samples of one kernel: 1 GB


def submodular_blocks(
    features_DxF: np.ndarray,
    classes_D: np.ndarray,
    rates_W: np.ndarray,
    *,
    objective: str = "facility-location",
    rule: str = "auto",
    bandwidth: float | str = "median",
    carry: bool = True,
    largest: int = LARGEST,
    progress: ProgressFn | None = None,
) -> Blocks:
    """Blocks whose samples stand for their class as well as so few can, sized by the workers' rates.

    objective   'facility-location' or 'graph-cut'
    rule        'min-block' as published, 'per-rate', 'fill' or 'parts' (see RULES); 'auto': see `resolve_rule`
    bandwidth   of the Gaussian kernel: 'median' of the distances within each class, or one number
    carry       quotas make up for rounding in the classes before; False: each class by itself, as published
    largest     classes with more samples are cut into k-means parts first; memory grows with its square
    """
    features_DxF, rates_W = flat_features(features_DxF), validate_rates(rates_W)
    if objective not in OBJECTIVES:
        raise ValueError(f"There is no objective {objective!r}. Choose one of {', '.join(OBJECTIVES)}.")
    if len(features_DxF) != len(classes_D):
        raise ValueError(f"There are {len(features_DxF)} rows of features but {len(classes_D)} classes: one each.")
    if largest < 1:
        raise ValueError(f"largest is {largest}: expected at least one sample to a kernel.")
    rule = resolve_rule(rule, rates_W)
    parts_D = split_large(classes_D, features_DxF, largest)
    quota_LxW = quotas(encode_classes(parts_D)[1], rates_W, carry=carry)
    owner_D = np.empty(len(parts_D), np.int64)
    widths = []
    for (members, sim_VxV, width), quota_W in zip(
        class_kernels(features_DxF, parts_D, bandwidth), quota_LxW, strict=True
    ):
        owner_D[members] = assign_owners(sim_VxV, quota_W, rates_W, objective, rule, progress)
        widths.append(width)
    settings = {"name": f"{objective}, {rule}", "objective": objective, "rule": rule, "bandwidths": widths}
    return Blocks(owner_D, parts_D, rates_W, settings | {"carry": carry})


def assign_owners(
    sim_VxV: np.ndarray,
    quota_W: np.ndarray,
    rates_W: np.ndarray,
    objective: str,
    rule: str,
    progress: ProgressFn | None = None,
) -> np.ndarray:
    """The owner of every sample of one class, given its kernel and quotas."""
    worker_P = np.arange(len(quota_W))
    if rule == "parts":
        quota_W, worker_P = part_quotas(quota_W, parts_per_worker(rates_W))
        rates_W, rule = rates_W[worker_P], "fill"
    owner_V = np.full(len(sim_VxV), -1)
    state = OBJECTIVES[objective](sim_VxV, len(worker_P))
    for _ in fill_blocks(state, owner_V, quota_W, rates_W, rule, progress):
        pass
    return worker_P[owner_V]


def resolve_rule(rule: str, rates_W: np.ndarray) -> str:
    """'auto' is the published rule at equal rates and 'parts' at unequal ones, where turns leave worse than chance."""
    if rule == "auto":
        used_W = rates_W[rates_W > 0]
        return "min-block" if np.all(used_W == used_W[0]) else "parts"
    if rule not in RULES:
        raise ValueError(f"There is no rule {rule!r}. Choose auto or one of {', '.join(RULES)}.")
    return rule


def class_kernels(
    features_DxF: np.ndarray, classes_D: np.ndarray, bandwidth: float | str | list[float]
) -> Iterator[tuple[np.ndarray, np.ndarray, float]]:
    """Class by class: its samples, their kernel, its bandwidth (given as one number for all, or a list of one each)."""
    codes_D, sizes_L = encode_classes(classes_D)
    width_of = _widths(bandwidth, len(sizes_L))
    for number in range(len(sizes_L)):
        members = np.flatnonzero(codes_D == number)
        width = width_of(number, features_DxF[members])
        yield members, gaussian_kernel(features_DxF[members], width), width


def _widths(bandwidth: float | str | list[float], classes: int) -> Callable[[int, np.ndarray], float]:
    if bandwidth == "median":
        return lambda number, features_VxF: median_bandwidth(features_VxF)
    if isinstance(bandwidth, str):
        raise ValueError(f"The bandwidth is {bandwidth!r}; expected a distance above 0, or 'median'.")
    each = list(bandwidth) if isinstance(bandwidth, list) else [float(bandwidth)] * classes
    if len(each) != classes:
        raise ValueError(f"Got {len(each)} bandwidths for {classes} classes; give one number, or one per class.")
    return lambda number, features_VxF: each[number]
