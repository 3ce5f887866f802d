"""Trackers: every step's row and the summary of a run, to TensorBoard, Weights & Biases, or several at once.

What a tracker is: something that is told every step's row and the summary of a run.

TensorBoard event files through tensorboardX, which needs no TensorFlow.

Weights & Biases behind the tracker interface; the package is imported only when a run asks for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

Row = Mapping[str, Any]


class Tracker(Protocol):
    """Told what happens; must never change it.

    Steps count from 1: `step` is the number of steps done. `row` has the other keys of a line of metrics.jsonl.
    """

    def log(self, step: int, row: Row) -> None: ...

    def summary(self, values: Row) -> None: ...

    def close(self) -> None: ...


class Composite:
    """Several trackers as one, told in the order given."""

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
    """The value in JSON's own types: arrays become lists; NaN and infinity, which JSON does not know, become null."""
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
    """The finite numbers of a row by name: lists are numbered by worker, dicts are opened, texts are left out."""
    for key, value in plain(row).items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            yield from scalars(value, f"{name}/")
        elif isinstance(value, list):
            yield from scalars({f"worker {worker}": item for worker, item in enumerate(value)}, f"{name}/")
        elif isinstance(value, (bool, int, float)):
            yield name, float(value)


class TensorBoardTracker:
    """Every number of a row as a scalar; the summary's numbers under summary/ and its texts as one table."""

    def __init__(self, folder: str | Path):
        try:
            from tensorboardX import SummaryWriter
        except ImportError as error:
            raise ImportError(
                f"Writing for TensorBoard needs tensorboardX ({error}). Install the extra: pip install 'hetjax[track]'."
            ) from error
        self._writer = SummaryWriter(str(folder))
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
    """Sends every number of a row, and the summary. The login and the mode (online, offline) are wandb's own."""

    def __init__(self, project: str, *, name: str | None = None, config: Row | None = None, folder: Path | None = None):
        try:
            import wandb
        except ImportError as error:
            raise ImportError(f"Sending to Weights & Biases needs its package ({error}): pip install wandb.") from error
        self._run: Any = wandb.init(project=project, name=name, config=plain(config or {}), dir=folder)

    def log(self, step: int, row: Row) -> None:
        self._run.log(dict(scalars(row)), step=step)

    def summary(self, values: Row) -> None:
        self._run.summary.update(plain(values))

    def close(self) -> None:
        self._run.finish()
