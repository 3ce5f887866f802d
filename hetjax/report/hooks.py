"""Hooks for `Trainer.fit` that pass finished steps to trackers and to the progress display."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from hetjax.report.display import Display
from hetjax.report.trackers import Tracker


class Follow:
    """A hook for `fit` that logs every finished step to a tracker, in process 0 only.

    Rows carry running totals, which stay correct when rows in between are thinned out. A resumed run continues the
    totals of its earlier parts.

    Args:
        tracker: where the rows go.
        seconds: training time of the earlier parts.
        plan_changes: number of plan changes in the earlier parts.
    """

    def __init__(self, tracker: Tracker, *, seconds: float = 0.0, plan_changes: int = 0):
        self.tracker, self.seconds, self.plan_changes = tracker, seconds, plan_changes

    def __call__(self, record: Any, state: Any) -> None:
        """Log a finished step.

        Args:
            record: the `Record` of the step.
            state: the `State` after it.
        """
        self.plan_changes += record.changed
        if not _is_first_process():
            return
        row = record.row()
        row["seconds"] += self.seconds
        row["samples"] = state.cursor
        row["plan_changes"] = self.plan_changes
        self.tracker.log(row.pop("step"), row)


class Progress(Follow):
    """A hook for `fit` that displays progress: `trainer.fit(..., hooks=[Progress()])`.

    A live display in a terminal, plain lines elsewhere; at the end one summary line remains.

    Args:
        title: name of the run.
        console: where to print (default: standard output).
        every: seconds between two lines outside a terminal.
    """

    def __init__(self, title: str = "", *, console: Console | None = None, every: float = 5.0):
        self.display = Display(title=title, console=console, every=every)
        super().__init__(self.display)

    def begin(self, history: Any) -> None:
        """Set the number of steps and the ideal throughput.

        Args:
            history: the `History` of the run that starts.
        """
        self.display.steps, self.display.ideal = history.last_step, history.ideal_samples_per_s

    def end(self, history: Any) -> None:
        """Print the summary line and stop the display.

        Args:
            history: the `History` of the finished run.
        """
        if history.records and _is_first_process():
            self.display.summary(history.summary())
        self.display.close()


def _is_first_process() -> bool:
    import jax  # here, because reports are made without JAX

    return jax.process_index() == 0
