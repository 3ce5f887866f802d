"""Trackers: record one row per step and the summary of a run in files, TensorBoard or Weights & Biases."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, TextIO

import numpy as np

from hetjax.environment import optional_package
from hetjax.thinning import LIMIT, Thinning

Row = Mapping[str, Any]


class Tracker(Protocol):
    """Receives the rows and the summary of a run, and must not modify them.

    `step` is the number of finished steps, so it starts at 1. `row` holds the other keys of a line of metrics.jsonl.
    """

    def log(self, step: int, row: Row) -> None: ...

    def summary(self, values: Row) -> None: ...

    def close(self) -> None: ...


class Composite:
    """Several trackers as one.

    Args:
        *trackers: The trackers, in the order in which they are called.
    """

    def __init__(self, *trackers: Tracker):
        self.trackers = trackers

    def log(self, step: int, row: Row) -> None:
        for tracker in self.trackers:
            tracker.log(step, row)

    def summary(self, values: Row) -> None:
        for tracker in self.trackers:
            tracker.summary(values)

    def close(self) -> None:
        for tracker in self.trackers:
            tracker.close()


def plain(value: Any) -> Any:
    """Return the value in JSON types: arrays become lists; NaN and infinity, which JSON lacks, become null."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if hasattr(value, "tolist"):  # NumPy and JAX arrays and scalars
        return plain(np.asarray(value).tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def scalars(row: Row, prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yield the finite numbers of a row with their names: lists by worker, dicts flattened, text skipped.

    Metrics that are arrays are skipped too.
    """
    for key, value in plain(row).items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            yield from scalars(value, f"{name}/")
        elif isinstance(value, list) and key != "members" and not prefix.endswith("metrics/"):
            yield from scalars({f"worker {worker}": item for worker, item in enumerate(value)}, f"{name}/")
        elif isinstance(value, (bool, int, float)):
            yield name, float(value)


class TensorBoardTracker:
    """Writes every number as a TensorBoard scalar, those of the summary under summary/, and its text as a table.

    Args:
        folder: Folder of the event files.
    """

    def __init__(self, folder: str | Path):
        package = optional_package("tensorboardX", "Writing TensorBoard events", "'hetjax[track]'")
        self._writer = package.SummaryWriter(str(folder))
        self._step = 0

    def log(self, step: int, row: Row) -> None:
        self._step = step
        for name, value in scalars(row):
            self._writer.add_scalar(name, value, step)

    def summary(self, values: Row) -> None:
        for name, value in scalars(values, "summary/"):
            self._writer.add_scalar(name, value, self._step)
        texts = {name: value for name, value in values.items() if isinstance(value, str)}
        if texts:
            lines = ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in texts.items())]
            self._writer.add_text("summary", "\n".join(lines), self._step)

    def close(self) -> None:
        self._writer.close()


class WandbTracker:
    """Logs the numbers of every row and the summary to Weights & Biases; login and mode are configured by wandb."""

    def __init__(self, project: str, *, name: str | None = None, config: Row | None = None, folder: Path | None = None):
        wandb = optional_package("wandb", "Logging to Weights & Biases", "wandb")
        self._run: Any = wandb.init(project=project, name=name, config=plain(config or {}), dir=folder)

    def log(self, step: int, row: Row) -> None:
        self._run.log(dict(scalars(row)), step=step)

    def summary(self, values: Row) -> None:
        self._run.summary.update(plain(values))

    def close(self) -> None:
        self._run.finish()


METRICS = "metrics.jsonl"
SUMMARY = "summary.json"
CONFIG = "config.json"


class JsonlTracker:
    """Writes one line per step to metrics.jsonl, flushed at once: a kill loses at most the line being written.

    The files of an earlier run in the folder stay unchanged until the first row.

    Args:
        folder: the run folder, created if missing.
        done: number of finished steps of a resumed run: their lines are kept, later and truncated ones removed,
            because these steps run again. 0 starts a new file.
        limit: maximum number of lines. Beyond it the file is thinned like a history (see `hetjax.thinning`) and
            rewritten; of later steps only those kept by the thinning are written, and the last one on `close`.
    """

    def __init__(self, folder: str | Path, *, done: int = 0, limit: int = LIMIT):
        self.folder, self._done = Path(folder), done
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / METRICS).open("a").close()  # fails now if the folder is not writable
        self._file: TextIO | None = None
        self._thinning, self._lines, self._last = Thinning(limit), 0, ""

    def log(self, step: int, row: Row) -> None:
        self._begin()
        row = plain(row)
        self._last = json.dumps({"step": step, **row}) + "\n"
        if self._lines == 0 or self._thinning.keeps(step, _is_event(row)):
            self._write_last()

    def summary(self, values: Row) -> None:
        self._begin()
        write_json(self.folder / SUMMARY, values)

    def close(self) -> None:
        if self._file is not None and not self._file.closed:
            self._write_last()
            self._file.close()

    def _write_last(self) -> None:
        assert self._file is not None
        self._file.write(self._last)
        self._file.flush()
        self._lines, self._last = self._lines + bool(self._last), ""
        if self._lines > self._thinning.limit:
            self._rewrite()

    def _begin(self) -> None:
        """Open the file without the rows of earlier runs, and remove an earlier summary along with its metrics."""
        if self._file is None:
            self._rewrite(until=self._done)
            (self.folder / SUMMARY).unlink(missing_ok=True)

    def _rewrite(self, until: int | None = None) -> None:
        """Rewrite the file with the rows of this run, thinned if above the limit, and reopen it for appending."""
        if self._file is not None:
            self._file.close()
        path = self.folder / METRICS
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        rows = [(row, line) for line in lines if (row := parse_line(line)) is not None]
        if until is not None:
            rows = [(row, line) for row, line in rows if 0 < row["step"] <= until]
        rows = self._thinning.thin(rows, lambda pair: (pair[0]["step"], _is_event(pair[0])))
        draft = path.with_name(path.name + ".draft")
        draft.write_text("".join(line + "\n" for _, line in rows), encoding="utf-8")
        os.replace(draft, path)
        self._lines, self._file = len(rows), path.open("a", encoding="utf-8")


def write_json(path: Path, values: Row) -> None:
    """Write a JSON file atomically.

    Args:
        path: The file.
        values: Its content.
    """
    draft = path.with_name(path.name + ".draft")
    draft.write_text(json.dumps(plain(values), indent=2) + "\n", encoding="utf-8")
    os.replace(draft, path)


def parse_line(line: str) -> dict[str, Any] | None:
    """Return the row in a line of metrics.jsonl; None if it is truncated or not a row."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    step = row.get("step") if isinstance(row, dict) else None
    return row if isinstance(step, int) and not isinstance(step, bool) and abs(step) < 2**63 else None


def _is_event(row: Row) -> bool:
    return bool(row.get("changed") or row.get("nonfinite"))
