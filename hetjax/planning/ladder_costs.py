"""The price of a count: the cheapest set of chunks from a ladder of rungs that covers it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Staircase:
    """For every count n the cheapest cover by rungs, found by a small dynamic programme.

        price(n) = min over sets of rungs that cover n of  sum of their prices + (their number - 1) x joint

    Prices are measured, not assumed proportional to the rows: small chunks are the fast ones for some models and the
    slow ones for others. A cover of n + 1 samples also covers n, so the table never falls.
    """

    rungs: tuple[int, ...]  # rows, ascending
    price_N: np.ndarray  # price_N[n], n = 0 .. capacity, in the unit of the rung prices
    first_N: np.ndarray  # the rung that the best cover of n uses first

    @classmethod
    def from_prices(cls, rungs: Sequence[int], prices: Sequence[float], capacity: int, joint: float = 0.0) -> Staircase:
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
            best = len(cover_L) - 1 - int(np.argmin(cover_L[::-1]))  # the largest rung among equals: fewer chunks
            price_N[n], first_N[n] = cover_L[best], rows_L[best]
        price_N[1:] -= joint  # one joint less than chunks
        return cls(tuple(int(r) for r in rows_L), price_N, first_N)

    @property
    def capacity(self) -> int:
        return len(self.price_N) - 1

    @property
    def work_N(self) -> np.ndarray:
        """The price in units of one sample of a full batch, as `Limits.stairs` wants it."""
        return self.price_N * (self.capacity / self.price_N[-1])

    def chunks(self, count: int) -> list[int]:
        """The rungs that cover `count` samples, largest first; only the last one may be padded."""
        chunks, left = [], count
        while left > 0:
            rung = int(self.first_N[left])
            chunks.append(rung)
            left -= rung
        return sorted(chunks, reverse=True)

    def rows(self, count: int) -> int:
        """Rows really computed for `count` samples, padding included."""
        return sum(self.chunks(count))


def check_rungs(rungs: Sequence[int] | None) -> None:
    """Check the rungs that a user asks for.

    Raises:
        ValueError: If they are not whole numbers of at least 1.
    """
    if rungs is None:
        return
    whole = lambda rows: isinstance(rows, int | np.integer) and not isinstance(rows, bool) and rows >= 1
    if not isinstance(rungs, Sequence | np.ndarray) or not all(map(whole, rungs)):
        raise ValueError(
            f"rungs is {rungs!r}: expected the rows of the chunks to compile, whole numbers of at least 1 such as "
            "[16, 64, 256], or None to have them chosen."
        )


def geometric_rungs(top: int, quantum: int = 1, ratio: float = 1.1, span: int = 64) -> list[int]:
    """Rungs from `top` down to top / span, each about `ratio` below the next, multiples of the quantum.

    At a ratio of 1.1 a count between two rungs wastes at most a tenth of its rows, half of that on average. Larger
    rungs are rounded up to multiples of 2, 4 or 8, which suit vector units.
    """
    rungs, size = {-(-top // quantum) * quantum}, float(top)
    while (size := size / ratio) >= max(top / span, 1):
        step = int(np.lcm(quantum, next(k for k in (8, 4, 2, 1) if size >= 8 * k or k == 1)))
        rungs.add(-(-int(np.ceil(size)) // step) * step)
    return sorted(rungs)
