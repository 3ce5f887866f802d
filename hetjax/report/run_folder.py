"""Reads what a run left in its folder, whole or cut short, into arrays for drawing."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hetjax.report.trackers import CONFIG, METRICS, SUMMARY, parse_line


@dataclass(frozen=True)
class RecordedRun:
    """One run: S steps on W workers. What is not known is NaN; `notes` says in sentences what was missing or broken."""

    folder: Path
    name: str
    step_S: np.ndarray
    loss_S: np.ndarray
    counts_SxW: np.ndarray
    times_SxW: np.ndarray
    step_time_S: np.ndarray
    samples_per_s_S: np.ndarray
    seconds_S: np.ndarray
    samples_S: np.ndarray
    changed_S: np.ndarray
    updates_SxW: np.ndarray  # of each worker, in a run without a barrier
    batches_SxW: np.ndarray
    summary: dict[str, Any]
    config: dict[str, Any]
    notes: tuple[str, ...]

    @property
    def steps(self) -> int:
        return len(self.step_S)

    @property
    def workers(self) -> int:
        return self.counts_SxW.shape[1]

    @property
    def ideal(self) -> float | None:
        """Samples per second of all workers together, if the summary knows."""
        value = self.summary.get("ideal_samples_per_s")
        return float(value) if isinstance(value, (int, float)) and value > 0 else None

    @property
    def asynchronous(self) -> bool:
        """Whether workers made updates of their own, without a barrier between steps."""
        return bool(np.isfinite(self.updates_SxW).any())

    @property
    def full_S(self) -> np.ndarray:
        """The steps with the usual batch (give or take a sample per worker): not the short last one of an epoch.

        Without a barrier a step is what was finished meanwhile: all of them count.
        """
        if self.asynchronous:
            return np.ones(self.steps, bool)
        batch_S = np.nansum(self.counts_SxW, axis=1)
        return batch_S >= max(1, batch_S.max(initial=0) - self.workers)

    @property
    def changes(self) -> np.ndarray:
        """Indices of the steps with which the plan changed."""
        return np.flatnonzero(self.changed_S > 0)


def find_runs(folder: str | Path) -> list[Path]:
    """The folder itself if a run was recorded in it, else the folders directly below it with a run."""
    folder = Path(folder)
    if (folder / METRICS).is_file():
        return [folder]
    below = sorted(path.parent for path in folder.glob(f"*/{METRICS}")) if folder.is_dir() else []
    if not below:
        raise FileNotFoundError(
            f"There is no {METRICS} in {folder} or in a folder directly below it. Give the folder that a training run "
            "wrote (its --out)."
        )
    return below


def read_run(folder: str | Path, name: str | None = None) -> RecordedRun:
    """The run in this folder. A cut-off or broken line costs that line and adds a note, nothing else."""
    folder = Path(folder)
    path = folder / METRICS
    if not path.is_file():
        raise FileNotFoundError(f"There is no file {path}. Give the folder that a training run wrote (its --out).")
    notes: list[str] = []
    rows = _rows(path, notes)
    summary, config = _json(folder / SUMMARY, notes), _json(folder / CONFIG, notes)
    if "utilisation" in summary:  # as runs before version 0.2 spelled it
        summary["utilization"] = summary.pop("utilisation")
    workers = max((len(row["counts"]) for row in rows if isinstance(row.get("counts"), list)), default=0)
    counts_SxW = _table(rows, "counts", workers)
    times_SxW = _table(rows, "times", workers)
    step_time_S = _column(rows, "step_time")
    batch_S = np.nansum(counts_SxW, axis=1)
    speed_S = _column(rows, "samples_per_s")
    known = np.isnan(speed_S) & (step_time_S > 0)
    speed_S[known] = batch_S[known] / step_time_S[known]
    seconds_S, samples_S = _column(rows, "seconds"), _column(rows, "samples")
    return RecordedRun(
        folder=folder,
        name=name or folder.resolve().name,
        step_S=np.array([row["step"] for row in rows], np.int64),
        loss_S=_column(rows, "loss"),
        counts_SxW=counts_SxW,
        times_SxW=times_SxW,
        step_time_S=step_time_S,
        samples_per_s_S=speed_S,
        seconds_S=np.cumsum(np.nan_to_num(step_time_S)) if np.isnan(seconds_S).all() else seconds_S,
        samples_S=np.cumsum(batch_S) if np.isnan(samples_S).all() else samples_S,
        changed_S=_column(rows, "changed"),
        updates_SxW=_table(rows, "updates", workers),
        batches_SxW=_table(rows, "batches", workers),
        summary=summary,
        config=config,
        notes=tuple(notes),
    )


def _rows(path: Path, notes: list[str]) -> list[dict[str, Any]]:
    """One row per step in the order of steps; a step written twice (a resumed run) counts as written last."""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    rows = [parse_line(line) for line in lines]
    broken = [number for number, row in enumerate(rows, 1) if row is None]
    if broken == [len(rows)]:
        notes.append(f"The last line of {path.name} is cut off: the run was killed while writing it.")
    elif broken:
        notes.append(f"{len(broken)} of {len(rows)} lines of {path.name} are unreadable (first: line {broken[0]}).")
    by_step = {row["step"]: row for row in rows if row is not None}
    if not by_step:
        notes.append(f"{path.name} holds no finished step.")
    return [by_step[step] for step in sorted(by_step)]


def _json(path: Path, notes: list[str]) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError("not an object")
        return content
    except FileNotFoundError:
        notes.append(f"There is no {path.name}" + (": the run has not finished." if path.name == SUMMARY else "."))
    except (ValueError, OSError, RecursionError) as error:
        notes.append(f"{path.name} is unreadable ({error}).")
    return {}


def _number(value: Any) -> float:
    """NaN for what is none, or beyond what a picture can show."""
    return float(value) if isinstance(value, (int, float)) and abs(value) < 1e300 else np.nan


def _column(rows: list[dict[str, Any]], key: str) -> np.ndarray:
    return np.array([_number(row.get(key)) for row in rows], np.float64)


def _table(rows: list[dict[str, Any]], key: str, workers: int) -> np.ndarray:
    table = np.full((len(rows), workers), np.nan)
    for row, line in zip(table, rows, strict=True):
        values = line.get(key)
        if isinstance(values, list):
            row[: len(values)] = [_number(value) for value in values[:workers]]
    return table
