"""Counts the programs XLA compiles, so that "no recompile" is a measured fact, and sees what came from a cache."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import jax

_COMPILED = "/jax/core/compile/backend_compile_duration"
_CACHE_HIT = "/jax/compilation_cache/cache_hits"
_mine = threading.local()  # .expected: compiles of this thread are part of a warm-up; .hits: its hits in the cache
_count = 0
_listening = False
_lock = threading.Lock()


def _on_duration(event: str, duration_secs: float, **_: str | int) -> None:
    global _count
    if event == _COMPILED and not getattr(_mine, "expected", False):
        with _lock:
            _count += 1


def _on_event(event: str, **_: str | int) -> None:
    if event == _CACHE_HIT:
        _mine.hits = getattr(_mine, "hits", 0) + 1


def _listen() -> None:
    global _listening
    with _lock:
        if not _listening:
            jax.monitoring.register_event_duration_secs_listener(_on_duration)
            jax.monitoring.register_event_listener(_on_event)
            _listening = True


def compiles() -> int:
    """Programs compiled in this process since the first call; those inside `expected()` do not count."""
    _listen()
    return _count


def cache_hits() -> int:
    """Programs that this thread took from JAX's persistent compilation cache since the first call."""
    _listen()
    return getattr(_mine, "hits", 0)


@contextmanager
def expected() -> Iterator[None]:
    """Compiles of this thread inside the block are part of the warm-up: a ladder's rungs."""
    before = getattr(_mine, "expected", False)
    _mine.expected = True
    try:
        yield
    finally:
        _mine.expected = before
