"""What `hetjax train` writes and prints: log, trackers, summary, the table of results."""

from __future__ import annotations

import json
import logging
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from rich.console import Console
from rich.logging import RichHandler
from rich.table import Table

from hetjax import checkpoint, processes, report
from hetjax.cli.training.configs import Config
from hetjax.history import History
from hetjax.presets import Choice
from hetjax.state import State

log = logging.getLogger("hetjax")
_UNWRITTEN = 100  # steps by which the process that writes may be behind
SAME_STEPS = 10  # later steps amplify the rounding of sums in a different order


def quiet_logs(console: Console, debug: bool) -> None:
    """Show hetjax's warnings (its whole log with --debug) and only errors of other packages."""
    for noisy in ("jax", "orbax", "absl"):
        logging.getLogger(noisy).setLevel(logging.WARNING if debug else logging.ERROR)
    log.handlers = [RichHandler(logging.INFO if debug else logging.WARNING, console, show_time=False, show_path=False)]
    log.setLevel(logging.INFO)
    log.propagate = False


def speaks(console: Console) -> Callable[[Any, Any], None]:
    """A hook for `fit`: only process 0 prints, or its successor in an elastic fleet."""

    def hook(record: Any, state: Any) -> None:
        console.quiet = not processes.first()

    return hook


def write_config(config: Config, folder: Path) -> None:
    """Write config.json, in process 0."""
    if processes.first():
        folder.mkdir(parents=True, exist_ok=True)
        report.write_json(folder / "config.json", config.flat())


@contextmanager
def log_file(folder: Path, mode: str) -> Iterator[None]:
    """Write hetjax's log to log.txt in the run folder, in process 0, or in its successor in an elastic fleet."""
    if not (processes.first() or processes.elastic()):
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    mode = mode if processes.first() else "a"
    handler = logging.FileHandler(folder / "log.txt", mode, encoding="utf-8", delay=not processes.first())
    handler.addFilter(lambda record: processes.first())
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)
        handler.close()


def trackers(config: Config, name: str, folder: Path, done: int) -> report.Tracker:
    """Return the trackers that the flags ask for; `done`: number of steps of which they keep what is there."""
    chosen: list[report.Tracker] = [report.JsonlTracker(folder, done=done)]
    if config.output.tensorboard:
        chosen.append(report.TensorBoardTracker(folder))
    if config.output.wandb is not None:
        from hetjax.report.trackers import WandbTracker

        chosen.append(WandbTracker(config.output.wandb, name=name, config=config.flat(), folder=folder))
    return report.Composite(*chosen)


class Successor(report.Follow):
    """Logs finished steps to the trackers, in process 0; in an elastic fleet its successor goes on where it was lost.

    Args:
        config: the configuration.
        name: the run's name.
        folder: the run folder.
        done: number of steps of a resumed run.
        totals: those of its earlier parts.
    """

    def __init__(self, config: Config, name: str, folder: Path, done: int, **totals: Any):
        super().__init__(trackers(config, name, folder, done) if processes.first() else report.Composite(), **totals)
        self._open = lambda done: trackers(config, name, folder, done)
        self._folder, self._writes = folder, processes.first()
        self._unwritten: deque[tuple[Any, Any]] = deque(maxlen=_UNWRITTEN)
        self._turns = 0  # steps since this process comes first

    def __call__(self, record: Any, state: Any) -> None:
        """Log a finished step; `fit` calls this.

        Args:
            record: the record of the step.
            state: the state after it.
        """
        if not processes.elastic():
            super().__call__(record, state)
            return
        self._turns = self._turns + 1 if processes.first() else 0
        if self._writes and not self._turns:  # a member with a smaller number has joined
            self._writes = False
            self.tracker.close()
        if self._writes:
            super().__call__(record, state)
            return
        self._unwritten.append((record, SimpleNamespace(cursor=state.cursor)))
        if self._turns > 1:  # whoever wrote before has finished its hooks
            self.succeed()

    def succeed(self, ends: bool = False) -> None:
        """Go on after the last step that was written, if this process now comes first; `ends`: no step follows."""
        if self._writes or not processes.first() or not self._unwritten:
            return
        try:
            written = report.read_run(self._folder)
            done, seconds = (int(written.step_S[-1]), float(written.seconds_S[-1])) if written.steps else (0, 0.0)
            self.plan_changes = int(np.nansum(written.changed_S))
        except FileNotFoundError:  # this host has a folder of its own
            done, seconds = 0, 0.0
        new = [pair for pair in self._unwritten if pair[0].step > done]
        if not (new or ends):
            return
        covered = new[0][0].seconds - new[0][0].step_time if new else self._unwritten[-1][0].seconds
        self._writes, self.tracker, self.seconds = True, self._open(done), seconds - covered
        for record, state in new:
            super().__call__(record, state)
        self._unwritten.clear()


