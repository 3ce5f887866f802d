"""Graceful stop on Ctrl-C, SIGTERM and SIGHUP: the running step is finished, and a checkpoint can be saved."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class Interrupt:
    """Remembers whether a stop was requested. As a hook of `fit` it repeats a request made before the first step.

    Args:
        stop: requests the stop of a trainer.
    """

    def __init__(self, stop: Callable[[], None]):
        self.requested = False
        self._stop = stop

    def request(self) -> None:
        """Request the stop."""
        self.requested = True
        self._stop()

    def request_by(self, stop: Callable[[], None]) -> None:
        """Request it in another way."""
        self._stop = stop
        self.request()

    def __call__(self, record: Any, state: Any) -> None:
        if self.requested:
            self._stop()


@contextmanager
def stop_on_signals(stop: Callable[[], None], leave: Callable[[], None] | None = None) -> Iterator[Interrupt]:
    """Call `stop`, such as `Trainer.stop`, at the first SIGINT, SIGTERM or SIGHUP; a second one ends the program.

    A SIGHUP that is ignored, as under nohup, stays ignored. In an elastic fleet these signals make one process leave,
    by `leave`; the launcher sends SIGUSR1 to stop the whole run.
    """
    interrupt = Interrupt(leave or stop)

    def handler(number: int, frame: Any) -> None:
        if interrupt.requested:
            raise KeyboardInterrupt
        interrupt.request()

    if threading.current_thread() is not threading.main_thread():  # only the main thread may handle signals
        yield interrupt
        return

    def stop_all(number: int, frame: Any) -> None:
        interrupt.request_by(stop)

    hangup = [] if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else [signal.SIGHUP]
    previous = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM, *hangup)}
    if leave is not None:
        previous[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, stop_all)
    try:
        yield interrupt
    finally:
        for number, old_handler in previous.items():
            signal.signal(number, old_handler)
