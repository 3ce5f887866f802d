"""The submodular partition of a dataset (He & Dube, arXiv 2211.00839), class by class: kernel, quotas, greedy.

Within a class blocks take turns, and each takes its best sample:

    A_j = {} for all j;  J = all workers;  R = V
    while R and J:
        j = argmin over J of the rule's key
        if |A_j| < C_j:  v = argmax over R of f(A_j + v) - f(A_j);  move v from R to A_j
        else:            J = J - {j}

Ties go to the lowest worker and the lowest sample.

Blocks of equal size come out alike, but blocks of unequal size do not: the one that chooses first, or more often,
takes the samples in the middle of the class and leaves the outer ones to the others. The rule `parts` avoids this: each
worker owns several parts of nearly equal size, the parts take turns, and a worker's block is the union of its parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from hetjax.sampling.blocks import Blocks, encode_classes, quotas, validate_rates
from hetjax.sampling.submodular.features import flat_features, split_large
from hetjax.sampling.submodular.objectives import OBJECTIVES, Objective, gaussian_kernel, median_bandwidth

# The worker with the smallest key chooses next.
TURNS = {
    "min-block": "f(A_j): the block of lowest value, as published",
    "per-rate": "f(A_j) / r_j: the lowest value relative to its rate",
    "fill": "|A_j| / C_j: the smallest relative to its quota",
}
ProgressFn = Callable[[int], None]  # called with the number of samples assigned since the last call
_REPORT_EVERY = 64


def fill_blocks(
    objective: Objective,
    owner_V: np.ndarray,
    quota_W: np.ndarray,
    rate_W: np.ndarray,
    rule: str,
    progress: ProgressFn | None = None,
) -> Iterator[tuple[int, int]]:
    """Assign samples without an owner (-1) to blocks below their quota; yield (worker, sample) of each turn.

    `owner_V` is updated in place; `objective` has to hold the blocks that it starts with.
    """
    workers = len(quota_W)
    size_W = np.bincount(owner_V[owner_V >= 0], minlength=workers)
    objective.gain_WxV[:, owner_V >= 0] = -np.inf
    key = _key(rule, objective, size_W, quota_W, rate_W)
    open_W = size_W < quota_W
    left = unreported = min(int((owner_V < 0).sum()), int((quota_W - size_W)[open_W].sum()))
    while left:
        worker = int(np.argmin(np.where(open_W, key(), np.inf)))
        sample = int(np.argmax(objective.gain_WxV[worker]))
        objective.add(worker, sample)
        objective.gain_WxV[:, sample] = -np.inf
        owner_V[sample] = worker
        size_W[worker] += 1
        open_W[worker] = size_W[worker] < quota_W[worker]
        left -= 1
        if progress is not None and (left % _REPORT_EVERY == 0):
            progress(unreported - left)
            unreported = left
        yield worker, sample


def _key(
    rule: str, objective: Objective, size_W: np.ndarray, quota_W: np.ndarray, rate_W: np.ndarray
) -> Callable[[], np.ndarray]:
    # A worker without rate or quota never takes a turn; its divisor only must not be zero.
    if rule == "min-block":
        return lambda: objective.value_W
    if rule == "per-rate":
        divisor_W = np.where(rate_W > 0, rate_W, 1.0)
        return lambda: objective.value_W / divisor_W
    if rule == "fill":
        divisor_W = np.where(quota_W > 0, quota_W, 1)
        return lambda: size_W / divisor_W
    raise ValueError(f"There is no rule {rule!r}. Choose one of {', '.join(TURNS)}.")


_MAX_SPREAD = 1.2  # largest / smallest part that counts as equal
_MAX_PARTS = 32  # in total, or two per worker if that is more: smaller parts cost time and gain nothing


def parts_per_worker(rates_W: np.ndarray) -> np.ndarray:
    """Number of parts per worker: the fewest for which the largest part is at most 20% larger than the smallest.

    If that takes too many parts, the number up to the limit with the most even sizes.
    """
    share_W = rates_W / rates_W.sum()
    used_W = share_W > 0
    workers = int(used_W.sum())
    best_W, least = used_W.astype(np.int64), np.inf
    for total in range(workers, max(_MAX_PARTS, 2 * workers) + 1):
        parts_W = np.where(used_W, np.maximum(np.rint(share_W * total), 1), 0).astype(np.int64)
        size_U = share_W[used_W] / parts_W[used_W]
        spread = float(size_U.max() / size_U.min())
        if spread < least:
            best_W, least = parts_W, spread
        if spread <= _MAX_SPREAD:
            break
    return best_W


def part_quotas(quota_W: np.ndarray, parts_W: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Spread each worker's quota evenly over its parts; return the quota and the worker of every part.

    A worker with a quota but no rate (from rounding) has one part.
    """
    parts_W = np.where((parts_W == 0) & (quota_W > 0), 1, parts_W)
    worker_P = np.repeat(np.arange(len(quota_W)), parts_W)
    rank_P = np.arange(len(worker_P)) - (np.cumsum(parts_W) - parts_W)[worker_P]
    each_W, odd_W = np.divmod(quota_W, np.maximum(parts_W, 1))
    return each_W[worker_P] + (rank_P < odd_W[worker_P]), worker_P


