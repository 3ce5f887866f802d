"""How well a block stands for its class: facility location and graph cut, with every gain kept up to date.

Both hold, for every worker's block A_j, the value f(A_j) and for every sample v the gain f(A_j + v) - f(A_j).

    facility location   f(A) = sum_{u in V} max_{a in A} sim(u, a)
    graph cut           f(A) = sum_{u in V \\ A} sum_{a in A} sim(u, a)

`sim_VxV` is symmetric and not negative. On the grid of `gaussian_kernel` all numbers here are exact.
"""

from __future__ import annotations

import numpy as np

_ROWS = 128  # rows of the kernel looked at together: they should stay in the cache


class FacilityLocation:
    """Keeps cover_j(u) = max over A_j of sim(u, .); the gain of v is sum_u max(sim(u, v) - cover_j(u), 0).

    When v joins, only rows u with sim(u, v) > cover_j(u) change, by max(sim, old cover) clipped at the new one.
    """

    def __init__(self, sim_VxV: np.ndarray, workers: int):
        self.sim_VxV = sim_VxV
        self.value_W = np.zeros(workers)
        self.gain_WxV = np.repeat(sim_VxV.sum(axis=0, dtype=np.float64)[None], workers, axis=0)
        self._cover_WxV = np.zeros((workers, len(sim_VxV)), sim_VxV.dtype)
        self._rows = np.empty((_ROWS, len(sim_VxV)), sim_VxV.dtype)

    def add(self, worker: int, sample: int) -> None:
        """The sample joins the worker's block."""
        cover_V, gain_V, new_V = self._cover_WxV[worker], self.gain_WxV[worker], self.sim_VxV[sample]
        self.value_W[worker] += gain_V[sample]
        better = np.flatnonzero(new_V > cover_V)
        for first in range(0, len(better), _ROWS):
            some = better[first : first + _ROWS]
            old, rows = cover_V[some], self._rows[: len(some)]
            np.take(self.sim_VxV, some, axis=0, out=rows, mode="clip")
            np.minimum(rows, new_V[some, None], out=rows)
            np.maximum(rows, old[:, None], out=rows)
            gain_V -= rows.sum(axis=0, dtype=np.float64) - old.sum(dtype=np.float64)
        cover_V[better] = new_V[better]


class GraphCut:
    """The gain of v outside A_j is sum_u sim(u, v) - sim(v, v) - 2 sum_{a in A_j} sim(a, v).

    Not monotone: beyond half of the samples a block loses with every further one.
    """

    def __init__(self, sim_VxV: np.ndarray, workers: int):
        self.sim_VxV = sim_VxV
        self.value_W = np.zeros(workers)
        gain_V = sim_VxV.sum(axis=0, dtype=np.float64) - np.diagonal(sim_VxV)
        self.gain_WxV = np.repeat(gain_V[None], workers, axis=0)

    def add(self, worker: int, sample: int) -> None:
        """The sample joins the worker's block."""
        gain_V = self.gain_WxV[worker]
        self.value_W[worker] += gain_V[sample]
        gain_V -= 2.0 * self.sim_VxV[sample].astype(np.float64)


Objective = FacilityLocation | GraphCut
OBJECTIVES: dict[str, type[FacilityLocation] | type[GraphCut]] = {
    "facility-location": FacilityLocation,
    "graph-cut": GraphCut,
}


def value(objective: str, sim_VxV: np.ndarray, members: np.ndarray) -> float:
    """f of one block, from its definition."""
    if len(members) == 0:
        return 0.0
    if objective == "facility-location":
        return float(sim_VxV[members].max(axis=0).sum(dtype=np.float64))
    outside_V = np.ones(len(sim_VxV), bool)
    outside_V[members] = False
    return float(sim_VxV[members].sum(axis=0, dtype=np.float64)[outside_V].sum())


def total_value(objective: str, sim_VxV: np.ndarray, owner_V: np.ndarray) -> float:
    """f summed over the blocks of all owners."""
    return sum(value(objective, sim_VxV, np.flatnonzero(owner_V == owner)) for owner in np.unique(owner_V))
