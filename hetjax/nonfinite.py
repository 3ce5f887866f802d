"""The policy for a loss, gradient or update that is NaN or infinite: stop the run, or skip the step."""

from __future__ import annotations

import logging

from hetjax.arguments import whole
from hetjax.history import Record

log = logging.getLogger("hetjax")
POLICIES = ("stop", "skip")


class NonFiniteError(FloatingPointError):
    """Raised when a loss, gradient or update is NaN or infinite; no hook has seen a state that contains it."""


class NonFinitePolicy:
    """Stops the run at a non-finite step, or skips it, up to a number of skips in a row.

    Args:
        policy: 'stop' or 'skip'.
        max_skips: number of skips in a row after which 'skip' stops, too.
        node: number of this process, where each process plans for its own workers; names them in messages.

    Raises:
        TypeError: if max_skips is not an integer.
        ValueError: if the policy is unknown, or max_skips is below 1.
    """

    def __init__(self, policy: str, max_skips: int, node: int | None = None):
        if policy not in POLICIES:
            raise ValueError(f"on_nonfinite must be 'stop' or 'skip', got {policy!r}.")
        self.policy, self.max_skips, self.node = policy, whole("max_skips", max_skips, 1), node
        self._in_a_row = 0

    def check(self, record: Record) -> None:
        """Check a finished step; log a warning if it was skipped.

        Raises:
            NonFiniteError: if the run has to stop.
        """
        self._in_a_row = self._in_a_row + 1 if record.left_out else 0
        if not record.nonfinite:
            return
        node = "" if self.node is None else f" of node {self.node}"
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