RULES = {**TURNS, "parts": "equal parts, more of them for a faster worker (ours)"}

LARGEST = 16_384  # samples per kernel, which then takes 1 GB


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
    """Greedily maximize f(A_j) of every worker's block A_j within each class, with sizes in proportion to the rates.

    Args:
        features_DxF: Features that similarity is measured on.
        classes_D: Labels or pseudo-classes; each class is divided separately.
        rates_W: Relative speeds of the workers.
        objective: f, "facility-location" or "graph-cut" (see objectives.py).
        rule: Which block chooses next: "min-block" as published, "per-rate", "fill" or "parts" (see RULES), or "auto"
            (see `resolve_rule`).
        bandwidth: Of the Gaussian kernel: "median" of the distances within each class, or a number.
        carry: Carry rounding errors of the quotas from class to class (see `quotas`); False as published.
        largest: Classes with more samples are first split by k-means. Memory grows with its square.
        progress: Called with the number of samples assigned since the last call.

    Returns:
        The blocks. Their classes are those after splitting, numbered from 0.

    Raises:
        ValueError: If an option is unknown, or features, classes and rates do not fit each other.
    """
    features_DxF, rates_W = flat_features(features_DxF), validate_rates(rates_W)
    if objective not in OBJECTIVES:
        raise ValueError(f"There is no objective {objective!r}. Choose one of {', '.join(OBJECTIVES)}.")
    if len(features_DxF) != len(classes_D):
        raise ValueError(
            f"There are {len(features_DxF)} rows of features but {len(classes_D)} classes: give one per row."
        )
    if largest < 1:
        raise ValueError(f"largest is {largest}: expected at least one sample per kernel.")
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
    """Partition one class, given its kernel and quotas; return the owner of every sample."""
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
    """Resolve "auto": "min-block" at equal rates, "parts" at unequal ones, where the others are worse than random."""
    if rule == "auto":
        used_W = rates_W[rates_W > 0]
        return "min-block" if np.all(used_W == used_W[0]) else "parts"
    if rule not in RULES:
        raise ValueError(f"There is no rule {rule!r}. Choose auto or one of {', '.join(RULES)}.")
    return rule


def class_kernels(
    features_DxF: np.ndarray, classes_D: np.ndarray, bandwidth: float | str | list[float]
) -> Iterator[tuple[np.ndarray, np.ndarray, float]]:
    """Yield (samples, kernel, bandwidth) of every class; `bandwidth` may be a list with one number per class."""
    codes_D, sizes_L = encode_classes(classes_D)
    width_of = _widths(bandwidth, len(sizes_L))
    for code in range(len(sizes_L)):
        members = np.flatnonzero(codes_D == code)
        width = width_of(code, features_DxF[members])
        yield members, gaussian_kernel(features_DxF[members], width), width


def _widths(bandwidth: float | str | list[float], classes: int) -> Callable[[int, np.ndarray], float]:
    if bandwidth == "median":
        return lambda code, features_VxF: median_bandwidth(features_VxF)
    if isinstance(bandwidth, str):
        raise ValueError(f"The bandwidth is {bandwidth!r}; expected a distance above 0, or 'median'.")
    each = list(bandwidth) if isinstance(bandwidth, list) else [float(bandwidth)] * classes
    if len(each) != classes:
        raise ValueError(f"Got {len(each)} bandwidths for {classes} classes; give one number, or one per class.")
    return lambda code, features_VxF: each[code]
