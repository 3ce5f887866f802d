"""Mixing matrices of decentralized SGD: topologies, their cut into rounds of exchange, and MATCHA's random links."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import numpy as np

Pairs = tuple[tuple[int, int], ...]  # (sender, receiver)
KeptEntries = Callable[[int, int], list[int]]  # see hetjax.fleet.membership.kept_entries
_SHARE_FLOOR = 1 / 8  # of 1 / N
_SUM_TOLERANCE = 1e-6  # for the sums of rows and columns: a file may hold float32


@dataclass(frozen=True)
class Mixing:
    """One mixing step with a doubly stochastic W, as rounds of exchange (D-PSGD, Lian et al., arXiv 1705.09056).

        y_i = sum_j W_ij x_j = x_i + sum over rounds r of weight_RxW[r, i] (x_sender(r, i) - x_i)

    In a round every worker sends to at most one other and receives from at most one, which is one `ppermute`. With
    `probability_R` each round is drawn independently (MATCHA); otherwise all rounds take place.
    """

    workers: int
    rounds: tuple[Pairs, ...]
    weight_RxW: np.ndarray  # float64, weight of what a worker receives; 0 where it receives nothing
    probability_R: np.ndarray | None = None
    uniform: bool = False  # all W_ij = 1/N: one all-reduce instead of rounds
    symmetric: bool = False  # W = W^T, which `weighted` needs
    name: str = "custom"

    def active(self, seed: int, step: int) -> np.ndarray:
        """Which rounds take place in a step: drawn from (seed, step) alone, so identical in every process."""
        if self.probability_R is None:
            return np.ones(len(self.rounds), bool)
        return np.random.default_rng([seed & 0xFFFFFFFF, step]).random(len(self.rounds)) < self.probability_R

    def shares(self, counts_W: np.ndarray) -> np.ndarray:
        """The stationary weights pi of mixing for a step with these counts b; they sum to 1.

            pi_i ~ max(b_i / B, 1 / (8 N)),   or 1 / N if W is not symmetric

        Without a floor a worker with few samples or none would cut the graph: no other would take its parameters.
        """
        if not (self.symmetric or self.uniform) or not counts_W.any():
            return np.full(self.workers, 1 / self.workers)
        floored_W = np.maximum(counts_W / counts_W.sum(), _SHARE_FLOOR / self.workers)
        return floored_W / floored_W.sum()

    def weighted(self, share_W: np.ndarray) -> np.ndarray:
        """`weight_RxW` of the row-stochastic W' with stationary weights `share_W` (Metropolis-Hastings).

            W'_ij = W_ij min(1, pi_j / pi_i),  i != j,     so that  pi_i W'_ij = pi_j W'_ji  and  pi^T W' = pi^T

        Equal shares give W itself.
        """
        return self.weight_RxW * np.minimum(1.0, share_W[self._sender_RxW] / share_W)

    @cached_property
    def _sender_RxW(self) -> np.ndarray:
        """Whose parameters a worker receives in a round; its own index if it receives nothing."""
        sender_RxW = np.tile(np.arange(self.workers), (len(self.rounds), 1))
        for r, pairs in enumerate(self.rounds):
            for sender, receiver in pairs:
                sender_RxW[r, receiver] = sender
        return sender_RxW

    @classmethod
    def of(cls, matrix: np.ndarray, name: str = "custom") -> Mixing:
        """The rounds of a W that `checked` returned."""
        workers = len(matrix)
        if np.array_equal(matrix, np.full_like(matrix, matrix[0, 0])):
            return cls(workers, (), np.zeros((0, workers)), uniform=True, name=name)
        rounds = exchange_rounds(neighbors(matrix), workers)
        weight_RxW = np.zeros((len(rounds), workers))
        for weight_W, pairs in zip(weight_RxW, rounds, strict=True):
            for sender, receiver in pairs:
                weight_W[receiver] = matrix[receiver, sender]
        return cls(workers, rounds, weight_RxW, name=name, symmetric=bool(np.allclose(matrix, matrix.T, atol=1e-9)))


def ring(workers: int) -> np.ndarray:
    """W of a ring: 1/3 for each worker and its two neighbors, 1/2 with two workers (D-PSGD, arXiv 1705.09056)."""
    matrix = np.eye(workers)
    for shift in {1 % workers, -1 % workers} - {0}:
        matrix += np.roll(np.eye(workers), shift, axis=1)
    return matrix / matrix[0].sum()


def complete(workers: int) -> np.ndarray:
    """W_ij = 1/N: every worker takes the mean of all."""
    return np.full((workers, workers), 1 / workers)


def topology(
    given: str | Path | np.ndarray, workers: int, kept_entries: KeptEntries | None = None
) -> tuple[np.ndarray, str]:
    """The mixing matrix of a topology, validated, and its name.

    Args:
        given: 'ring', 'complete', a .json or .npy file with W, or W itself.
        workers: number of workers.
        kept_entries: which rows of a given W are left after workers were lost.

    Raises:
        ValueError: If W is not doubly stochastic, does not mix all workers, or has the wrong shape.
    """
    made = {"ring": ring, "complete": complete}
    if isinstance(given, str) and given in made:
        return made[given](workers), given
    if isinstance(given, str | Path):
        return checked(_read(Path(given)), workers, str(given), kept_entries), Path(given).stem
    return checked(given, workers, "the mixing matrix", kept_entries), "custom"


def _without(matrix: np.ndarray, kept: list[int]) -> np.ndarray:
    """W of the remaining workers: the weight of lost neighbors moves to the diagonal."""
    left = matrix[np.ix_(kept, kept)]
    return left + np.diag(1 - left.sum(axis=1))


def _read(path: Path) -> Any:
    if path.suffix not in (".json", ".npy"):
        raise ValueError(
            f"The topology is {str(path)!r}: expected 'ring', 'complete', or a .json or .npy file with the mixing "
            "matrix, row by row."
        )
    try:
        if path.suffix == ".npy":
            return np.load(path, allow_pickle=False)
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FileNotFoundError(f"There is no file {path} to read a mixing matrix from.") from None
    except (ValueError, OSError, RecursionError) as error:
        raise ValueError(f"{path} holds no mixing matrix ({error}).") from error


def checked(given: Any, workers: int, what: str, kept_entries: KeptEntries | None = None) -> np.ndarray:
    """W as float64; raises a ValueError that says what is wrong with it."""
    try:
        matrix = np.asarray(given, np.float64)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{what} is not a matrix of numbers ({error}): give one row of numbers per worker.") from error
    if kept_entries is not None and matrix.ndim == 2:
        kept = kept_entries(len(matrix), workers)
        if len(kept) < len(matrix):
            left = _without(checked(matrix, len(matrix), what), kept)
            return checked(left, workers, f"{what}, without the lost workers,")
    if matrix.shape != (workers, workers):
        raise ValueError(
            f"{what} has shape {matrix.shape}, but there are {workers} workers: expected ({workers}, {workers})."
        )
    if not (np.isfinite(matrix).all() and (matrix >= 0).all()):
        raise ValueError(f"{what} has entries that are negative or not finite: all must be 0 or more.")
    for which, sums_W in (("row", matrix.sum(axis=1)), ("column", matrix.sum(axis=0))):
        if (wrong_W := np.abs(sums_W - 1) > _SUM_TOLERANCE).any():
            at = int(np.flatnonzero(wrong_W)[0])
            raise ValueError(
                f"{what} is not doubly stochastic: {which} {at} sums to {sums_W[at]:.6g}. All rows and all columns "
                "must sum to 1, otherwise the mean of the parameters drifts."
            )
    if workers > 1 and contraction(matrix) > 1 - 1e-9:
        raise ValueError(
            f"{what} never brings all workers together: its graph is disconnected, or workers only swap their "
            "parameters. Connect the graph, and give every worker a positive weight for its own parameters."
        )
    return matrix


def contraction(matrix: np.ndarray) -> float:
    """The asymptotic factor by which mixing shrinks the distance to the mean: max |eigenvalue of W - 1/N|."""
    return float(np.max(np.abs(np.linalg.eigvals(matrix - 1 / len(matrix)))))


def neighbors(matrix: np.ndarray) -> list[tuple[int, int]]:
    """(sender, receiver) of all nonzero weights off the diagonal, nearest on the ring first."""
    pairs = [(int(sender), int(receiver)) for receiver, sender in np.argwhere(matrix > 0) if sender != receiver]
    return sorted(pairs, key=lambda pair: ((pair[1] - pair[0]) % len(matrix), pair[0]))


def exchange_rounds(pairs: Iterable[tuple[int, int]], workers: int) -> tuple[Pairs, ...]:
    """The fewest rounds that hold all pairs: the maximum number of messages that a worker sends or receives.

    An edge coloring of the bipartite graph of senders and receivers (König 1916). A new edge takes a color that is free
    at its sender. If the receiver uses it, that color and one that is free there are swapped along the alternating path
    that starts at the receiver, which cannot reach the sender.
    """
    sends: list[dict[int, int]] = [{} for _ in range(workers)]  # of each sender: round -> receiver
    receives: list[dict[int, int]] = [{} for _ in range(workers)]
    for sender, receiver in pairs:
        wanted = next(r for r in count() if r not in sends[sender])
        spare = next(r for r in count() if r not in receives[receiver])
        path, at, along = [], receiver, wanted
        while along in (receives if along == wanted else sends)[at]:
            other = (receives if along == wanted else sends)[at][along]
            path.append((other, at, along) if along == wanted else (at, other, along))
            at, along = other, spare if along == wanted else wanted
        for a, b, r in path:
            del sends[a][r], receives[b][r]
        for a, b, r in path:
            swapped = spare if r == wanted else wanted
            sends[a][swapped], receives[b][swapped] = b, a
        sends[sender][wanted], receives[receiver][wanted] = receiver, sender
    used = sorted({r for mine in sends for r in mine})
    return tuple(tuple((a, mine[r]) for a, mine in enumerate(sends) if r in mine) for r in used)


_STEPS = 400  # of the search for p: within 1% of the best value on a fine grid


def matcha(matrix: np.ndarray, budget: float, name: str = "custom") -> Mixing:
    """MATCHA (Wang et al., arXiv 1905.09435): mix over a random part of the links, important links more often.

    The graph is decomposed into matchings, in which every worker has at most one partner. A mixing step uses matching m
    with probability p_m, independently, B_m being the draw and L_m the Laplacian of the matching:

        W = I - alpha sum_m B_m L_m

    p (`activation`) maximizes the connectivity of the expected graph within the budget, alpha (`mixing_weight`)
    minimizes the expected distance to the mean.

    Args:
        matrix: a W that `checked` returned; only which weights are positive matters.
        budget: average share of the matchings used, above 0 and at most 1.
        name: of the topology.

    Raises:
        ValueError: If the budget is out of range or the graph is not symmetric.
    """
    if not 0 < budget <= 1:
        raise ValueError(
            f"The communication budget of MATCHA is {budget}: expected a share of the links above 0 and at most 1."
        )
    if not np.array_equal(matrix > 0, matrix.T > 0):
        raise ValueError("MATCHA exchanges in pairs, so its graph must be symmetric; this mixing matrix is not.")
    workers = len(matrix)
    pairs = [(int(a), int(b)) for a, b in np.argwhere(np.triu(matrix, 1) > 0)]
    found = matchings(pairs, workers)
    laplacian_MxWxW = np.array([laplacian(matching, workers) for matching in found]).reshape(-1, workers, workers)
    probability_M = activation(laplacian_MxWxW, budget)
    alpha = mixing_weight(laplacian_MxWxW, probability_M)
    rounds = tuple(tuple(sorted([*matching, *((b, a) for a, b in matching)])) for matching in found)
    weight_MxW = np.array([[alpha if any(w in pair for pair in m) else 0.0 for w in range(workers)] for m in found])
    weight_MxW = weight_MxW.reshape(-1, workers)
    return Mixing(workers, rounds, weight_MxW, probability_M, name=f"MATCHA on {name}", symmetric=True)


def laplacian(pairs: Iterable[tuple[int, int]], workers: int) -> np.ndarray:
    """The graph Laplacian: degrees on the diagonal, -1 for every link."""
    found = np.zeros((workers, workers))
    for a, b in pairs:
        found[[a, b], [a, b]] += 1
        found[[a, b], [b, a]] -= 1
    return found


def matchings(pairs: Iterable[tuple[int, int]], workers: int) -> list[list[tuple[int, int]]]:
    """Decompose a graph into matchings: as many as its maximum degree, or at most one more if it has odd cycles."""
    pairs = list(pairs)
    side_W = _sides(pairs, workers)
    if side_W is None:
        return _matchings_of_any(pairs, workers)
    rounds = exchange_rounds([(a, b) if side_W[a] == 0 else (b, a) for a, b in pairs], workers)
    return [sorted((min(pair), max(pair)) for pair in matching) for matching in rounds]


def _sides(pairs: list[tuple[int, int]], workers: int) -> dict[int, int] | None:
    """A 2-coloring of the graph; None if a cycle of odd length rules it out."""
    side: dict[int, int] = {}
    for start in range(workers):
        side.setdefault(start, 0)
        while fresh := [(a, b) for pair in pairs for a, b in (pair, pair[::-1]) if a in side and b not in side]:
            side.update({b: 1 - side[a] for a, b in fresh})
    return side if all(side[a] != side[b] for a, b in pairs) else None


def _matchings_of_any(pairs: list[tuple[int, int]], workers: int) -> list[list[tuple[int, int]]]:
    """Edge coloring of any graph with at most one color more than its maximum degree (Misra & Gries 1992)."""
    partner: list[dict[int, int]] = [{} for _ in range(workers)]  # of each worker: color -> the worker at the other end
    color: dict[frozenset[int], int] = {}

    def free(worker: int) -> int:
        return next(c for c in count() if c not in partner[worker])

    def paint(a: int, b: int, new: int | None) -> None:
        old = color.pop(frozenset((a, b)), None)
        if old is not None:
            del partner[a][old], partner[b][old]
        if new is not None:
            color[frozenset((a, b))], partner[a][new], partner[b][new] = new, b, a

    for hub, first in pairs:
        fan = [first]  # the color of each link is free at the previous worker of the fan
        while follow := [w for c, w in partner[hub].items() if c not in partner[fan[-1]] and w not in fan]:
            fan.append(follow[0])
        mine, theirs = free(hub), free(fan[-1])
        path, along = [hub], theirs  # links in alternating colors: swapping them makes `theirs` free at the hub
        while along in partner[path[-1]]:
            path.append(partner[path[-1]][along])
            along = mine if along == theirs else theirs
        links = [(a, b, color[frozenset((a, b))]) for a, b in pairwise(path)]
        for a, b, _ in links:
            paint(a, b, None)
        for a, b, old in links:
            paint(a, b, mine if old == theirs else theirs)
        end = 0  # the first worker of the fan at which `theirs` is free
        while theirs in partner[fan[end]]:
            end += 1
        turned = [color[frozenset((hub, w))] for w in fan[1 : end + 1]] + [theirs]
        for w in fan[1 : end + 1]:
            paint(hub, w, None)
        for w, new in zip(fan, turned, strict=False):
            paint(hub, w, new)
    used = sorted(set(color.values()))
    return [sorted((min(link), max(link)) for link, c in color.items() if c == wanted) for wanted in used]


def activation(laplacian_MxWxW: np.ndarray, budget: float) -> np.ndarray:
    """MATCHA's activation probabilities (arXiv 1905.09435).

        maximize over p in [0, 1]^M with mean(p) = budget:   lambda_2(sum_m p_m L_m)

    lambda_2, the second smallest eigenvalue, is concave in p: projected ascent along its gradient v^T L_m v, averaged
    over the eigenvectors v with eigenvalues near lambda_2, since symmetric graphs have several.
    """
    number = len(laplacian_MxWxW)
    best_M = probability_M = np.full(number, float(budget))
    if budget == 1 or number < 2:
        return best_M
    best = -np.inf
    for k in range(_STEPS):
        value_W, vector_WxV = np.linalg.eigh(np.tensordot(probability_M, laplacian_MxWxW, 1))
        if value_W[1] > best + 1e-12:
            best, best_M = float(value_W[1]), probability_M
        width = max(value_W[1], 1e-3) / np.sqrt(k + 1)
        near_V = np.where(np.arange(len(value_W)) > 0, np.exp(-(value_W - value_W[1]) / width), 0.0)
        rise_M = np.einsum("wv,mwx,xv,v->m", vector_WxV, laplacian_MxWxW, vector_WxV, near_V / near_V.sum())
        rise_M = rise_M - rise_M.mean()
        step_M = 0.5 / np.sqrt(k + 1) * rise_M / max(np.abs(rise_M).max(), 1e-12)
        probability_M = _onto_budget(probability_M + step_M, budget)
    return best_M


def _onto_budget(point_M: np.ndarray, budget: float) -> np.ndarray:
    """Project onto [0, 1]^M with mean `budget`: clip(point - shift, 0, 1), with the shift found by bisection."""
    low, high = point_M.min() - 1, point_M.max()
    for _ in range(60):
        shift = (low + high) / 2
        low, high = (shift, high) if np.clip(point_M - shift, 0, 1).mean() > budget else (low, shift)
    return np.clip(point_M - high, 0, 1)


def mixing_weight(laplacian_MxWxW: np.ndarray, probability_M: np.ndarray) -> float:
    """MATCHA's alpha, which minimizes `expected_contraction`: a convex function, so ternary search."""
    if len(laplacian_MxWxW) == 0:
        return 0.0
    low, high = 0.0, 2 / float(np.linalg.eigvalsh(np.tensordot(probability_M, laplacian_MxWxW, 1))[-1])
    for _ in range(100):
        left, right = low + (high - low) / 3, high - (high - low) / 3
        at_left, at_right = (expected_contraction(laplacian_MxWxW, probability_M, alpha) for alpha in (left, right))
        low, high = (low, right) if at_left < at_right else (left, high)
    return (low + high) / 2


def expected_contraction(laplacian_MxWxW: np.ndarray, probability_M: np.ndarray, alpha: float) -> float:
    """The expected factor by which a mixing step shrinks the squared distance to the mean; below 1 workers converge.

    |E[W^T W] - 1/N|,   E[W^T W] = I - 2 alpha Lp + alpha^2 (Lp^2 + 2 Lv)
    Lp = sum_m p_m L_m,   Lv = sum_m p_m (1 - p_m) L_m         (arXiv 1905.09435)
    """
    mean = np.tensordot(probability_M, laplacian_MxWxW, 1)
    spread = np.tensordot(probability_M * (1 - probability_M), laplacian_MxWxW, 1)
    workers = len(mean)
    moved = np.eye(workers) - 2 * alpha * mean + alpha**2 * (mean @ mean + 2 * spread)
    return float(np.linalg.eigvalsh(moved - 1 / workers)[-1])
