"""What a run of train.py writes and shows: its log, its trackers, what it came to, the table at the end."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.logging import RichHandler
from rich.table import Table
from training.configs import Config

from hetjax import checkpoint, report
from hetjax.history import History
from hetjax.presets import Choice
from hetjax.state import State

log = logging.getLogger("hetjax")
SAME_STEPS = 10  # later the optimizer has blown up the rounding of sums in another order


def quiet_logs(console: Console, debug: bool) -> None:
    """hetjax's warnings on the terminal (with --debug everything), other packages' errors only."""
    for noisy in ("jax", "orbax", "absl"):
        logging.getLogger(noisy).setLevel(logging.WARNING if debug else logging.ERROR)
    log.handlers = [RichHandler(logging.INFO if debug else logging.WARNING, console, show_time=False, show_path=False)]
    log.setLevel(logging.INFO)
    log.propagate = False


def write_config(config: Config, folder: Path) -> None:
    if jax.process_index() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        report.write_json(folder / "config.json", config.flat())


@contextmanager
def log_file(folder: Path, mode: str) -> Iterator[None]:
    """hetjax's log of a run, in its folder."""
    if jax.process_index() != 0:
        yield
        return
    handler = logging.FileHandler(folder / "log.txt", mode, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)
        handler.close()


def trackers(config: Config, name: str, folder: Path, done: int) -> report.Tracker:
    if jax.process_index() != 0:
        return report.Composite()
    told: list[report.Tracker] = [report.JsonlTracker(folder, done=done)]
    if config.output.tensorboard:
        told.append(report.TensorBoardTracker(folder))
    if config.output.wandb is not None:
        from hetjax.report.trackers import WandbTracker

        told.append(WandbTracker(config.output.wandb, name=name, config=config.flat(), folder=folder))
    return report.Composite(*told)


def summary(
    chosen: Choice,
    folder: Path,
    history: History,
    tested: dict[str, float],
    state: State,
    seconds: float,
    plan_changes: int,
) -> dict[str, Any]:
    """What the run came to: steps, samples, seconds and plan changes of all its parts, the rest from the last part.

    The history of daso is about the workers of the first process; the state's cursor counts the samples of all.
    """
    last, samples = history.summary(), int(state.cursor)
    wall, ideal = seconds + last["wall_s"], last["ideal_samples_per_s"]
    if last["final_loss"] is None:  # every step was made before it was resumed
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
    """The summary of the run in a folder, if that went as far as is asked for: so many steps, else so many samples."""
    if not (folder / "summary.json").is_file():
        return None
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    done = summary.get("last_step", summary["steps"]) if steps else summary.get("cursor", summary["samples"])
    return summary if done >= (steps or samples) else None


def warn_of_new_length(was: str, now: str, step: int) -> None:
    """A cosine over another number of steps: what is done cannot follow it any more."""
    if was != now:
        log.warning(
            "Steps 1 to %d followed the cosine schedule of a run of %s; from here on the learning rate is that of %s. "
            "With --schedule constant a longer run is the same as one that was never stopped.",
            step, was, now,
        )  # fmt: skip


def last_checkpoint(folder: Path | None) -> str:
    """For somebody whose run has ended badly: from where it can go on; None: it has no checkpoints yet."""
    found = None if folder is None else checkpoint.latest(folder)
    return "There is no checkpoint from before." if found is None else f"The last checkpoint from before is {found}."


def show_table(summaries: list[tuple[str, dict[str, Any]]], console: Console) -> None:
    table = Table(box=None, padding=(0, 2), pad_edge=False, header_style="bold")
    for column in ("", "samples/s", "ideal", "efficiency", "test accuracy", "seconds"):
        table.add_column(column, justify="right" if column else "left", no_wrap=not column)
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
    """How much faster, and that it is the same training: the losses step by step."""
    (_, equal), (_, balanced) = summaries
    runs = [report.read_run(folder / name) for name, _ in summaries]
    both = np.intersect1d(*(run.step_S[run.step_S <= SAME_STEPS] for run in runs))  # long runs do not keep all steps
    losses = [run.loss_S[np.isin(run.step_S, both)] for run in runs]
    apart = float(np.max(np.abs(losses[0] - losses[1])))
    faster = balanced["samples_per_s"] / equal["samples_per_s"]
    told = f"balanced is {faster:.2f}x as fast, and the same training: over the first {len(losses[0])} steps"
    console.print(f"{told}\nthe losses of the two differ by {apart:.0e} at most.", highlight=False)


def show_paths(picture: Path, page: Path, console: Console) -> None:
    console.print(f"picture: {picture}\nreport:  {page}", soft_wrap=True, highlight=False)
