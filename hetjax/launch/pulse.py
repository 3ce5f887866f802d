"""When a process counts as hung: no sign of life for a while, or signs of life but no step for a long while."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from hetjax.launch.heartbeat import Beat


@dataclass
class Pulse:
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
