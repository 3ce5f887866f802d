"""Who mixes with whom in decentralised SGD: doubly stochastic W, and the rounds of exchange that it takes.

    y_i = sum_j W_ij x_j = x_i + sum over rounds r of weight_RxW[r, i] (x_sender(r, i) - x_i)

In a round every worker sends to at most one other and receives from at most one: that is one `ppermute`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

Pairs = tuple[tuple[int, int], ...]  # (sender, receiver)
KeptEntries = Callable[[int, int], list[int]]  # see hetjax.fleet.membership.kept_entries
_SUM_TOLERANCE = 1e-6  # of rows and columns: a file may hold float32


@dataclass(frozen=True)
class Mixing:
    """What one mixing step does. Without `chance_R` all rounds always happen; with it each one by its own chance."""

    workers: int
    rounds: tuple[Pairs, ...]
    weight_RxW: np.ndarray  # float64, of what a worker receives; 0 where it receives nothing
    chance_R: np.ndarray | None = None
    everybody: bool = False  # W = 1/N throughout: a sum over all workers instead of rounds
    name: str = "custom"

    def active(self, seed: int, step: int) -> np.ndarray:
        """Which rounds happen in a step: the same draw in every process, from (seed, step) alone."""
        if self.chance_R is None:
            return np.ones(len(self.rounds), bool)
        return np.random.default_rng([seed & 0xFFFFFFFF, step]).random(len(self.rounds)) < self.chance_R

    def matrix(self, active_R: np.ndarray | None = None) -> np.ndarray:
        """W as these rounds make it."""
        if self.everybody:
            return np.full((self.workers, self.workers), 1 / self.workers)
        mixed = np.eye(self.workers)
        for r, pairs in enumerate(self.rounds):
            for sender, receiver in pairs if active_R is None or active_R[r] else ():
                mixed[receiver, sender] += self.weight_RxW[r, receiver]
                mixed[receiver, receiver] -= self.weight_RxW[r, receiver]
        return mixed

    @classmethod
    def of(cls, matrix: np.ndarray, name: str = "custom") -> Mixing:
        """The rounds of a checked W."""
        workers = len(matrix)
        if np.array_equal(matrix, np.full_like(matrix, matrix[0, 0])):
            return cls(workers, (), np.zeros((0, workers)), everybody=True, name=name)
        rounds = exchange_rounds(neighbours(matrix), workers)
        weight_RxW = np.zeros((len(rounds), workers))
        for weight_W, pairs in zip(weight_RxW, rounds, strict=True):
            for sender, receiver in pairs:
                weight_W[receiver] = matrix[receiver, sender]
        return cls(workers, rounds, weight_RxW, name=name)


def ring(workers: int) -> np.ndarray:
    """Each worker and its two neighbours a third each (D-PSGD, arXiv 1705.09056); two workers a half each."""
    matrix = np.eye(workers)
    for shift in {1 % workers, -1 % workers} - {0}:
        matrix += np.roll(np.eye(workers), shift, axis=1)
    return matrix / matrix[0].sum()


def complete(workers: int) -> np.ndarray:
    """Everybody the mean of all."""
    return np.full((workers, workers), 1 / workers)


def topology(
    given: str | Path | np.ndarray, workers: int, kept_entries: KeptEntries | None = None
) -> tuple[np.ndarray, str]:
    """W for so many workers, checked, and its name: 'ring', 'complete', a .json or .npy file, or W itself.

    `kept_entries` says which workers of a given W are left where some were lost.
    """
    made = {"ring": ring, "complete": complete}
    if isinstance(given, str) and given in made:
        return made[given](workers), given
    if isinstance(given, str | Path):
        return checked(_read(Path(given)), workers, str(given), kept_entries), Path(given).stem
    return checked(given, workers, "the mixing matrix", kept_entries), "custom"


def _without(matrix: np.ndarray, kept: list[int]) -> np.ndarray:
    """W of the workers that are left: each keeps for itself the weight of those that it heard from before."""
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
    """W as float64, or a sentence that says what is wrong with it."""
    try:
        matrix = np.asarray(given, np.float64)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{what} is no matrix of numbers ({error}): give one row of numbers per worker.") from error
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
        raise ValueError(f"{what} has entries that are negative or no numbers: all have to be 0 or more.")
    for which, sums_W in (("row", matrix.sum(axis=1)), ("column", matrix.sum(axis=0))):
        if (wrong_W := np.abs(sums_W - 1) > _SUM_TOLERANCE).any():
            at = int(np.flatnonzero(wrong_W)[0])
            raise ValueError(
                f"{what} is not doubly stochastic: {which} {at} sums to {sums_W[at]:.6g}. All rows and all columns "
                "have to sum to 1, or the mean of the parameters would drift."
            )
    if workers > 1 and contraction(matrix) > 1 - 1e-9:
        raise ValueError(
            f"{what} never brings all workers together: they fall into groups that do not hear of each other, or only "
            "swap. Connect them, and let each keep a share of its own parameters."
        )
    return matrix


def contraction(matrix: np.ndarray) -> float:
    """By how much a mixing step shrinks the distance to the mean in the long run: the largest |eigenvalue| below 1."""
    return float(np.max(np.abs(np.linalg.eigvals(matrix - 1 / len(matrix)))))


def neighbours(matrix: np.ndarray) -> list[tuple[int, int]]:
    """(sender, receiver) for all weights off the diagonal, nearest on the circle first."""
    pairs = [(int(sender), int(receiver)) for receiver, sender in np.argwhere(matrix > 0) if sender != receiver]
    return sorted(pairs, key=lambda pair: ((pair[1] - pair[0]) % len(matrix), pair[0]))


def exchange_rounds(pairs: Iterable[tuple[int, int]], workers: int) -> tuple[Pairs, ...]:
    """As few rounds as there can be: the most that a worker sends or receives.

    Senders and receivers are the two sides of a graph whose edges are to be coloured. A new edge takes a colour that
    its sender has free; if the receiver has it in use, that colour and one free there change places along the path
    that begins at the receiver, which cannot lead to the sender (König 1916).
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
