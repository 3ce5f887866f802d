"""Heartbeats: numbers that a process shares with its launcher, and the detection of hung processes from them.

The numbers are in a file that both have mapped. A thread of the process increments one twice a second, so that a long
compile is not taken for a hang; a hook of `fit` writes the step. SIGSTOP stops both. A write is a store to memory: no
system call, no full disk. Every number is 8 bytes, aligned, with a single writer, so reads are never torn.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hetjax.environment import HEARTBEAT, PROCESS

_ALIVE, _BEGUN, _ENDED, _STEP, _FIRST, _READING, _SEEN = range(7)
_BYTES = 7 * 8
_INTERVAL = 0.5  # seconds
_ACKNOWLEDGE_LIMIT = 2.0  # seconds


@dataclass(frozen=True)
class Beat:
    """The last numbers written by a process."""

    alive: int = 0  # incremented by its thread; 0: no heartbeat yet
    begun: int = 0  # number of `fit`s begun, and ended
    ended: int = 0
    step: int = 0
    first: int = 0  # the first step that it finished
    reading_us: int = 0  # microseconds in which it read checkpoints

    @property
    def stepping(self) -> bool:
        """Whether the process is inside the step loop of `fit`: compiled, warmed up, not yet evaluating."""
        return self.begun > self.ended


class Heartbeat:
    """The process's side: a thread that signals life, and a hook for `trainer.fit`."""

    def __init__(self, folder: str | Path, process: int):
        self._map, self._numbers = _mapped(_path(folder, process))
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="hetjax-heartbeat", daemon=True)
        self._thread.start()

    def _beat(self) -> None:
        while True:
            self._numbers[_ALIVE] += 1
            if self._closed.wait(_INTERVAL):
                return

    @contextmanager
    def reading(self) -> Iterator[None]:
        """A context around the reading of a checkpoint, for the launcher's account of a restart."""
        began = time.monotonic()
        try:
            yield
        finally:
            self._numbers[_READING] += round(1e6 * (time.monotonic() - began))

    def begin(self, history: Any) -> None:
        """Compilation is over and steps follow: gives the launcher time to set CPU quotas."""
        self._numbers[_BEGUN] += 1
        deadline = time.monotonic() + _ACKNOWLEDGE_LIMIT
        while self._numbers[_SEEN] < self._numbers[_BEGUN] and time.monotonic() < deadline:
            time.sleep(0.005)

    def __call__(self, record: Any, state: Any) -> None:
        self._numbers[_STEP] = record.step
        self._numbers[_FIRST] = self._numbers[_FIRST] or record.step

    def end(self, history: Any) -> None:
        """The last step of a `fit` is done."""
        self._numbers[_ENDED] = self._numbers[_BEGUN]

    def close(self) -> None:
        """Stop the thread and unmap the file."""
        self._closed.set()
        self._thread.join()
        self._numbers.release()
        self._map.close()


def from_environment(environment: Mapping[str, str] = os.environ) -> Heartbeat | None:
    """The heartbeat that the launcher expects of this process; None if it was not started by the launcher."""
    folder = environment.get(HEARTBEAT)
    return None if folder is None else Heartbeat(folder, int(environment[PROCESS]))


class Listener:
    """The launcher's side of one process's heartbeat; creates the file."""

    def __init__(self, folder: str | Path, process: int):
        path = _path(folder, process)
        path.write_bytes(bytes(_BYTES))
        self._map, self._numbers = _mapped(path)

    def read(self) -> Beat:
        """The process's latest numbers."""
        return Beat(*self._numbers[:_SEEN])

    def acknowledge(self, beat: Beat) -> None:
        """Let the process continue, which waits in `Heartbeat.begin`."""
        self._numbers[_SEEN] = beat.begun

    def reset(self) -> None:
        """Forget the process: another one takes its place."""
        for place in range(_BYTES // 8):
            self._numbers[place] = 0

    def close(self) -> None:
        """Unmap the file."""
        self._numbers.release()
        self._map.close()


@dataclass
class HangDetector:
    """Decides from one process's beats whether it hangs; times are seconds of the launcher's clock.

    A process hangs if it gives no sign of life for `silent_limit`, or completes no step within `step_limit` while it
    is stepping. Without any heartbeat so far the limits do not apply, as the program may not have one; but a process
    that the kernel reports as stopped counts as silent from the first such report.
    """

    silent_limit: float
    step_limit: float
    beat: Beat = field(default_factory=Beat)
    _alive_at: float | None = None
    _stepped_at: float | None = None
    _stopped_at: float | None = None

    @property
    def stopped(self) -> bool:
        """Whether the process was stopped at the last update."""
        return self._stopped_at is not None

    def update(self, beat: Beat, now: float, stopped: bool = False) -> None:
        """Take in the latest beat, and whether the kernel reports the process as stopped."""
        if beat.alive != self.beat.alive:
            self._alive_at = now
        if beat.stepping and (beat.step, beat.begun) != (self.beat.step, self.beat.begun):
            self._stepped_at = now
        self._stopped_at = (self._stopped_at if self._stopped_at is not None else now) if stopped else None
        self.beat = beat

    @property
    def seen_at(self) -> float | None:
        """When it gave the last sign of life; None if it never did."""
        return max((at for at in (self._alive_at, self._stepped_at) if at is not None), default=None)

    def hang(self, now: float) -> str | None:
        """Why the process counts as hung, in words that follow its name; None if it does not."""
        since = [at for at in (self._alive_at, self._stopped_at) if at is not None]
        if since and now - min(since) > self.silent_limit:
            what = "has been stopped (SIGSTOP or a debugger)" if self.stopped else "gave no sign of life"
            return f"{what} for {now - min(since):.0f} s"
        if self.beat.stepping and self._stepped_at is not None and now - self._stepped_at > self.step_limit:
            return f"finished no step for {now - self._stepped_at:.0f} s; its last one was step {self.beat.step}"
        return None


def is_stopped(pid: int) -> bool:
    """Whether the process is stopped, by a signal or a debugger; always False without /proc."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] in ("T", "t")


def _path(folder: str | Path, process: int) -> Path:
    return Path(folder) / f"process-{process}"


def _mapped(path: Path) -> tuple[mmap.mmap, memoryview]:
    with open(path, "r+b") as file:
        mapped = mmap.mmap(file.fileno(), _BYTES)
    return mapped, memoryview(mapped).cast("q")