def summary(
    chosen: Choice,
    folder: Path,
    history: History,
    tested: dict[str, Any],
    state: State,
    seconds: float,
    plan_changes: int,
) -> dict[str, Any]:
    """Return the summary: totals over all parts of a resumed run, the rest from its last part.

    With daso the history covers only the workers of process 0; the state's cursor counts the samples of all.
    """
    last, samples = history.summary(), int(state.cursor)
    wall, ideal = seconds + last["wall_s"], last["ideal_samples_per_s"]
    if last["final_loss"] is None:  # no step was left after resuming
        last["final_loss"] = float(report.read_run(folder).loss_S[-1])
    return {
        "strategy": chosen.name,
        **last,
        "controller": chosen.controller.name if chosen.sync.stepped else "none",
        "partition": chosen.partition_name,
        "sync": chosen.sync.name,
        "steps": int(state.step),
        "samples": samples,
        "wall_s": wall,
        "samples_per_s": samples / wall,
        "efficiency": samples / wall / ideal if ideal else None,
        "plan_changes": plan_changes,
        "test_accuracy": tested["accuracy"],
        "test_loss": tested["loss"],
    }


def finished(folder: Path, steps: int | None, samples: int) -> dict[str, Any] | None:
    """Return the summary of the run in the folder if it has reached these steps, or samples if steps is None."""
    if not (folder / "summary.json").is_file():
        return None
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    done = summary.get("last_step", summary["steps"]) if steps else summary.get("cursor", summary["samples"])
    return summary if done >= (steps or samples) else None


def warn_of_new_length(before: str, now: str, step: int) -> None:
    """Warn that the finished steps followed a cosine schedule of another length."""
    if before != now:
        log.warning(
            "Steps 1 to %d followed the cosine schedule for %s; later steps follow that for %s. "
            "Only with --schedule constant does extending a run give the same training as one uninterrupted run.",
            step, before, now,
        )  # fmt: skip


def last_checkpoint(folder: Path | None) -> str:
    """Return the part of an error message that names the checkpoint to resume; None if there are none yet."""
    found = None if folder is None else checkpoint.latest(folder)
    return "There is no earlier checkpoint." if found is None else f"The last good checkpoint is {found}."


def show_table(summaries: list[tuple[str, dict[str, Any]]], console: Console) -> None:
    """Print one line per run."""
    table = Table(box=None, padding=(0, 2), pad_edge=False, header_style="bold")
    for column in ("strategy", "samples/s", "ideal", "efficiency", "test accuracy", "seconds"):
        table.add_column(column, justify="left" if column == "strategy" else "right", no_wrap=column == "strategy")
    for name, summary in summaries:
        ideal, efficiency = summary["ideal_samples_per_s"], summary["efficiency"]
        table.add_row(
            name,
            f"{summary['samples_per_s']:,.0f}",
            "–" if ideal is None else f"{ideal:,.0f}",
            "–" if efficiency is None else f"{efficiency:.0%}",
            f"{summary['test_accuracy']:.4f}",
            f"{summary['wall_s']:.1f}",
        )
    console.print("")
    console.print(table)
    console.print("")


def show_comparison(summaries: list[tuple[str, dict[str, Any]]], folder: Path, console: Console) -> None:
    """Print the speedup, and how little the losses of the first steps differ."""
    (_, equal), (_, balanced) = summaries
    runs = [report.read_run(folder / name) for name, _ in summaries]
    first, second = (run.step_S[run.step_S <= SAME_STEPS] for run in runs)
    both = np.intersect1d(first, second)  # long histories are thinned
    losses = [run.loss_S[np.isin(run.step_S, both)] for run in runs]
    difference = float(np.max(np.abs(losses[0] - losses[1])))
    speedup = balanced["samples_per_s"] / equal["samples_per_s"]
    message = f"balanced is {speedup:.2f}x as fast as equal, and the same training: over the first"
    console.print(f"{message}\n{len(both)} steps their losses differ by at most {difference:.0e}.", highlight=False)


def show_paths(figure: Path, page: Path, console: Console) -> None:
    """Print where figure and report are."""
    console.print(f"figure: {figure}\nreport: {page}", soft_wrap=True, highlight=False)
