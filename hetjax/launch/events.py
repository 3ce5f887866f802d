"""What the supervisor's event loop reads: the output of processes, passed on as whole prefixed lines, and signals."""

from __future__ import annotations

import os
import signal
import socket
from typing import IO, Any

PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_COLORS = (36, 33, 35, 32, 34, 31)  # cyan, yellow, magenta, green, blue, red


class PrefixedOutput:
    """Buffers one process's output stream and writes whole lines, each prefixed with the process number."""

    def __init__(self, process: int, to: IO[bytes], colored: bool):
        prefix = f"[{process}]"
        color = _COLORS[process % len(_COLORS)]
        self._prefix = (f"\x1b[{color}m{prefix}\x1b[0m " if colored else f"{prefix} ").encode()
        self._to = to
        self._partial = b""

    def feed(self, data: bytes) -> None:
        """Write the lines that `data` completes."""
        *lines, self._partial = (self._partial + data).split(b"\n")
        if lines:
            self._to.write(b"".join(self._prefix + line + b"\n" for line in lines))
            self._to.flush()

    def close(self) -> None:
        """Write an unfinished last line, with a newline."""
        if self._partial:
            self.feed(b"\n")


def wants_color(stream: IO[bytes]) -> bool:
    """Whether a stream is a terminal that shows colors."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


class Signals:
    """Makes signals readable by `select`; for the main thread.

    Collects SIGINT, SIGTERM and SIGHUP, except those ignored (as under nohup). SIGCHLD only wakes the loop up.
    """

    def __enter__(self) -> Signals:
        self._received: list[signal.Signals] = []
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._old_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        collected = [number for number in PASSED_ON if signal.getsignal(number) != signal.SIG_IGN]
        self._old: dict[int, Any] = {number: signal.signal(number, self._receive) for number in collected}
        self._old[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda number, frame: None)
        return self

    def __exit__(self, *_: object) -> None:
        for number, old in self._old.items():
            signal.signal(number, old)
        signal.set_wakeup_fd(self._old_fd)
        self._reader.close()
        self._writer.close()

    def _receive(self, number: int, frame: object) -> None:
        self._received.append(signal.Signals(number))

    def fileno(self) -> int:
        """Readable when a signal has arrived."""
        return self._reader.fileno()

    def take(self) -> list[signal.Signals]:
        """The signals since the last call."""
        try:
            while self._reader.recv(4096):
                pass
        except BlockingIOError:
            pass
        received, self._received = self._received, []
        return received
