"""What happens to a run when a loss, a gradient or an update is NaN or infinite."""

from __future__ import annotations

import logging

from hetjax.arguments import whole
from hetjax.history import Record

log = logging.getLogger("hetjax")
POLICIES = ("stop", "skip")


class NonFiniteError(FloatingPointError):
    """A loss, gradient or update was NaN or infinite; no hook has seen a state with it."""


class NonFinitePolicy:
    """Stops the run, or lets a step go by without an update; but not one after the other without end.

    Args:
        policy: "stop" or "skip".
        max_skips: steps in a row that "skip" leaves out before it stops as well.

    Raises:
        TypeError, ValueError: for other values.
    """

    def __init__(self, policy: str, max_skips: int):
        if policy not in POLICIES:
            raise ValueError(f"on_nonfinite must be 'stop' or 'skip', got {policy!r}.")
        self.policy, self.max_skips = policy, whole("max_skips", max_skips, 1)
        self._in_a_row = 0

    def check(self, record: Record, node: str = "") -> None:
        """Look at a finished step. `node`: words that follow the number of a worker.

        Raises:
            NonFiniteError: the run has to stop.
        """
        self._in_a_row = self._in_a_row + 1 if record.left_out else 0
        if not record.nonfinite:
            return
        who = f"worker {', '.join(map(str, record.nonfinite))}{node}"
        if record.bad_update:
            what = f"the loss and the gradient were finite, but the optimizer's update of {who} was NaN or infinite"
            remedy = "Check the optimizer and its learning-rate schedule"
        else:
            what = f"the loss or gradient of {who} was NaN or infinite"
            remedy = "Lower the learning rate, check the data"
        if self.policy == "stop":
            raise NonFiniteError(f"Step {record.step}: {what}. {remedy}, or skip such steps with on_nonfinite='skip'.")
        if self._in_a_row >= self.max_skips:
            skipped, self._in_a_row = self._in_a_row, 0
            raise NonFiniteError(
                f"Step {record.step}: {what}, and {skipped} steps in a row have been skipped. {remedy}, or allow more "
                "with max_skips."
            )
        log.warning("Step %d: %s; its update was skipped.", record.step, what)
