"""How alike two samples are: a Gaussian kernel on a grid so coarse that sums of it are exact.

    sim(u, v) = exp(-|x_u - x_v|^2 / (2 h^2)),  rounded to multiples of 2**-24

Every such number is a float32, and float64 adds up to 2**29 of them without rounding. So gains that are kept up to date
by differences are the same numbers as gains computed afresh, ties are ties, and no order of summation matters.
"""

from __future__ import annotations

import numpy as np

GRID = 2.0**24
_ROWS = 512  # rows of the kernel made at a time
_PROBE = 1000  # samples whose distances give the median


def gaussian_kernel(features_VxF: np.ndarray, bandwidth: float) -> np.ndarray:
    """The float32 matrix of similarities: symmetric to the bit, ones on the diagonal."""
    if not 0 < bandwidth < np.inf:
        raise ValueError(f"The bandwidth is {bandwidth}; expected a distance above 0, or 'median'.")
    x_VxF, square_V = _centred(features_VxF)
    size = len(x_VxF)
    sim_VxV = np.empty((size, size), np.float32)
    for lo in range(0, size, _ROWS):
        hi = min(lo + _ROWS, size)
        distance = _squared_distances(x_VxF[lo:hi], x_VxF[lo:], square_V[lo:hi], square_V[lo:])
        distance *= -0.5 / bandwidth**2
        np.exp(distance, out=distance)
        distance *= GRID
        np.rint(distance, out=distance)
        distance /= GRID
        sim_VxV[lo:hi, lo:] = distance
        sim_VxV[lo:, lo:hi] = distance.T
        corner = sim_VxV[lo:hi, lo:hi]  # the only part written from both sides of the diagonal
        corner[...] = np.minimum(corner, corner.T)
    np.fill_diagonal(sim_VxV, 1.0)
    return sim_VxV


def median_bandwidth(features_VxF: np.ndarray) -> float:
    """The median distance of two different samples, of all pairs among up to 1,000 samples drawn with a fixed seed.

    Where more than half of the pairs are copies, the mean distance of the others; 1 where all are copies.
    """
    size = len(features_VxF)
    if size > _PROBE:
        features_VxF = features_VxF[np.sort(np.random.default_rng(0).choice(size, _PROBE, replace=False))]
    x_VxF, square_V = _centred(features_VxF)
    distance_P = _squared_distances(x_VxF, x_VxF, square_V, square_V)[np.triu_indices(len(x_VxF), 1)]
    distance_P = np.sqrt(distance_P)
    apart_P = distance_P[distance_P > 1e-6 * np.sqrt(square_V.max(initial=0.0))]
    if len(apart_P) == 0:
        return 1.0
    return float(np.median(distance_P)) if 2 * len(apart_P) > len(distance_P) else float(apart_P.mean())


def _centred(features_VxF: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Float64 features about their mean, which keeps the differences of large squares small, and their squares."""
    x_VxF = np.asarray(features_VxF, np.float64)
    x_VxF = x_VxF - x_VxF.mean(axis=0)
    return x_VxF, np.einsum("vf,vf->v", x_VxF, x_VxF)


def _squared_distances(a_AxF: np.ndarray, b_BxF: np.ndarray, square_A: np.ndarray, square_B: np.ndarray) -> np.ndarray:
    distance_AxB = a_AxF @ b_BxF.T
    distance_AxB *= -2.0
    distance_AxB += square_A[:, None]
    distance_AxB += square_B
    return np.maximum(distance_AxB, 0.0, out=distance_AxB)
