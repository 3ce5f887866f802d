r"""How well a block represents its class: a Gaussian kernel, and two submodular functions of it.

    sim(u, v) = exp(-|x_u - x_v|^2 / (2 h^2)),  rounded to multiples of 2**-24

    facility location   f(A) = sum_{u in V} max_{a in A} sim(u, a)
    graph cut           f(A) = sum_{u in V \ A} sum_{a in A} sim(u, a)

Every rounded similarity is a float32, and float64 adds up to 2**29 of them exactly. So gains that are updated
incrementally equal gains computed from scratch, ties are exact, and the order of summation does not matter.

Both objectives keep, for every worker's block A_j, the value f(A_j) and the gain f(A_j + v) - f(A_j) of every sample v.
`sim_VxV` has to be symmetric and non-negative.
"""

from __future__ import annotations

import numpy as np

GRID = 2.0**24
_ROWS = 512  # of the kernel per chunk
_PROBE = 1000  # samples that the median distance is taken over


def gaussian_kernel(features_VxF: np.ndarray, bandwidth: float) -> np.ndarray:
    """The float32 matrix of similarities: exactly symmetric, ones on the diagonal."""
    if not 0 < bandwidth < np.inf:
        raise ValueError(f"The bandwidth is {bandwidth}; expected a distance above 0, or 'median'.")
    x_VxF, square_V = _centered(features_VxF)
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
        corner = sim_VxV[lo:hi, lo:hi]  # the only part written twice
        corner[...] = np.minimum(corner, corner.T)
    np.fill_diagonal(sim_VxV, 1.0)
    return sim_VxV


def median_bandwidth(features_VxF: np.ndarray) -> float:
    """The median distance over all pairs of up to 1,000 samples, drawn with a fixed seed.

    If at least half of the pairs are duplicates, the mean distance of the others; 1 if all are duplicates.
    """
    size = len(features_VxF)
    if size > _PROBE:
        features_VxF = features_VxF[np.sort(np.random.default_rng(0).choice(size, _PROBE, replace=False))]
    x_VxF, square_V = _centered(features_VxF)
    distance_P = _squared_distances(x_VxF, x_VxF, square_V, square_V)[np.triu_indices(len(x_VxF), 1)]
    distance_P = np.sqrt(distance_P)
    apart_P = distance_P[distance_P > 1e-6 * np.sqrt(square_V.max(initial=0.0))]
    if len(apart_P) == 0:
        return 1.0
    return float(np.median(distance_P)) if 2 * len(apart_P) > len(distance_P) else float(apart_P.mean())


def _centered(features_VxF: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Centered float64 features (to avoid cancellation in squared distances) and their squared norms."""
    x_VxF = np.asarray(features_VxF, np.float64)
    x_VxF = x_VxF - x_VxF.mean(axis=0)
    return x_VxF, np.einsum("vf,vf->v", x_VxF, x_VxF)


def _squared_distances(a_AxF: np.ndarray, b_BxF: np.ndarray, square_A: np.ndarray, square_B: np.ndarray) -> np.ndarray:
    distance_AxB = a_AxF @ b_BxF.T
    distance_AxB *= -2.0
    distance_AxB += square_A[:, None]
    distance_AxB += square_B
    return np.maximum(distance_AxB, 0.0, out=distance_AxB)


_GAIN_ROWS = 128  # of the kernel per chunk: they should fit into the cache


class FacilityLocation:
    """With cover_j(u) = max_{a in A_j} sim(u, a), the gain of v is sum_u max(sim(u, v) - cover_j(u), 0).

    When v joins A_j, only rows u with sim(u, v) > cover_j(u) change the gains: that of w falls by
    max(min(sim(u, w), sim(u, v)), cover_j(u)) - cover_j(u).
    """

    def __init__(self, sim_VxV: np.ndarray, workers: int):
        self.sim_VxV = sim_VxV
        self.value_W = np.zeros(workers)
        self.gain_WxV = np.repeat(sim_VxV.sum(axis=0, dtype=np.float64)[None], workers, axis=0)
        self._cover_WxV = np.zeros((workers, len(sim_VxV)), sim_VxV.dtype)
        self._rows = np.empty((_GAIN_ROWS, len(sim_VxV)), sim_VxV.dtype)

    def add(self, worker: int, sample: int) -> None:
        """Add the sample to the worker's block."""
        cover_V, gain_V, new_V = self._cover_WxV[worker], self.gain_WxV[worker], self.sim_VxV[sample]
        self.value_W[worker] += gain_V[sample]
        better = np.flatnonzero(new_V > cover_V)
        for first in range(0, len(better), _GAIN_ROWS):
            some = better[first : first + _GAIN_ROWS]
            old, rows = cover_V[some], self._rows[: len(some)]
            np.take(self.sim_VxV, some, axis=0, out=rows, mode="clip")
            np.minimum(rows, new_V[some, None], out=rows)
            np.maximum(rows, old[:, None], out=rows)
            gain_V -= rows.sum(axis=0, dtype=np.float64) - old.sum(dtype=np.float64)
        cover_V[better] = new_V[better]


class GraphCut:
    """The gain of v outside A_j is sum_u sim(u, v) - sim(v, v) - 2 sum_{a in A_j} sim(a, v).

    Not monotone: beyond half of the samples, every further one lowers f.
    """

    def __init__(self, sim_VxV: np.ndarray, workers: int):
        self.sim_VxV = sim_VxV
        self.value_W = np.zeros(workers)
        gain_V = sim_VxV.sum(axis=0, dtype=np.float64) - np.diagonal(sim_VxV)
        self.gain_WxV = np.repeat(gain_V[None], workers, axis=0)

    def add(self, worker: int, sample: int) -> None:
        """Add the sample to the worker's block."""
        gain_V = self.gain_WxV[worker]
        self.value_W[worker] += gain_V[sample]
        gain_V -= 2.0 * self.sim_VxV[sample].astype(np.float64)


Objective = FacilityLocation | GraphCut
OBJECTIVES: dict[str, type[FacilityLocation] | type[GraphCut]] = {
    "facility-location": FacilityLocation,
    "graph-cut": GraphCut,
}


def value(objective: str, sim_VxV: np.ndarray, members: np.ndarray) -> float:
    """The value f of one block, computed from the definition."""
    if len(members) == 0:
        return 0.0
    if objective == "facility-location":
        return float(sim_VxV[members].max(axis=0).sum(dtype=np.float64))
    outside_V = np.ones(len(sim_VxV), bool)
    outside_V[members] = False
    return float(sim_VxV[members].sum(axis=0, dtype=np.float64)[outside_V].sum())


def total_value(objective: str, sim_VxV: np.ndarray, owner_V: np.ndarray) -> float:
    """The value f summed over the blocks of all owners."""
    return sum(value(objective, sim_VxV, np.flatnonzero(owner_V == owner)) for owner in np.unique(owner_V))
