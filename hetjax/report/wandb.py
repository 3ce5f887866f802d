"""Weights & Biases behind the tracker interface; the package is imported only when a run asks for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hetjax.report.trackers import Row, plain, scalars


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
