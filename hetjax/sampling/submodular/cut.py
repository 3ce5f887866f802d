"""The submodular partition of a data set: class by class, kernel, quotas, greedy."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from hetjax.sampling.blocks import Blocks, checked_rates, numbered, quotas
from hetjax.sampling.submodular.clusters import split_large
from hetjax.sampling.submodular.features import flat_features
from hetjax.sampling.submodular.greedy import TURNS, Progress, fill_blocks
from hetjax.sampling.submodular.kernel import gaussian_kernel, median_bandwidth
from hetjax.sampling.submodular.objectives import OBJECTIVES
from hetjax.sampling.submodular.parts import part_quotas, parts_per_worker

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
    progress: Progress | None = None,
) -> Blocks:
    """Blocks whose samples stand for their class as well as so few can, sized by the workers' rates.

    objective   'facility-location' or 'graph-cut'
    rule        'min-block' as published, 'per-rate', 'fill' or 'parts' (see RULES); 'auto': see `chosen_rule`
    bandwidth   of the Gaussian kernel: 'median' of the distances within each class, or one number
    carry       quotas make up for rounding in the classes before; False: each class by itself, as published
    largest     classes with more samples are cut into k-means parts first; memory grows with its square
    """
    features_DxF, rates_W = flat_features(features_DxF), checked_rates(rates_W)
    if objective not in OBJECTIVES:
        raise ValueError(f"There is no objective {objective!r}. Choose one of {', '.join(OBJECTIVES)}.")
    if len(features_DxF) != len(classes_D):
        raise ValueError(f"There are {len(features_DxF)} rows of features but {len(classes_D)} classes: one each.")
    if largest < 1:
        raise ValueError(f"largest is {largest}: expected at least one sample to a kernel.")
    rule = chosen_rule(rule, rates_W)
    parts_D = split_large(classes_D, features_DxF, largest)
    quota_LxW = quotas(numbered(parts_D)[1], rates_W, carry=carry)
    owner_D = np.empty(len(parts_D), np.int64)
    widths = []
    for (members, sim_VxV, width), quota_W in zip(
        class_kernels(features_DxF, parts_D, bandwidth), quota_LxW, strict=True
    ):
        owner_D[members] = share_out(sim_VxV, quota_W, rates_W, objective, rule, progress)
        widths.append(width)
    settings = {"name": f"{objective}, {rule}", "objective": objective, "rule": rule, "bandwidths": widths}
    return Blocks(owner_D, parts_D, rates_W, settings | {"carry": carry})


def share_out(
    sim_VxV: np.ndarray,
    quota_W: np.ndarray,
    rates_W: np.ndarray,
    objective: str,
    rule: str,
    progress: Progress | None = None,
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


def chosen_rule(rule: str, rates_W: np.ndarray) -> str:
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
    numbers_D, sizes_L = numbered(classes_D)
    width_of = _widths(bandwidth, len(sizes_L))
    for number in range(len(sizes_L)):
        members = np.flatnonzero(numbers_D == number)
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
