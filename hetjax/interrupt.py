"""Ctrl-C, SIGTERM and SIGHUP as a wish to end: the step in flight is finished, and what was learned can be saved."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class Interrupt:
    """Whether somebody asked for the end. As a hook of `fit` it passes a wish on that came before the first step."""

    def __init__(self, stop: Callable[[], None]):
        self.asked = False
        self._stop = stop

    def ask(self) -> None:
        self.asked = True
        self._stop()

    def __call__(self, record: Any, state: Any) -> None:
        if self.asked:
            self._stop()


@contextmanager
def stop_on_signals(stop: Callable[[], None]) -> Iterator[Interrupt]:
    """The first Ctrl-C, SIGTERM or SIGHUP (unless ignored, as under nohup) calls `stop` (a trainer's); a second one
    ends the program at once."""
    interrupt = Interrupt(stop)

    def handler(number: int, frame: Any) -> None:
        if interrupt.asked:
            raise KeyboardInterrupt
        interrupt.ask()

    if threading.current_thread() is not threading.main_thread():  # only the main thread may handle signals
        yield interrupt
        return
    hangs_up = [] if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else [signal.SIGHUP]
    before = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM, *hangs_up)}
    try:
        yield interrupt
    finally:
        for number, old in before.items():
            signal.signal(number, old)
