"""Progress of a run: a live display in a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from hetjax.headline import headline
from hetjax.report.trackers import Row, plain


class Display:
    """A tracker that displays the latest row: progress, loss, throughput, and each worker's count, busy share and time.

    In a terminal a background thread redraws the display four times a second, so `log` itself is cheap. Elsewhere one
    line is printed for the first step, for the last step, and every `every` seconds in between.

    Args:
        steps: number of the last step, for the progress bar and the time left.
        title: name of the run.
        ideal: samples/s that all workers together would reach; without it no efficiency is shown.
        every: seconds between two lines outside a terminal.
        console: where to print (default: standard output).
        clock: current time in seconds; replaced in tests.
    """

    def __init__(
        self,
        steps: int | None = None,
        *,
        title: str = "",
        ideal: float | None = None,
        every: float = 5.0,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.steps = steps
        self.title = title
        self.ideal = ideal
        self.every = every
        self.console = console or Console()
        self._clock = clock
        self._started = clock()
        self._first_step: int | None = None
        self._next_line = 0.0
        self._step = 0
        self._row: dict[str, Any] = {}
        self._updates: list[int] = []  # updates per worker so far, in asynchronous runs
        self._recent: deque[tuple[int, float]] = deque(maxlen=12)  # samples and seconds of the last rows of such a run
        self._reason = ""
        self._live: Live | None = None

    def log(self, step: int, row: Row) -> None:
        if self._first_step is None:
            self._first_step = step
            self._started = self._next_line = self._clock()
        self._step, self._row = step, plain(row)
        if updates := self._row.get("updates"):
            self._updates = [a + b for a, b in zip(self._updates or [0] * len(updates), updates, strict=True)]
            self._recent.append((sum(self._row["counts"]), self._row["step_time"]))
            samples, seconds = (sum(part) for part in zip(*self._recent, strict=True))
            self._row["samples_per_s"] = samples / seconds if seconds else None  # a single row is too noisy
        if self._row.get("changed"):
            self._reason = f"step {step}: {self._row.get('reason') or 'plan changed'}"
            if "members" in self._row:  # worth a line that stays
                self.console.print(self._reason, soft_wrap=not self.console.is_terminal, highlight=False)
        if not self.console.is_terminal:
            last = self.steps is not None and step == self.steps
            if last or self._clock() >= self._next_line:
                self._next_line = self._clock() + self.every
                self.console.print(self.line(), soft_wrap=True, highlight=False)
        elif self._live is None:
            self._live = Live(get_renderable=self.render, console=self.console, refresh_per_second=4)
            self._live.start()

    def summary(self, values: Row) -> None:
        self._stop()
        parts = [headline({name: value for name, value in plain(values).items() if name != "final_loss"})]
        for name, key in (("busy", "utilization"), ("updates", "update_share")):  # asynchronous runs
            if isinstance(share_W := values.get(key), list):
                parts.append(f"{name} {' '.join(f'{share:.0%}' for share in share_W[:8])}")
        message = f"{self.title or 'done'}: {', '.join(filter(None, parts))}"
        for line in (message, *values.get("benched", ())[-3:]):
            self.console.print(line, soft_wrap=not self.console.is_terminal, highlight=False)

    def close(self) -> None:
        self._stop()

    def line(self) -> str:
        """Return the latest row as one line of text."""
        counts = self._row.get("counts") or []
        shown = " ".join(map(str, counts)) if len(counts) <= 8 else f"{min(counts)} to {max(counts)}"
        parts = [self._progress(), *self._numbers(), *([f"counts {shown}"] if counts else [])]
        if self._updates:
            parts.append("busy " + " ".join("–" if share is None else f"{share:.0%}" for share in self._busy()[:8]))
            parts.append("updates " + " ".join(f"{share:.0%}" for share in self._update_shares()[:8]))
        return "  ".join(([self.title] if self.title else []) + parts)

    def render(self) -> RenderableType:
        """Return the latest row as a rich renderable, at most 80 columns wide and as high as the console."""
        if not self._row:
            return Text("waiting for the first step")
        head = Table.grid(padding=(0, 2))
        head.add_column(no_wrap=True)
        head.add_column(width=24)
        head.add_column(no_wrap=True)
        bar = ProgressBar(total=self.steps, completed=self._step, width=24) if self.steps else ""
        head.add_row(self._progress(), bar, self._time_left())
        numbers = Text("  ".join(self._numbers()), no_wrap=True, overflow="ellipsis")
        parts: list[RenderableType] = [Text(self.title, style="bold", no_wrap=True)] if self.title else []
        parts += [head, numbers, self._workers()]
        if self._reason:
            parts.append(Text(self._reason, style="dim", no_wrap=True, overflow="ellipsis"))
        return Group(*parts)

    def _progress(self) -> str:
        of = f"/{self.steps}" if self.steps else ""
        epoch = f"  epoch {self._row['epoch']}" if "epoch" in self._row else ""
        return f"step {self._step}{of}{epoch}"

    def _numbers(self) -> list[str]:
        loss, speed = self._row.get("loss"), self._row.get("samples_per_s")
        numbers = ["loss not finite" if loss is None else f"loss {loss:.4f}"]
        if speed is not None:
            numbers.append(f"{speed:,.0f} samples/s")
            if self.ideal:
                numbers.append(f"efficiency {speed / self.ideal:.0%}")
        if self._row.get("staleness") is not None:
            numbers.append(f"staleness {self._row['staleness']:.1f}")
        return numbers

    def _update_shares(self) -> list[float]:
        """Return each worker's share of all updates."""
        total = max(1, sum(self._updates))
        return [updates / total for updates in self._updates]

    def _busy(self) -> list[float | None]:
        """Return the fraction of the last step that each worker computed; None where it was not timed."""
        times = self._row.get("times") or [None] * len(self._row.get("counts") or [])
        step_time = self._row.get("step_time") or max((t for t in times if t), default=0)
        return [t / step_time if t is not None and step_time else None for t in times]

    def _time_left(self) -> str:
        done = self._step - (self._first_step or 0)  # steps since the first row, which started the clock
        if not self.steps or done < 1:
            return ""
        seconds = (self._clock() - self._started) / done * max(0, self.steps - self._step)
        return f"{int(seconds // 60)}:{int(seconds % 60):02d} left"

    def _workers(self) -> Table:
        counts = self._row.get("counts") or []
        times = self._row.get("times") or [None] * len(counts)
        busy = self._busy()
        table = Table(box=None, padding=(0, 1), pad_edge=False, header_style="dim")
        for title in ("worker", "count", "busy", "", "time", *(["updates"] if self._updates else [])):
            table.add_column(title, justify="left" if title == "busy" else "right", no_wrap=True)
        lines = max(1, self.console.height - 7)
        shown = len(counts) if len(counts) <= lines else lines - 1
        for worker in range(shown):
            share = busy[worker]
            table.add_row(
                str(worker),
                str(counts[worker]),
                ProgressBar(total=1, completed=min(1, share or 0), width=36, complete_style=_style(share)),
                "–" if share is None else f"{share:.0%}",
                "untimed" if times[worker] is None else _duration(times[worker]),
                *([f"{self._update_shares()[worker]:.0%}"] if self._updates else []),
            )
        if shown < len(counts):
            rest = [share for share in busy[shown:] if share is not None]
            shares = f", busy {min(rest):.0%} to {max(rest):.0%}" if rest else ""
            hidden = f"{len(counts) - shown} more workers{shares}"
            table.add_row("…", str(sum(counts[shown:])), Text(hidden, style="dim"))
        return table

    def _stop(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None


def _duration(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def _style(share: float | None) -> str:
    return "green" if (share or 0) >= 0.8 else "yellow" if (share or 0) >= 0.5 else "red"


@contextmanager
def progress_bar(name: str, total: int, console: Console) -> Iterator[Callable[[int], None]]:
    """Show a progress bar (one line outside a terminal); yields the function that advances it by a number of items."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
        task = progress.add_task(name, total=total)
        yield lambda done: progress.advance(task, done)
