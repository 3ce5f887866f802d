"""The output of several processes as one: whole lines only, each with the number of its process in front."""

from __future__ import annotations

import os
from typing import IO

_COLOURS = (36, 33, 35, 32, 34, 31)  # cyan, yellow, magenta, green, blue, red


class PrefixedOutput:
    """Collects the bytes of one process's stream and passes whole lines on."""

    def __init__(self, process: int, to: IO[bytes], colored: bool):
        mark = f"[{process}]"
        self._mark = (f"\x1b[{_COLOURS[process % len(_COLOURS)]}m{mark}\x1b[0m " if colored else f"{mark} ").encode()
        self._to = to
        self._rest = b""

    def feed(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        if lines:
            self._to.write(b"".join(self._mark + line + b"\n" for line in lines))
            self._to.flush()

    def close(self) -> None:
        """What was left without an end of line gets one."""
        if self._rest:
            self.feed(b"\n")


def wants_color(stream: IO[bytes]) -> bool:
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
