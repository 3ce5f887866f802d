"""Read a recorded run, complete or cut short, from its folder into arrays."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hetjax.report.trackers import CONFIG, METRICS, SUMMARY, parse_line


@dataclass(frozen=True)
class MemberChange:
    """A change of the members of an elastic fleet: who left and who came, why, and the seconds that it took."""

    left: tuple[int, ...]
    came: tuple[int, ...]
    seconds: float
    reason: str

    @property
    def sign(self) -> str:
        """Who left and who came, as in "-2 +5"."""
        return " ".join([f"\N{MINUS SIGN}{number}" for number in self.left] + [f"+{number}" for number in self.came])


@dataclass(frozen=True)
class RecordedRun:
    """One run of S steps on W workers.

    Unknown values are NaN; `warnings` are sentences about what was missing or unreadable.
    """

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
    updates_SxW: np.ndarray  # asynchronous runs only
    batches_SxW: np.ndarray  # likewise
    members_S: tuple[tuple[MemberChange, ...], ...]  # of an elastic fleet: the changes before each step
    summary: dict[str, Any]
    config: dict[str, Any]
    warnings: tuple[str, ...]

    @property
    def steps(self) -> int:
        return len(self.step_S)

    @property
    def workers(self) -> int:
        return self.counts_SxW.shape[1]

    @property
    def ideal(self) -> float | None:
        """Ideal samples/s of all workers together; None if the summary does not have it."""
        value = self.summary.get("ideal_samples_per_s")
        return float(value) if isinstance(value, (int, float)) and value > 0 else None

    @property
    def asynchronous(self) -> bool:
        """Whether workers updated the model on their own, without a barrier between steps."""
        return bool(np.isfinite(self.updates_SxW).any())

    @property
    def full_S(self) -> np.ndarray:
        """Mask of the steps with the full batch (up to one sample per worker), without the short last one of an epoch.

        In asynchronous runs all steps count: each covers whatever was finished in its interval.
        """
        if self.asynchronous:
            return np.ones(self.steps, bool)
        batch_S = np.nansum(self.counts_SxW, axis=1)
        return batch_S >= max(1, batch_S.max(initial=0) - self.workers)

    @property
    def changes(self) -> np.ndarray:
        """Indices of the steps at which the plan changed."""
        return np.flatnonzero(self.changed_S > 0)


def find_runs(folder: str | Path) -> list[Path]:
    """Return the folders that hold a recorded run: this one, and those directly below it."""
    folder = Path(folder)
    found = [path.parent for path in (folder / METRICS, *sorted(folder.glob(f"*/{METRICS}"))) if path.is_file()]
    if not found:
        raise FileNotFoundError(
            f"There is no {METRICS} in {folder} or in a folder directly below it. "
            "Give the --out folder of a training run."
        )
    return found


def read_run(folder: str | Path, name: str | None = None) -> RecordedRun:
    """Read a recorded run; a truncated or unreadable line costs that line and adds a warning.

    Args:
        folder: The --out folder of the run.
        name: Name of the run in reports. Default: that of the folder.

    Returns:
        The run.

    Raises:
        FileNotFoundError: If the folder has no metrics.
    """
    folder = Path(folder)
    path = folder / METRICS
    if not path.is_file():
        raise FileNotFoundError(f"There is no file {path}. Give the --out folder of a training run.")
    warnings: list[str] = []
    rows = _rows(path, warnings)
    summary, config = _json(folder / SUMMARY, warnings), _json(folder / CONFIG, warnings)
    if "utilisation" in summary:  # the spelling of runs recorded by early versions
        summary["utilization"] = summary.pop("utilisation")
    workers = max((len(row["counts"]) for row in rows if isinstance(row.get("counts"), list)), default=0)
    counts_SxW = _table(rows, "counts", workers)
    times_SxW = _table(rows, "times", workers)
    step_time_S = _column(rows, "step_time")
    batch_S = np.nansum(counts_SxW, axis=1)
    speed_S = _column(rows, "samples_per_s")
    missing = np.isnan(speed_S) & (step_time_S > 0)
    speed_S[missing] = batch_S[missing] / step_time_S[missing]
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
        members_S=tuple(_changes(row.get("members")) for row in rows),
        summary=summary,
        config=config,
        warnings=tuple(warnings),
    )


def _rows(path: Path, warnings: list[str]) -> list[dict[str, Any]]:
    """Return one row per step, in order; of a step written twice, by a resumed run, the last one counts."""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    rows = [parse_line(line) for line in lines]
    unreadable = [number for number, row in enumerate(rows, 1) if row is None]
    if unreadable == [len(rows)]:
        warnings.append(f"The last line of {path.name} is truncated: the run was killed while writing it.")
    elif unreadable:
        warnings.append(
            f"{len(unreadable)} of {len(rows)} lines of {path.name} are unreadable (first: line {unreadable[0]})."
        )
    by_step = {row["step"]: row for row in rows if row is not None}
    if not by_step:
        warnings.append(f"{path.name} contains no finished step.")
    return [by_step[step] for step in sorted(by_step)]


def _json(path: Path, warnings: list[str]) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError("not an object")
        return content
    except FileNotFoundError:
        warnings.append(f"There is no {path.name}" + (": the run has not finished." if path.name == SUMMARY else "."))
    except (ValueError, OSError, RecursionError) as error:
        warnings.append(f"{path.name} is unreadable ({error}).")
    return {}


def _number(value: Any) -> float:
    """Return the number; NaN for anything else and for numbers too large to draw."""
    return float(value) if isinstance(value, (int, float)) and abs(value) < 1e300 else np.nan


def _changes(value: Any) -> tuple[MemberChange, ...]:
    """The changes of the membership in a row; none if they are damaged."""
    numbers = lambda found: tuple(map(int, found))
    try:
        return tuple(
            MemberChange(numbers(one["left"]), numbers(one["came"]), float(one["seconds"]), str(one["reason"]))
            for one in value or ()
        )
    except (TypeError, KeyError, ValueError, OverflowError):
        return ()


def _column(rows: list[dict[str, Any]], key: str) -> np.ndarray:
    return np.array([_number(row.get(key)) for row in rows], np.float64)


def _table(rows: list[dict[str, Any]], key: str, workers: int) -> np.ndarray:
    table = np.full((len(rows), workers), np.nan)
    for row, line in zip(table, rows, strict=True):
        values = line.get(key)
        if isinstance(values, list):
            row[: len(values)] = [_number(value) for value in values[:workers]]
    return table
