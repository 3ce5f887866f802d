"""What a tracker is: something that is told every step's row and the summary of a run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
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
