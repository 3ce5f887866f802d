"""TensorBoard event files through tensorboardX, which needs no TensorFlow."""

from __future__ import annotations

from pathlib import Path

from hetjax.report.trackers import Row, scalars


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
