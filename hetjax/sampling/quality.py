"""How well each block represents the dataset: class histograms, f, and distances of means and covariances.

    mean distance         |mean of block - mean of all| / rms distance of a sample from the mean of all
    within-class distance the same inside every class, averaged over classes weighted by size
    covariance distance   |cov of block - cov of all|_F / |cov of all|_F

All are 0 for a block that equals the dataset. The mean distance of a random block of n samples is about 1/sqrt(n).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from hetjax.sampling.blocks import Blocks, encode_classes
from hetjax.sampling.submodular.features import flat_features, moments, principal_components
from hetjax.sampling.submodular.greedy import class_kernels
from hetjax.sampling.submodular.objectives import OBJECTIVES, value

_MAX_WIDTH = 1024  # wider features are reduced to this many principal components before their covariance


@dataclass(frozen=True)
class Quality:
    """Measures of one partition; distances of an empty block are NaN."""

    sizes_W: np.ndarray
    classes_WxL: np.ndarray  # number of samples of every class in every block
    values: Mapping[str, np.ndarray]  # objective -> f of every block, summed over classes
    mean_distance_W: np.ndarray
    within_distance_W: np.ndarray
    covariance_distance_W: np.ndarray

    @property
    def class_distance_W(self) -> np.ndarray:
        """Total variation distance between the class distributions of block and dataset: half the L1 distance."""
        share_L = self.classes_WxL.sum(axis=0) / self.classes_WxL.sum()
        own_WxL = _divided(self.classes_WxL.astype(np.float64), self.sizes_W[:, None])
        return 0.5 * np.abs(own_WxL - share_L).sum(axis=1)


def quality(
    features_DxF: np.ndarray,
    partitions: Mapping[str, Blocks],
    *,
    bandwidth: float | str | list[float] = "median",
    objectives: tuple[str, ...] = tuple(OBJECTIVES),
) -> dict[str, Quality]:
    """Measure several partitions of the same samples, with the same features and kernels.

    The classes are those of the first partition. An empty `objectives` skips the kernels, which take most of the time.
    """
    features_DxF, first = flat_features(features_DxF), next(iter(partitions.values()))
    for name, blocks in partitions.items():
        if blocks.size != len(features_DxF) or blocks.workers != first.workers:
            raise ValueError(
                f"The partition {name!r} has {blocks.size:,} samples for {blocks.workers} workers, but there are "
                f"{len(features_DxF):,} rows of features and {first.workers} workers."
            )
    values = {name: {f: np.zeros(first.workers) for f in objectives} for name in partitions}
    if objectives:
        for members, sim_VxV, _ in class_kernels(features_DxF, first.classes_D, bandwidth):
            for name, blocks in partitions.items():
                owner_V = blocks.owner_D[members]
                for f, value_W in values[name].items():
                    value_W += [value(f, sim_VxV, np.flatnonzero(owner_V == j)) for j in range(first.workers)]
    wide = features_DxF.shape[1] > _MAX_WIDTH
    narrow_DxF = principal_components(features_DxF, _MAX_WIDTH) if wide else features_DxF
    codes_D, sizes_L = encode_classes(first.classes_D)
    whole = moments(narrow_DxF)
    means_LxF = _means(features_DxF, codes_D, len(sizes_L))
    return {
        name: Quality(
            sizes_W=blocks.sizes_W,
            classes_WxL=_histogram(blocks.owner_D, codes_D, first.workers, len(sizes_L)),
            values=values[name],
            mean_distance_W=_mean_distances(features_DxF, blocks),
            within_distance_W=_within_distances(features_DxF, blocks, codes_D, means_LxF),
            covariance_distance_W=_covariance_distances(narrow_DxF, blocks, whole[1]),
        )
        for name, blocks in partitions.items()
    }


def _mean_distances(features_DxF: np.ndarray, blocks: Blocks) -> np.ndarray:
    mean_F = features_DxF.mean(axis=0, dtype=np.float64)
    spread = float(np.sqrt(features_DxF.var(axis=0, dtype=np.float64).sum()))
    own_WxF = _means(features_DxF, blocks.owner_D, blocks.workers)
    return _divided(np.linalg.norm(own_WxF - mean_F, axis=1), spread)


def _within_distances(
    features_DxF: np.ndarray, blocks: Blocks, codes_D: np.ndarray, means_LxF: np.ndarray
) -> np.ndarray:
    workers, classes = blocks.workers, len(means_LxF)
    square_D = ((features_DxF - means_LxF[codes_D]) ** 2).sum(axis=1)
    size_L = np.bincount(codes_D, minlength=classes)
    spread_L = np.sqrt(np.bincount(codes_D, square_D, classes) / size_L)
    own_WLxF = _means(features_DxF, blocks.owner_D * classes + codes_D, workers * classes)
    apart_WxL = np.linalg.norm(own_WLxF.reshape(workers, classes, -1) - means_LxF, axis=2)
    relative_WxL = np.where(spread_L > 0, _divided(apart_WxL, spread_L), np.where(np.isnan(apart_WxL), np.nan, 0.0))
    held_WxL = np.where(np.isnan(relative_WxL), 0, size_L)  # classes that a block has no sample of do not count
    return _divided((np.nan_to_num(relative_WxL) * held_WxL).sum(axis=1), held_WxL.sum(axis=1))


def _covariance_distances(features_DxF: np.ndarray, blocks: Blocks, whole_FxF: np.ndarray) -> np.ndarray:
    apart_W = [
        np.linalg.norm(moments(features_DxF[own])[1] - whole_FxF) if len(own) else np.nan for own in blocks.indices
    ]
    return _divided(np.array(apart_W), float(np.linalg.norm(whole_FxF)))


def _means(features_DxF: np.ndarray, group_D: np.ndarray, groups: int) -> np.ndarray:
    """The mean of every group in float64; NaN for an empty group."""
    order_D = np.argsort(group_D, kind="stable")
    size_G = np.bincount(group_D, minlength=groups)
    parts = np.split(order_D, np.cumsum(size_G)[:-1])
    empty_F = np.full(features_DxF.shape[1], np.nan)
    return np.array([features_DxF[p].mean(axis=0, dtype=np.float64) if len(p) else empty_F for p in parts])


def _histogram(owner_D: np.ndarray, codes_D: np.ndarray, workers: int, classes: int) -> np.ndarray:
    return np.bincount(owner_D * classes + codes_D, minlength=workers * classes).reshape(workers, classes)


def _divided(a: np.ndarray, b: np.ndarray | float) -> np.ndarray:
    """A / b, NaN where b is zero."""
    b = np.broadcast_to(np.asarray(b, np.float64), np.shape(a))
    return np.divide(a, b, out=np.full(np.shape(a), np.nan), where=b > 0)
