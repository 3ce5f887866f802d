"""MATCHA (Wang et al., arXiv 1905.09435): mix over a few links at a time, the important ones more often.

The graph is cut into matchings, in which every worker has one partner at most. In a mixing step matching m is used with
probability p_m, independently: W = I - alpha sum_m B_m L_m, with L_m its Laplacian and B_m its draw. The budget is the
share of the matchings used on average; within it,

    p      maximises the second smallest eigenvalue of sum_m p_m L_m, how well connected the mean graph is
    alpha  minimises |E[W^T W] - 1/N|, the factor by which the distance to the mean shrinks in a mixing step:
           E[W^T W] = I - 2 alpha Lp + alpha^2 (Lp^2 + 2 Lv), Lp = sum_m p_m L_m, Lv = sum_m p_m (1 - p_m) L_m
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count, pairwise

import numpy as np

from hetjax.sync.topology import Mixing, exchange_rounds

_STEPS = 400  # of the search for p; it is within 1% of the best found by a fine grid


def matcha(matrix: np.ndarray, budget: float, name: str = "custom") -> Mixing:
    """Mixing over the links of a checked W (its weights do not count), within a budget above 0 and at most 1."""
    if not 0 < budget <= 1:
        raise ValueError(
            f"The communication budget of MATCHA is {budget}: expected a share of the links above 0, at most 1."
        )
    if not np.array_equal(matrix > 0, matrix.T > 0):
        raise ValueError("MATCHA exchanges in pairs, so its graph has to be symmetric; this mixing matrix is not.")
    workers = len(matrix)
    pairs = [(int(a), int(b)) for a, b in np.argwhere(np.triu(matrix, 1) > 0)]
    found = matchings(pairs, workers)
    laplacian_MxWxW = np.array([laplacian(matching, workers) for matching in found]).reshape(-1, workers, workers)
    chance_M = activation(laplacian_MxWxW, budget)
    alpha = mixing_weight(laplacian_MxWxW, chance_M)
    rounds = tuple(tuple(sorted([*matching, *((b, a) for a, b in matching)])) for matching in found)
    weight_MxW = np.array([[alpha if any(w in pair for pair in m) else 0.0 for w in range(workers)] for m in found])
    return Mixing(workers, rounds, weight_MxW.reshape(-1, workers), chance_M, name=f"MATCHA on {name}")


def laplacian(pairs: Iterable[tuple[int, int]], workers: int) -> np.ndarray:
    found = np.zeros((workers, workers))
    for a, b in pairs:
        found[[a, b], [a, b]] += 1
        found[[a, b], [b, a]] -= 1
    return found


def matchings(pairs: Iterable[tuple[int, int]], workers: int) -> list[list[tuple[int, int]]]:
    """The links of a graph as matchings: as many as the most links of a worker, or one more if it has odd circles."""
    pairs = list(pairs)
    side_W = _sides(pairs, workers)
    if side_W is None:
        return _matchings_of_any(pairs, workers)
    rounds = exchange_rounds([(a, b) if side_W[a] == 0 else (b, a) for a, b in pairs], workers)
    return [sorted((min(pair), max(pair)) for pair in matching) for matching in rounds]


def _sides(pairs: list[tuple[int, int]], workers: int) -> dict[int, int] | None:
    """0 or 1 for every worker such that links only lead across; None where a circle of odd length forbids it."""
    side: dict[int, int] = {}
    for start in range(workers):
        side.setdefault(start, 0)
        while fresh := [(a, b) for pair in pairs for a, b in (pair, pair[::-1]) if a in side and b not in side]:
            side.update({b: 1 - side[a] for a, b in fresh})
    return side if all(side[a] != side[b] for a, b in pairs) else None


def _matchings_of_any(pairs: list[tuple[int, int]], workers: int) -> list[list[tuple[int, int]]]:
    """Misra & Gries 1992."""
    partner: list[dict[int, int]] = [{} for _ in range(workers)]  # of each worker: colour -> who is at the other end
    colour: dict[frozenset[int], int] = {}

    def free(worker: int) -> int:
        return next(c for c in count() if c not in partner[worker])

    def paint(a: int, b: int, new: int | None) -> None:
        old = colour.pop(frozenset((a, b)), None)
        if old is not None:
            del partner[a][old], partner[b][old]
        if new is not None:
            colour[frozenset((a, b))], partner[a][new], partner[b][new] = new, b, a

    for hub, first in pairs:
        fan = [first]  # the link to each next one has a colour that is free at the one before
        while follow := [w for c, w in partner[hub].items() if c not in partner[fan[-1]] and w not in fan]:
            fan.append(follow[0])
        mine, theirs = free(hub), free(fan[-1])
        path, along = [hub], theirs  # links of the two colours in turn: they change places, and `theirs` is free at hub
        while along in partner[path[-1]]:
            path.append(partner[path[-1]][along])
            along = mine if along == theirs else theirs
        links = [(a, b, colour[frozenset((a, b))]) for a, b in pairwise(path)]
        for a, b, _ in links:
            paint(a, b, None)
        for a, b, old in links:
            paint(a, b, mine if old == theirs else theirs)
        end = 0  # the first of the fan, still one up to there, at which `theirs` is free
        while theirs in partner[fan[end]]:
            end += 1
        turned = [colour[frozenset((hub, w))] for w in fan[1 : end + 1]] + [theirs]
        for w in fan[1 : end + 1]:
            paint(hub, w, None)
        for w, new in zip(fan, turned, strict=False):
            paint(hub, w, new)
    used = sorted(set(colour.values()))
    return [sorted((min(link), max(link)) for link, c in colour.items() if c == wanted) for wanted in used]


def activation(laplacian_MxWxW: np.ndarray, budget: float) -> np.ndarray:
    """p in [0, 1] with mean `budget` that maximises the second smallest eigenvalue of sum_m p_m L_m.

    A concave function: projected ascent along v^T L_m v, averaged over the eigenvectors v near the second smallest
    eigenvalue, of which symmetric graphs have several.
    """
    number = len(laplacian_MxWxW)
    best_M = chance_M = np.full(number, float(budget))
    if budget == 1 or number < 2:
        return best_M
    best = -np.inf
    for k in range(_STEPS):
        value_W, vector_WxV = np.linalg.eigh(np.tensordot(chance_M, laplacian_MxWxW, 1))
        if value_W[1] > best + 1e-12:
            best, best_M = float(value_W[1]), chance_M
        width = max(value_W[1], 1e-3) / np.sqrt(k + 1)
        near_V = np.where(np.arange(len(value_W)) > 0, np.exp(-(value_W - value_W[1]) / width), 0.0)
        rise_M = np.einsum("wv,mwx,xv,v->m", vector_WxV, laplacian_MxWxW, vector_WxV, near_V / near_V.sum())
        rise_M = rise_M - rise_M.mean()
        chance_M = _onto_budget(chance_M + 0.5 / np.sqrt(k + 1) * rise_M / max(np.abs(rise_M).max(), 1e-12), budget)
    return best_M


def _onto_budget(point_M: np.ndarray, budget: float) -> np.ndarray:
    """The nearest point in [0, 1]^M with mean `budget`: clip(point - shift), its shift found by bisection."""
    low, high = point_M.min() - 1, point_M.max()
    for _ in range(60):
        shift = (low + high) / 2
        low, high = (shift, high) if np.clip(point_M - shift, 0, 1).mean() > budget else (low, shift)
    return np.clip(point_M - high, 0, 1)


def mixing_weight(laplacian_MxWxW: np.ndarray, chance_M: np.ndarray) -> float:
    """alpha: the minimum of a convex function, found by cutting thirds."""
    if len(laplacian_MxWxW) == 0:
        return 0.0
    low, high = 0.0, 2 / float(np.linalg.eigvalsh(np.tensordot(chance_M, laplacian_MxWxW, 1))[-1])
    for _ in range(100):
        left, right = low + (high - low) / 3, high - (high - low) / 3
        at_left, at_right = (expected_contraction(laplacian_MxWxW, chance_M, alpha) for alpha in (left, right))
        low, high = (low, right) if at_left < at_right else (left, high)
    return (low + high) / 2


def expected_contraction(laplacian_MxWxW: np.ndarray, chance_M: np.ndarray, alpha: float) -> float:
    """|E[W^T W] - 1/N|: below 1 the workers come together."""
    mean = np.tensordot(chance_M, laplacian_MxWxW, 1)
    spread = np.tensordot(chance_M * (1 - chance_M), laplacian_MxWxW, 1)
    workers = len(mean)
    moved = np.eye(workers) - 2 * alpha * mean + alpha**2 * (mean @ mean + 2 * spread)
    return float(np.linalg.eigvalsh(moved - 1 / workers)[-1])
