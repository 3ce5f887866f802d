"""A bar for work before the first step, such as the cutting of blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


@contextmanager
def progress_bar(name: str, total: int, console: Console) -> Iterator[Callable[[int], None]]:
    """A progress bar on a terminal, one line elsewhere; told how many have been done since it was last told."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
        task = progress.add_task(name, total=total)
        yield lambda done: progress.advance(task, done)
