"""`fixed`: shares that the user gives, by worker or by kind of device."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from hetjax.planning.controllers.frame import Frame
from hetjax.planning.limits import Limits
from hetjax.planning.rounding import largest_remainder


class Fixed(Frame):
    """n_i = B p_i / sum_k p_k in every step, in whole samples by largest remainder, within the limits.

    Args:
        shares: one number per worker ([4, 2, 1, 1]), or one per kind of device ({'gpu': 4, 'cpu': 1}), where a kind is
            a part of its name in `python -m hetjax check`. As text: '4,2,1,1', 'gpu=4,cpu=1'.
    """

    name = "fixed"

    def __init__(self, shares: str | Sequence[float] | Mapping[str, float]) -> None:
        given = _read(shares) if isinstance(shares, str) else shares
        self.by_kind = dict(given) if isinstance(given, Mapping) else None
        values = list(given.values()) if isinstance(given, Mapping) else list(given)
        if not values or not all(_is_share(value) for value in values) or not any(values):
            raise ValueError(f"The shares are {shares!r}; expected numbers, zero or more and not all zero: '4,2,1,1'.")
        self.share_W: np.ndarray | None = None if self.by_kind else np.asarray(values, np.float64)
        super().__init__()

    def for_kinds(self, kinds_W: Sequence[str]) -> None:
        """Turn shares by kind into shares by worker."""
        if self.by_kind is None:
            self._check(len(kinds_W))
            return
        found = [[name for name in self.by_kind if name.lower() in kind.lower()] for kind in kinds_W]
        for kind, names in zip(kinds_W, found, strict=True):
            if len(names) != 1:
                fit = "several" if names else "none"
                raise ValueError(
                    f"The workers are {', '.join(dict.fromkeys(kinds_W))}, and of the shares for "
                    f"{', '.join(self.by_kind)} {fit} fit {kind}: give one for each kind."
                )
        self.share_W = np.array([self.by_kind[names[0]] for names in found], np.float64)
        if not self.share_W.any():
            raise ValueError(f"The shares {self.by_kind} leave no worker with samples.")

    def begin(self, workers: int) -> None:
        if workers:
            self._check(workers)

    def _check(self, workers: int) -> None:
        if self.share_W is None:
            raise ValueError("Shares by kind need to know the workers: call for_kinds first.")
        if len(self.share_W) != workers:
            raise ValueError(f"Got {len(self.share_W)} shares for {workers} workers; give one share per worker.")

    def shares(self, counts_W: np.ndarray, limits: Limits) -> np.ndarray:
        assert self.share_W is not None
        return self.share_W

    def decide(self, counts_W: np.ndarray, limits: Limits, epoch: int) -> tuple[np.ndarray, str]:
        assert self.share_W is not None
        return largest_remainder(self.share_W, limits, self.usual), "shares as given"


def _is_share(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0


def _read(text: str) -> list[float] | dict[str, float]:
    """'4,2,1,1' or 'gpu=4,cpu=1'."""
    parts = [part.strip() for part in text.split(",")]
    try:
        if "=" in text:
            pairs = [part.split("=") for part in parts]
            if len({name.strip() for name, _ in pairs}) == len(pairs):
                return {name.strip(): float(value) for name, value in pairs}
        else:
            return [float(part) for part in parts]
    except ValueError:
        pass
    raise ValueError(f"The shares are {text!r}; expected numbers such as '4,2,1,1', or kinds such as 'gpu=4,cpu=1'.")
