"""What a count costs on a ladder of microbatch sizes: the price of every rung, and the cheapest cover of every count.

A rung is a number of rows with a compiled program; a chunk is one call of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Staircase:
    """For every count n the cheapest cover by rungs, found by dynamic programming.

        price(n) = min over multisets of rungs that cover n of  sum of their prices + (their number - 1) x joint

    Prices are measured, not assumed proportional to the rows: per row, small chunks are faster for some models and
    slower for others. A cover of n + 1 samples also covers n, so the table never decreases.
    """

    rungs: tuple[int, ...]  # rows, ascending
    price_N: np.ndarray  # price_N[n], n = 0 .. capacity, in the unit of the rung prices
    first_N: np.ndarray  # the rung that the best cover of n uses first

    @classmethod
    def from_prices(cls, rungs: Sequence[int], prices: Sequence[float], capacity: int, joint: float = 0.0) -> Staircase:
        """Build the table for counts up to `capacity`.

        Args:
            rungs: Rows of each rung, in any order.
            prices: The price of one chunk of each.
            capacity: The largest count.
            joint: The price of adding one chunk's sums to another's.

        Raises:
            ValueError: If rungs repeat or are below 1, or if a price is not positive.
        """
        order = np.argsort(np.asarray(rungs), kind="stable")
        rows_L = np.asarray(rungs, np.int64)[order]
        price_L = np.asarray(prices, np.float64)[order] + joint
        if len(rows_L) == 0 or rows_L[0] < 1 or (np.diff(rows_L) == 0).any():
            raise ValueError(f"A ladder needs distinct rungs of at least one row; got {list(rungs)}.")
        if len(price_L) != len(rows_L) or not np.isfinite(price_L).all() or (price_L <= 0).any():
            raise ValueError(f"Each rung needs one positive price; got rungs {list(rungs)} and prices {list(prices)}.")
        price_N = np.zeros(capacity + 1)
        first_N = np.zeros(capacity + 1, np.int64)
        for n in range(1, capacity + 1):
            cover_L = price_L + price_N[np.maximum(n - rows_L, 0)]
            best = len(cover_L) - 1 - int(np.argmin(cover_L[::-1]))  # the largest rung among equals: fewest chunks
            price_N[n], first_N[n] = cover_L[best], rows_L[best]
        price_N[1:] -= joint  # k chunks have k - 1 joints
        return cls(tuple(int(r) for r in rows_L), price_N, first_N)

    def chunks(self, count: int) -> list[int]:
        """The rungs that cover `count` samples, largest first; only the last one may be padded."""
        chunks, remaining = [], count
        while remaining > 0:
            rung = int(self.first_N[remaining])
            chunks.append(rung)
            remaining -= rung
        return sorted(chunks, reverse=True)

    def rows(self, count: int) -> int:
        """Rows computed for `count` samples, padding included."""
        return sum(self.chunks(count))


def check_rungs(rungs: Sequence[int] | None) -> None:
    """Check rungs given by a user; None is valid.

    Raises:
        ValueError: If they are not whole numbers of at least 1.
    """
    if rungs is None:
        return
    whole = lambda rows: isinstance(rows, int | np.integer) and not isinstance(rows, bool) and rows >= 1
    if not isinstance(rungs, Sequence | np.ndarray) or not all(map(whole, rungs)):
        raise ValueError(
            f"rungs is {rungs!r}: expected the rows of the chunks to compile, whole numbers of at least 1 such as "
            "[16, 64, 256], or None to choose them automatically."
        )


def geometric_rungs(top: int, quantum: int = 1, ratio: float = 1.1, span: int = 64) -> list[int]:
    """Rungs from `top` down to top / span, a factor of about `ratio` apart, in multiples of the quantum.

    At a ratio of 1.1 the padding of a count between two rungs is at most 10% of its rows, 5% on average. Larger rungs
    are rounded up to multiples of 2, 4 or 8, which suit vector units.
    """
    largest = -(-top // quantum) * quantum
    rungs, size = {largest}, float(top)
    while (size := size / ratio) >= max(top / span, 1):
        step = int(np.lcm(quantum, next(k for k in (8, 4, 2, 1) if size >= 8 * k or k == 1)))
        rungs.add(min(largest, -(-int(np.ceil(size)) // step) * step))
    return sorted(rungs)


@dataclass(frozen=True)
class PriceList:
    """Prices by rung: seconds of one chunk alone on an idle device (rows, where speeds are simulated)."""

    prices: Mapping[int, float]
    joint: float  # price of adding one chunk's sums to another's
    unit: float  # price of one sample at full batch, when the ladder was first built

    def staircase(self, limit: int, capacity: int) -> Staircase:
        """Prices of all counts up to `capacity` for a worker whose chunks have at most `limit` rows."""
        fits = [rung for rung in self.prices if rung <= limit] or [min(self.prices)]
        return Staircase.from_prices(fits, [self.prices[rung] for rung in fits], capacity, self.joint)

    def adding(self, rung: int, price: float) -> PriceList:
        """The list with one more rung."""
        return replace(self, prices={**self.prices, rung: price})

    def only(self, rungs: Sequence[int]) -> PriceList:
        """The list of these rungs; one that has no price yet gets a guess."""
        return replace(self, prices={rung: self.prices.get(rung, self.guess(rung)) for rung in rungs})

    def guess(self, rung: int) -> float:
        """Estimate the price of a rung that was not measured.

        Linear interpolation between its neighbors. Below all rungs, extrapolation from the two smallest, but no cheaper
        per row than the smallest; from one alone, in proportion to the rows.
        """
        rungs = sorted(self.prices)
        price = [self.prices[r] for r in rungs]
        if rung >= rungs[0] or len(rungs) == 1:
            return float(np.interp(rung, rungs, price)) if rung >= rungs[0] else price[0] * rung / rungs[0]
        slope = (price[1] - price[0]) / (rungs[1] - rungs[0])
        return max(price[0] - slope * (rungs[0] - rung), price[0] * rung / rungs[0])

    def plain(self) -> dict[str, Any]:
        """As plain JSON values, to send to other processes; floats survive to the bit."""
        prices = {str(rung): price for rung, price in self.prices.items()}
        return {"prices": prices, "joint": self.joint, "unit": self.unit}

    @classmethod
    def from_plain(cls, values: Mapping[str, Any]) -> PriceList:
        """The list that `plain` returned."""
        return cls({int(rung): price for rung, price in values["prices"].items()}, values["joint"], values["unit"])


def common_rungs(rungs_by_kind_P: list[dict[str, list[int]]]) -> dict[str, tuple[int, list[int]]]:
    """Per kind of device, the process that measures its prices and the rungs that all processes with that kind have.

    The first process with a kind measures it for all.

    Args:
        rungs_by_kind_P: For every process, the rungs of each of its kinds of device.

    Raises:
        ValueError: If two processes have a kind of device but no rung in common.
    """
    found: dict[str, tuple[int, list[int]]] = {}
    for process, kinds in enumerate(rungs_by_kind_P):
        for kind, rungs in kinds.items():
            owner, known = found.get(kind, (process, rungs))
            both = sorted(set(known) & set(rungs))
            if not both:
                raise ValueError(
                    f"Processes {owner} and {process} have devices of kind {kind} but no chunk size in common: "
                    f"{known} rows and {rungs}. Give max_rows that fits both."
                )
            found[kind] = owner, both
    return found
