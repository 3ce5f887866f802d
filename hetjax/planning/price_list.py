"""What the chunks of one kind of device cost: measured by one process, believed by all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hetjax.planning.ladder_costs import Staircase


@dataclass(frozen=True)
class PriceList:
    """Prices by rung, in seconds of one chunk alone on an idle device (or in rows, where speeds are simulated)."""

    prices: Mapping[int, float]
    joint: float  # of adding one chunk's sums to another's
    unit: float  # of one sample at full batch, when the ladder was first built

    def staircase(self, limit: int, capacity: int) -> Staircase:
        """Prices of all counts up to `capacity` for a worker whose chunks may have at most `limit` rows."""
        fits = [rung for rung in self.prices if rung <= limit] or [min(self.prices)]
        return Staircase.from_prices(fits, [self.prices[rung] for rung in fits], capacity, self.joint)

    def adding(self, rung: int, price: float) -> PriceList:
        return replace(self, prices={**self.prices, rung: price})

    def guess(self, rung: int) -> float:
        """The price of a rung not measured: on the line between its neighbours, or below all of them on the line of
        the two smallest, but not cheaper by the row than the smallest."""
        have = sorted(self.prices)
        price = [self.prices[r] for r in have]
        if rung >= have[0] or len(have) == 1:
            return float(np.interp(rung, have, price)) if rung >= have[0] else price[0]
        slope = (price[1] - price[0]) / (have[1] - have[0])
        return max(price[0] - slope * (have[0] - rung), price[0] * rung / have[0])

    def plain(self) -> dict[str, Any]:
        """As JSON values; floats survive the way there and back to the bit."""
        prices = {str(rung): price for rung, price in self.prices.items()}
        return {"prices": prices, "joint": self.joint, "unit": self.unit}

    @classmethod
    def from_plain(cls, said: Mapping[str, Any]) -> PriceList:
        return cls({int(rung): price for rung, price in said["prices"].items()}, said["joint"], said["unit"])


def common_rungs(have: list[dict[str, list[int]]]) -> dict[str, tuple[int, list[int]]]:
    """Per kind of device, from the rungs that every process has of its own kinds: who sets the prices, and of what.

    That is the first process with the kind; a rung that one of them had to leave out is nobody's.
    """
    found: dict[str, tuple[int, list[int]]] = {}
    for process, kinds in enumerate(have):
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
