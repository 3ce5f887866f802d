"""Hooks for `Trainer.fit` that pass finished steps to trackers and to the progress display."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from hetjax import processes
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
        """Log a finished step; `fit` calls this.

        Args:
            record: the record of the step.
            state: the state after it.
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
    """A hook for `Trainer.fit` that shows the progress of the run.

    A live display on a terminal, plain lines elsewhere; a one-line summary remains at the end. With several processes
    only the first one prints.

    Examples:
        >>> trainer.fit(state, source, epochs=10, hooks=[hetjax.Progress()])

    Args:
        title: heading of the display.
        console: rich console to print to. Default: standard output.
        every: seconds between plain lines.
    """

    def __init__(self, title: str = "", *, console: Console | None = None, every: float = 5.0):
        self.display = Display(title=title, console=console, every=every)
        super().__init__(self.display)

    def compiling(self, workers: Any) -> None:
        """Say which backend is used, and that programs are compiled, which can take long; `fit` calls this first.

        Args:
            workers: the workers of the trainer.
        """
        if _is_first_process():
            number = f"{len(workers)} worker{'s' * (len(workers) > 1)}"
            title = f"{self.display.title}: " if self.display.title else ""
            self.display.console.print(f"{title}{workers.backend}, compiling for {number}", highlight=False)

    def begin(self, history: Any) -> None:
        """Start the display; `fit` calls this before the first step.

        Args:
            history: the history of the run.
        """
        self.display.steps, self.display.ideal = history.last_step, history.ideal_samples_per_s

    def end(self, history: Any) -> None:
        """Print the summary and close the display; `fit` calls this after the last step.

        Args:
            history: the history of the run.
        """
        if history.records and _is_first_process():
            self.display.summary(history.summary())
        self.display.close()


def _is_first_process() -> bool:
    return processes.first()
