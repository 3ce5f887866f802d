"""Where the seconds of a restart go: from the last sign of life of a lost process to the first new step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hetjax.launch.heartbeat import Beat


@dataclass
class RestartCosts:
    """Follows the heartbeats of a restarted run; times are seconds of the launcher's clock.

    Args:
        number: number of the restart, from 1.
        seen_at: last sign of life of the process that was lost.
        noticed_at: when its loss was noticed.
        started_at: when all others had ended, so that the run was started again.
        step: the newest finished step before the loss.
    """

    number: int
    seen_at: float
    noticed_at: float
    started_at: float
    step: int
    _alive_at: float | None = field(default=None, init=False)
    _begun_at: float | None = field(default=None, init=False)
    _told: bool = field(default=False, init=False)

    def update(self, beats: Sequence[Beat], now: float) -> str | None:
        """Take in the latest beats; returns a sentence, once, when all processes have made a new step."""
        if self._alive_at is None and all(beat.alive for beat in beats):
            self._alive_at = now
        if self._begun_at is None and all(beat.begun for beat in beats):
            self._begun_at = now
        if self._told or self._alive_at is None or self._begun_at is None:
            return None
        if not all(beat.first and beat.step > self.step for beat in beats):
            return None
        self._told = True
        reading = max(beat.reading_us for beat in beats) / 1e6
        again = max(0, self.step + 1 - min(beat.first for beat in beats))
        parts = [
            (self.noticed_at - self.seen_at, "until the loss was noticed"),
            (self.started_at - self.noticed_at, "until the others had ended"),
            (self._alive_at - self.started_at, "to start the processes"),
            (reading, "to read the checkpoint"),
            (max(0.0, self._begun_at - self._alive_at - reading), "to set up and compile"),
            (now - self._begun_at, f"for {again} steps done again and a new one"),
        ]
        listed = ", ".join(f"{seconds:.1f} s {what}" for seconds, what in parts)
        return f"restart {self.number} took {now - self.seen_at:.1f} s: {listed}"
