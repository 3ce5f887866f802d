"""The files of a run's folder: metrics.jsonl, one line a step, and summary.json."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, TextIO

from hetjax.report.trackers import Row, plain
from hetjax.thinning import LIMIT, Thinning

METRICS = "metrics.jsonl"
SUMMARY = "summary.json"
CONFIG = "config.json"


class JsonlTracker:
    """Writes a line per step and hands it to the operating system at once: a kill loses at most the line in writing.

    `done` is the number of steps that a resumed run has behind it: their lines are kept, later ones (and a half-written
    last one) go, because they are about to happen again. 0 starts afresh. What is there already changes with the first
    row: a run that comes to none leaves that of an earlier one as it was.

    Beyond `limit` lines the file is thinned out like a history (see `hetjax.thinning`): it is rewritten whole, and of
    the further steps only those that are kept are written, and the last one on `close`.
    """

    def __init__(self, folder: str | Path, *, done: int = 0, limit: int = LIMIT):
        self.folder, self._done = Path(folder), done
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / METRICS).open("a").close()  # whether it can be written to is better known now
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
        """Open the file, rid of rows of other runs; the summary of an earlier run does not outlive its metrics."""
        if self._file is None:
            self._rewrite(until=self._done)
            (self.folder / SUMMARY).unlink(missing_ok=True)

    def _rewrite(self, until: int | None = None) -> None:
        """Keep what belongs to this run, thinned out if it is too much, and go on behind it."""
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
    """Write a small JSON file whole or not at all."""
    draft = path.with_name(path.name + ".draft")
    draft.write_text(json.dumps(plain(values), indent=2) + "\n", encoding="utf-8")
    os.replace(draft, path)


def parse_line(line: str) -> dict[str, Any] | None:
    """The row in a line of metrics.jsonl, or None where there is none (cut off, or something else)."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    step = row.get("step") if isinstance(row, dict) else None
    return row if isinstance(step, int) and not isinstance(step, bool) and abs(step) < 2**63 else None


def _is_event(row: Row) -> bool:
    return bool(row.get("changed") or row.get("nonfinite"))
