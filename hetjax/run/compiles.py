"""Counts the programs XLA compiles, so that "no recompile" is a measured fact."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import jax

_EVENT = "/jax/core/compile/backend_compile_duration"
_expected = threading.local()
_count = 0
_listening = False
_lock = threading.Lock()


def _listen(event: str, duration: float, **_: object) -> None:
    global _count
    if event == _EVENT and not getattr(_expected, "now", False):
        with _lock:
            _count += 1


def compiles() -> int:
    """Programs compiled in this process so far, since the first call; those inside `expected()` do not count."""
    global _listening
    with _lock:
        if not _listening:
            jax.monitoring.register_event_duration_secs_listener(_listen)
            _listening = True
    return _count


@contextmanager
def expected() -> Iterator[None]:
    """Compiles of this thread inside the block are part of the warm-up: a ladder's rungs."""
    before = getattr(_expected, "now", False)
    _expected.now = True
    try:
        yield
    finally:
        _expected.now = before
