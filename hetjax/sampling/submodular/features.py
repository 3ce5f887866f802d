"""Features that similarity is measured on, and pseudo-classes by k-means.

Pseudo-classes replace labels where targets are continuous or missing, and split classes too large for one kernel.
"""

from __future__ import annotations

import numpy as np

_MAX_WIDTH = 4096  # eigenvectors of a larger covariance take minutes and gigabytes
_ROWS = 4096  # per chunk


def flat_features(values: np.ndarray, what: str = "The features") -> np.ndarray:
    """Flatten samples to rows of float32.

    Args:
        values: One row per sample, of any shape.
        what: What the values are, for errors.

    Returns:
        float32 [D, F].

    Raises:
        TypeError: If the values are not numbers, one row per sample.
        ValueError: If a value is not finite.
    """
    values = np.asarray(values)
    if values.ndim == 0 or values.dtype.kind not in "iufb":
        raise TypeError(f"{what} are {values.dtype} of shape {values.shape}; expected numbers, one row per sample.")
    flat_DxF = np.ascontiguousarray(values.reshape(len(values), -1), np.float32)
    finite_D = np.isfinite(flat_DxF.sum(axis=1, dtype=np.float64))
    if not finite_D.all():
        raise ValueError(f"{what} of sample {int(np.argmin(finite_D))} hold NaN or infinity. Fix or remove it.")
    return flat_DxF


def principal_components(features_DxF: np.ndarray, components: int) -> np.ndarray:
    """Project the centered samples onto the directions of largest variance.

    Args:
        features_DxF: Features, one row per sample.
        components: Number of directions.

    Returns:
        float32 [D, components].

    Raises:
        ValueError: If there are no components, or too many features.
    """
    width = features_DxF.shape[1]
    if components < 1:
        raise ValueError(f"components is {components}; expected at least 1 principal component.")
    if width > _MAX_WIDTH:
        raise ValueError(
            f"Samples of {width:,} features are too wide for principal components (at most {_MAX_WIDTH:,}). Give an "
            "embedding function, such as the last hidden layer of a partly trained model."
        )
    mean_F, covariance_FxF = moments(features_DxF)
    _, directions_FxF = np.linalg.eigh(covariance_FxF)
    leading_FxC = directions_FxF[:, ::-1][:, :components]
    out_DxC = np.empty((len(features_DxF), leading_FxC.shape[1]), np.float32)
    for lo in range(0, len(out_DxC), _ROWS):
        out_DxC[lo : lo + _ROWS] = (features_DxF[lo : lo + _ROWS] - mean_F) @ leading_FxC
    return out_DxC


def moments(features_DxF: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and covariance (divided by D) in float64, computed in chunks of rows."""
    mean_F = features_DxF.mean(axis=0, dtype=np.float64)
    covariance_FxF = np.zeros((len(mean_F), len(mean_F)))
    for lo in range(0, len(features_DxF), _ROWS):
        x_RxF = features_DxF[lo : lo + _ROWS] - mean_F
        covariance_FxF += x_RxF.T @ x_RxF
    return mean_F, covariance_FxF / len(features_DxF)


_ITERATIONS = 50
_CLUSTER_ROWS = 8192


def k_means(values_DxF: np.ndarray, clusters: int, seed: int = 0) -> np.ndarray:
    """The cluster of every sample, 0 to clusters - 1; none is empty if there are enough distinct samples.

    Lloyd's algorithm from k-means++ centers (Arthur & Vassilvitskii 2007) until nothing changes, at most 50 iterations.
    A cluster that becomes empty restarts at the sample farthest from its center.
    """
    size = len(values_DxF)
    if not 1 <= clusters <= size:
        raise ValueError(f"Cannot make {clusters} pseudo-classes of {size} samples; expected 1 to {size}.")
    x_DxF = np.asarray(values_DxF, np.float64).reshape(size, -1)
    x_DxF = x_DxF - x_DxF.mean(axis=0)
    center_KxF = _first_centers(x_DxF, clusters, np.random.default_rng(seed))
    nearest_D = np.full(size, -1)
    for _ in range(_ITERATIONS):
        before_D, (nearest_D, distance_D) = nearest_D, _nearest(x_DxF, center_KxF)
        for empty in np.flatnonzero(np.bincount(nearest_D, minlength=clusters) == 0):
            far = int(np.argmax(distance_D))
            nearest_D[far], distance_D[far] = empty, 0.0
        if np.array_equal(nearest_D, before_D):
            break
        count_K = np.bincount(nearest_D, minlength=clusters)
        held = np.flatnonzero(count_K)
        first_K = np.cumsum(count_K) - count_K
        sum_HxF = np.add.reduceat(x_DxF[np.argsort(nearest_D, kind="stable")], first_K[held], axis=0)
        center_KxF[held] = sum_HxF / count_K[held, None]
    return nearest_D


def split_large(classes_D: np.ndarray, features_DxF: np.ndarray, largest: int, seed: int = 0) -> np.ndarray:
    """Renumber the classes from 0, splitting those with more than `largest` samples by k-means.

    Samples that k-means cannot separate are split by index.
    """
    parts: list[np.ndarray] = []
    queue = [np.flatnonzero(classes_D == name) for name in np.unique(classes_D)]
    while queue:
        members = queue.pop(0)
        pieces = -(-len(members) // largest)
        if pieces == 1:
            parts.append(members)
            continue
        nearest = k_means(features_DxF[members], pieces, seed)
        found = [members[nearest == k] for k in range(pieces)]
        if max(map(len, found)) == len(members):
            found = np.array_split(members, pieces)
        queue = [part for part in found if len(part)] + queue
    out_D = np.empty(len(classes_D), np.int64)
    for number, members in enumerate(parts):
        out_D[members] = number
    return out_D


def _first_centers(x_DxF: np.ndarray, clusters: int, rng: np.random.Generator) -> np.ndarray:
    """k-means++: each center is a sample, drawn in proportion to its squared distance to the centers before it."""
    chosen = [int(rng.integers(len(x_DxF)))]
    distance_D = np.full(len(x_DxF), np.inf)
    while len(chosen) < clusters:
        distance_D = np.minimum(distance_D, ((x_DxF - x_DxF[chosen[-1]]) ** 2).sum(axis=1))
        total_D = np.cumsum(distance_D)
        if total_D[-1] > 0:
            chosen.append(int(min(np.searchsorted(total_D, rng.random() * total_D[-1], "right"), len(x_DxF) - 1)))
        else:
            chosen.append(int(rng.integers(len(x_DxF))))
    return x_DxF[chosen]


def _nearest(x_DxF: np.ndarray, center_KxF: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Index of the nearest center, the lowest on ties, and the squared distance to it."""
    nearest_D, distance_D = np.empty(len(x_DxF), np.int64), np.empty(len(x_DxF))
    square_K = np.einsum("kf,kf->k", center_KxF, center_KxF)
    for lo in range(0, len(x_DxF), _CLUSTER_ROWS):
        x_RxF = x_DxF[lo : lo + _CLUSTER_ROWS]
        distance_RxK = np.einsum("rf,rf->r", x_RxF, x_RxF)[:, None] - 2.0 * (x_RxF @ center_KxF.T) + square_K
        nearest = np.argmin(distance_RxK, axis=1)
        nearest_D[lo : lo + _CLUSTER_ROWS] = nearest
        distance_D[lo : lo + _CLUSTER_ROWS] = np.maximum(distance_RxK[np.arange(len(nearest)), nearest], 0.0)
    return nearest_D, distance_D
