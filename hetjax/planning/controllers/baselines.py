"""`equal`: every worker the same, n_i = batch / N. What data-parallel training does without a controller."""

from __future__ import annotations

import numpy as np

from hetjax.planning.controllers.frame import Frame
from hetjax.planning.limits import Limits


class Equal(Frame):
    """n_i = batch / N within the limits, odd samples to the lower index."""

    name = "equal"

    def shares(self, counts_W: np.ndarray, limits: Limits) -> np.ndarray:
        return np.ones(self.workers)
