"""The files of a run's folder: metrics.jsonl, one line a step, and summary.json."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, TextIO

from hetjax.watch.tracker import Row, plain

METRICS = "metrics.jsonl"
SUMMARY = "summary.json"
CONFIG = "config.json"


class JsonlTracker:
    """Writes a line per step and hands it to the operating system at once: a kill loses at most the line in writing.

    `done` is the number of steps that a resumed run has behind it: their lines are kept, later ones (and a half-written
    last one) go, because they are about to happen again. 0 starts afresh. What is there already changes with the first
    row: a run that comes to none leaves that of an earlier one as it was.
    """

    def __init__(self, folder: str | Path, *, done: int = 0):
        self.folder, self._done = Path(folder), done
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / METRICS).open("a").close()  # whether it can be written to is better known now
        self._file: TextIO | None = None

    def log(self, step: int, row: Row) -> None:
        file = self._begun()
        file.write(json.dumps({"step": step, **plain(row)}) + "\n")
        file.flush()

    def summary(self, values: Row) -> None:
        self._begun()
        write_json(self.folder / SUMMARY, values)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _begun(self) -> TextIO:
        """The file, rid of rows of other runs; the summary of an earlier run does not outlive its metrics."""
        if self._file is None:
            _keep_until(self.folder / METRICS, self._done)
            (self.folder / SUMMARY).unlink(missing_ok=True)
            self._file = (self.folder / METRICS).open("a", encoding="utf-8")
        return self._file


def write_json(path: Path, values: Row) -> None:
    """Write a small JSON file whole or not at all."""
    draft = path.with_name(path.name + ".draft")
    draft.write_text(json.dumps(plain(values), indent=2) + "\n", encoding="utf-8")
    os.replace(draft, path)


def parse_line(line: str) -> dict[str, Any] | None:
    """The row in a line of metrics.jsonl, or None where there is none (cut off, or something else)."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    step = row.get("step") if isinstance(row, dict) else None
    return row if isinstance(step, int) and not isinstance(step, bool) else None


def _keep_until(path: Path, done: int) -> None:
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    kept = [line for line in lines if (row := parse_line(line)) is not None and 0 < row["step"] <= done]
    draft = path.with_name(path.name + ".draft")
    draft.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
    os.replace(draft, path)
