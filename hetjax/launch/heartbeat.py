"""Heartbeats: numbers that a process shares with its launcher, and when it counts as hung.

Signs of life that a process gives its launcher: a few numbers in a file that both have mapped.

A thread counts up twice a second, so that a long compile is not taken for a hang; a hook of `fit` writes the step. A
stopped process (SIGSTOP) stops both. Writing is a store into memory: it costs no system call and no disk can be full.
Every number is 8 bytes, aligned, and has one writer, so a reader never sees half of one.

When a process counts as hung: no sign of life for a while, or signs of life but no step for a long while.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hetjax.environment import HEARTBEAT, PROCESS

_ALIVE, _BEGUN, _ENDED, _STEP, _STEP_NS, _SEEN = range(6)
_BYTES = 6 * 8
_EVERY = 0.5
_ANSWER_LIMIT = 2.0


@dataclass(frozen=True)
class Beat:
    """What a process has said last."""

    alive: int = 0  # counted up by its thread; 0: never a sign
    begun: int = 0  # how often it began to take steps, and how often it ended
    ended: int = 0
    step: int = 0
    step_ns: int = 0  # the machine's monotonic clock at that step

    @property
    def stepping(self) -> bool:
        """Whether it is between the first and the last step of a `fit`: compiled, warmed up, not yet evaluating."""
        return self.begun > self.ended


class Heartbeat:
    """The process's side: alive from now on, and a hook for `trainer.fit`."""

    def __init__(self, folder: str | Path, process: int):
        with open(path_of(folder, process), "r+b") as file:
            self._map = mmap.mmap(file.fileno(), _BYTES)
        self._numbers = memoryview(self._map).cast("q")
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._live, name="hetjax-heartbeat", daemon=True)
        self._thread.start()

    def _live(self) -> None:
        while True:
            self._numbers[_ALIVE] += 1
            if self._done.wait(_EVERY):
                return

    def begin(self, history: Any) -> None:
        """Everything is compiled, steps follow; waits a moment for the launcher, which may now set a CPU quota."""
        self._numbers[_BEGUN] += 1
        deadline = time.monotonic() + _ANSWER_LIMIT
        while self._numbers[_SEEN] < self._numbers[_BEGUN] and time.monotonic() < deadline:
            time.sleep(0.005)

    def __call__(self, record: Any, state: Any) -> None:
        self._numbers[_STEP_NS] = time.monotonic_ns()
        self._numbers[_STEP] = record.step

    def end(self, history: Any) -> None:
        self._numbers[_ENDED] = self._numbers[_BEGUN]

    def close(self) -> None:
        self._done.set()
        self._thread.join()
        self._numbers.release()
        self._map.close()


def from_environment(environment: Mapping[str, str] = os.environ) -> Heartbeat | None:
    """The heartbeat that the launcher waits for; None for a process that was started otherwise."""
    folder = environment.get(HEARTBEAT)
    return None if folder is None else Heartbeat(folder, int(environment[PROCESS]))


def path_of(folder: str | Path, process: int) -> Path:
    return Path(folder) / f"process-{process}"


class Listener:
    """The launcher's side of one process's heartbeat; makes the file."""

    def __init__(self, folder: str | Path, process: int):
        path = path_of(folder, process)
        path.write_bytes(bytes(_BYTES))
        with open(path, "r+b") as file:
            self._map = mmap.mmap(file.fileno(), _BYTES)
        self._numbers = memoryview(self._map).cast("q")

    def read(self) -> Beat:
        return Beat(*self._numbers[:_SEEN])

    def answer(self, beat: Beat) -> None:
        """Tell the process that its beginning was seen."""
        self._numbers[_SEEN] = beat.begun

    def close(self) -> None:
        self._numbers.release()
        self._map.close()


@dataclass
class HangDetector:
    """What was heard of one process, and when; times are the launcher's own clock, in seconds.

    A process that never gave a sign is not held to the limits: its program may not have a heartbeat. But one that
    the kernel says is stopped counts as silent from when that was first seen.
    """

    silent_limit: float
    step_limit: float
    beat: Beat = field(default_factory=Beat)
    _heard: float | None = None
    _moved: float | None = None
    _stopped: float | None = None

    @property
    def stopped(self) -> bool:
        return self._stopped is not None

    def hear(self, beat: Beat, now: float, stopped: bool = False) -> None:
        if beat.alive != self.beat.alive:
            self._heard = now
        if beat.stepping and (beat.step, beat.begun) != (self.beat.step, self.beat.begun):
            self._moved = now
        self._stopped = (self._stopped if self._stopped is not None else now) if stopped else None
        self.beat = beat

    def complaint(self, now: float) -> str | None:
        """Why this process counts as hung, in words that follow its name; None if it does not."""
        since = [last for last in (self._heard, self._stopped) if last is not None]
        if since and now - min(since) > self.silent_limit:
            how = "has been stopped (SIGSTOP or a debugger)" if self._stopped is not None else "gave no sign of life"
            return f"{how} for {now - min(since):.0f} s"
        if self.beat.stepping and self._moved is not None and now - self._moved > self.step_limit:
            return f"finished no step for {now - self._moved:.0f} s; its last one was step {self.beat.step}"
        return None


def is_stopped(pid: int) -> bool:
    """Whether the kernel holds this process; always False where there is no /proc."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] in ("T", "t")
