"""`static`: shares from one probe, then fixed for good. In quiet conditions nearly as good as anything."""

from __future__ import annotations

import numpy as np

from hetjax.planning.controllers.base import Observation
from hetjax.planning.controllers.frame import Frame
from hetjax.planning.limits import Limits
from hetjax.planning.rounding import largest_remainder


class Static(Frame):
    """p_i = (n_i / t_i) / sum_k (n_k / t_k) from the first step observed; a worker without a timing gets the mean rate.

    Shares that are known beforehand: the controller `fixed`.
    """

    name = "static"
    learned = ("share_W",)

    def begin(self, workers: int) -> None:
        self.share_W: np.ndarray | None = None

    def observe(self, seen: Observation) -> None:
        valid_W = seen.valid_W
        if self.share_W is None and valid_W.any():
            rate_W = np.where(valid_W, seen.counts_W / np.where(valid_W, seen.times_W, 1.0), 0.0)
            rate_W = np.where(valid_W, rate_W, rate_W[valid_W].sum() / valid_W.sum())
            self.share_W = rate_W / rate_W.sum()

    def shares(self, counts_W: np.ndarray, limits: Limits) -> np.ndarray:
        return counts_W.astype(np.float64) if self.share_W is None else self.share_W

    def decide(self, counts_W: np.ndarray, limits: Limits, epoch: int) -> tuple[np.ndarray, str]:
        if self.share_W is None:
            return counts_W, ""
        return largest_remainder(self.share_W, limits, self.usual), "shares of the first timing"
