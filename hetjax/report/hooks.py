"""Between a training loop and those who watch it: hooks that turn finished steps into rows for trackers."""

from __future__ import annotations

from typing import Any

import jax
from rich.console import Console

from hetjax.report.display import Display
from hetjax.report.trackers import Tracker


class Follow:
    """A hook for `fit` that tells a tracker every finished step.

    `seconds` is the time that earlier parts of a resumed run took, `plan_changes` how often the plan changed in them:
    rows count on from there, like the samples, so that they are right where steps in between are not kept. With
    several processes only the first one tells.
    """

    def __init__(self, tracker: Tracker, *, seconds: float = 0.0, plan_changes: int = 0):
        self.tracker, self.seconds, self.plan_changes = tracker, seconds, plan_changes

    def __call__(self, record: Any, state: Any) -> None:
        self.plan_changes += record.changed
        if jax.process_index() != 0:
            return
        row = record.row()
        row["seconds"] += self.seconds
        row["samples"] = state.cursor
        row["plan_changes"] = self.plan_changes
        self.tracker.log(row.pop("step"), row)


class Progress(Follow):
    """A hook for `fit` that shows the run while it goes on: `trainer.fit(..., hooks=[Progress()])`.

    One live picture on a terminal, plain lines elsewhere; at the end one line remains.
    """

    def __init__(self, title: str = "", *, console: Console | None = None, every: float = 5.0):
        self.display = Display(title=title, console=console, every=every)
        super().__init__(self.display)

    def begin(self, history: Any) -> None:
        self.display.steps, self.display.ideal = history.last_step, history.ideal_samples_per_s

    def end(self, history: Any) -> None:
        if history.records and jax.process_index() == 0:
            self.display.summary(history.summary())
        self.display.close()
