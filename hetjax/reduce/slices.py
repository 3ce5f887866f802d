"""Slices of the model: which process owns which parameters, updates them and keeps their optimizer state.

Parameters lie in the order of the summed vector (`Layout`), which is cut into a few pieces. A piece is the unit in
which gradients are sent to its owner, added, updated and sent back, so that these overlap. Pieces stay as they are in a
run, because each shape of them is a compiled program. They are cut where the first shares end; when speeds change,
whole pieces change their owners, so that later shares are met to about half a piece.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

Granularity = Literal["elements", "leaves", "whole"]  # what can be updated on its own: see `granularity`
Place = tuple[int, int, int]  # part, offset and size of a leaf (`Layout.places`)

_SMALLEST = 2**19  # elements of a share that is cut further: smaller pieces cost more than they gain by overlap
_MOST = 16  # pieces, about; more where there are more processes
MEMBERS = 12  # of an elastic fleet, whose pieces cannot follow the shares: equal for 2, 3, 4, 6 and 12 members
_RUN = 2**22  # elements of a contiguous run: one frame of a message
_ALIGNED = 16  # elements: cuts at multiples of a cache line


@dataclass(frozen=True)
class Piece:
    """A part of the parameters that is updated on its own."""

    ranges: tuple[tuple[int, int, int], ...]  # (leaf, start, stop), in the order of the vector
    runs: tuple[tuple[int, int, int], ...]  # the same as (part, start, stop), contiguous ones merged

    @property
    def size(self) -> int:
        """Number of parameters."""
        return sum(stop - start for _, start, stop in self.ranges)


def cut(
    places: Sequence[Place], granularity: Granularity, share_P: np.ndarray, limit_P: np.ndarray | None = None
) -> tuple[Piece, ...]:
    """Cut the parameters into pieces, which together cover every parameter once.

    Cuts are where the shares end, so that every process owns exactly its own, and between them at equal distances. A
    small model is one piece, unless no process may own all of it.

    Args:
        places: part, offset and size of every leaf.
        granularity: 'elements' cuts anywhere, 'leaves' between leaves, 'whole' nowhere.
        share_P: share of each process in the model.
        limit_P: the most that each may own. Default: everything.

    Returns:
        The pieces, in the order of the vector; none for a model without parameters.
    """
    stored = sorted(range(len(places)), key=lambda leaf: places[leaf][:2])
    starts = [0, *itertools.accumulate(places[leaf][2] for leaf in stored)]
    total = starts[-1]
    if not total:
        return ()
    small = total < 2 * _SMALLEST and (limit_P is None or np.max(limit_P) >= 1)
    bounds = [0, total] if small or granularity == "whole" else _bounds(total, share_P)
    if granularity == "leaves":  # to the nearest end of a leaf
        ends = np.array(starts)
        bounds = sorted({starts[int(np.argmin(np.abs(ends - bound)))] for bound in bounds})
    return tuple(_piece(stored, starts, places, *ends) for ends in itertools.pairwise(bounds) if ends[1] > ends[0])


def _bounds(total: int, share_P: np.ndarray) -> list[int]:
    """Where a vector is cut, from 0 to its length."""
    aligned = lambda position: min(total, round(position / _ALIGNED) * _ALIGNED)
    part_P = np.asarray(share_P, np.float64) / np.sum(share_P)
    edges = [0, *(aligned(end * total) for end in np.cumsum(part_P)[:-1]), total]
    bounds = []
    for part, (start, stop) in zip(part_P, itertools.pairwise(edges), strict=True):
        count = max(1, min((stop - start) // _SMALLEST, round(_MOST * part)))
        step = -(-(stop - start) // (count * _ALIGNED)) * _ALIGNED  # pieces of one size share a program
        bounds += list(range(start, stop, step)) if stop > start else []
    return [*bounds, total]


def assign(sizes: Sequence[int], share_P: np.ndarray, limit_P: np.ndarray | None = None) -> list[int] | None:
    """The owner of each piece, so that every process owns about its share; neighbors stay together.

    Of all divisions within the limits, that with the least sum of owned^2 / share, which is least where what each
    process owns is its share. A single piece goes to the process with the largest one.

    Args:
        sizes: size of each piece.
        share_P: share of each process; 0: it owns nothing.
        limit_P: the most that each may own, as a share, to a cache line. Default: everything.

    Returns:
        The owners, in ascending order; None if no division is within the limits.
    """
    ends = np.concatenate([[0], np.cumsum(sizes)]).astype(np.float64)
    owned = ends - ends[:, None]  # of a process whose pieces start at the row's and stop before the column's
    best, before_P = np.where(ends == 0, 0.0, np.inf), []
    for process, share in enumerate(share_P):
        most = ends[-1] * (1.0 if limit_P is None else float(limit_P[process])) + _ALIGNED if share > 0 else 0.0
        cost = np.where((owned >= 0) & (owned <= most), owned * owned / (share or 1.0), np.inf)
        total = best[:, None] + cost
        before_P.append(np.argmin(total, axis=0))
        best = np.min(total, axis=0)
    if not np.isfinite(best[-1]):
        return None
    owners: list[int] = []
    for process in reversed(range(len(before_P))):
        stop = len(sizes) - len(owners)
        owners += [process] * (stop - int(before_P[process][stop]))
    return owners[::-1]


def seconds(owners: Sequence[int], share_P: np.ndarray) -> dict[int, int]:
    """The second holder of each piece: the next process with a share, so that the loss of one loses no piece."""
    using = [p for p, share in enumerate(share_P) if share > 0]
    others = using if len(using) > 1 else list(range(len(share_P)))
    following = lambda owner: min((p for p in others if p > owner), default=min(others))
    return {k: following(owner) for k, owner in enumerate(owners) if following(owner) != owner}


def _piece(stored: list[int], starts: list[int], places: Sequence[Place], start: int, stop: int) -> Piece:
    """The piece from `start` to `stop` of the vector."""
    ranges = [
        (leaf, max(0, start - at), min(places[leaf][2], stop - at))
        for leaf, at in zip(stored, starts, strict=False)
        if at < stop and at + places[leaf][2] > start
    ]
    return Piece(tuple(ranges), tuple(_runs(ranges, places)))


def _runs(ranges: Sequence[tuple[int, int, int]], places: Sequence[Place]) -> list[tuple[int, int, int]]:
    runs: list[tuple[int, int, int]] = []
    for leaf, start, stop in ranges:
        part, offset, _ = places[leaf]
        first, last = offset + start, offset + stop
        while first < last:
            previous = runs[-1] if runs else (-1, 0, 0)
            if previous[0] == part and previous[2] == first and first - previous[1] < _RUN:
                end = min(last, previous[1] + _RUN)
                runs[-1] = (part, previous[1], end)
            else:
                end = min(last, first + _RUN)
                runs.append((part, first, end))
            first = end
    return runs


def shares(
    rate_P: np.ndarray, limit_P: np.ndarray | None = None, *, fixed: float = 2.0, own: float = 6.0
) -> np.ndarray:
    """Shares of the update that finish at the same time on hosts of unequal speed.

    A process that owns a share s of the model is busy for (fixed + own s) / rate: everyone sends all its sums and
    receives all parameters (fixed); an owner also receives, adds, updates and sends back its slice for all others.
    So s_p = max(0, (T rate_p - fixed) / own) with the T at which the shares add up to 1, bounded by memory.

    Args:
        rate_P: relative speed of each process; 0: it takes no share.
        limit_P: the most that each may take. Default: everything.
        fixed: work of a process that owns nothing, in passes over the model.
        own: work of a process that owns everything, beyond that.

    Returns:
        The shares, which sum to 1.

    Raises:
        ValueError: if the limits add up to less than the model.
    """
    limit_P = np.where(rate_P > 0, 1.0 if limit_P is None else limit_P, 0.0)
    if limit_P.sum() < 1:
        raise ValueError(
            f"The optimizer state does not fit: the processes have room for {limit_P.sum():.0%} of it in all."
        )
    low, high = 0.0, (fixed + own) / max(rate_P.max(), 1e-300)
    taken = lambda finish: np.clip((finish * rate_P - fixed) / own, 0.0, limit_P)
    while taken(high).sum() < 1:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if taken(middle).sum() < 1 else (low, middle)
    found = taken(high)
    return found / found.sum()


def busy(share_P: np.ndarray, rate_P: np.ndarray, *, fixed: float = 2.0, own: float = 6.0) -> float:
    """Time of the last process under these shares, in units of `shares`."""
    active = rate_P > 0
    return float(np.max((fixed + own * share_P[active]) / rate_P[active]))
