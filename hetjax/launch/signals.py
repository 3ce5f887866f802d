"""Signals as something to read beside pipes: a loop wakes up for them and handles them where it is."""

from __future__ import annotations

import signal
import socket
from typing import Any

PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Signals:
    """Collects SIGINT, SIGTERM and SIGHUP (unless ignored, as under nohup); SIGCHLD only wakes. For the main thread."""

    def __enter__(self) -> Signals:
        self._taken: list[signal.Signals] = []
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._old_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        wanted = [number for number in PASSED_ON if signal.getsignal(number) != signal.SIG_IGN]
        self._old: dict[int, Any] = {number: signal.signal(number, self._take) for number in wanted}
        self._old[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda number, frame: None)
        return self

    def __exit__(self, *_: object) -> None:
        for number, old in self._old.items():
            signal.signal(number, old)
        signal.set_wakeup_fd(self._old_fd)
        self._reader.close()
        self._writer.close()

    def _take(self, number: int, frame: object) -> None:
        self._taken.append(signal.Signals(number))

    def fileno(self) -> int:
        """Readable when a signal has come."""
        return self._reader.fileno()

    def taken(self) -> list[signal.Signals]:
        """The signals since the last call."""
        try:
            while self._reader.recv(4096):
                pass
        except BlockingIOError:
            pass
        taken, self._taken = self._taken, []
        return taken
