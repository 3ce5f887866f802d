"""Whether a layer may talk across workers inside the forward pass: only in the masked engine.

In `looped` the workers run different numbers of trips and in `chunked` different programs; a collective inside would
wait for ever. So a layer asks here while it is traced, on the host, and gets an error instead of a hang.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax


class SyncAxis:
    """The axis over which the traced program may sum; remembers whether a layer asked for it."""

    def __init__(self, name: str | None):
        self.name = name  # None while only shapes are wanted
        self.used = False

    def sum(self, tree: Any) -> Any:
        self.used = True
        return tree if self.name is None else jax.lax.psum(tree, self.name)

    @contextmanager
    def allowed(self) -> Iterator[SyncAxis]:
        token = _CURRENT.set(self)
        try:
            yield self
        finally:
            _CURRENT.reset(token)

    @staticmethod
    def current() -> SyncAxis:
        axis = _CURRENT.get()
        if axis is None:
            raise ValueError(
                "A layer asked for exactly synchronized statistics over all workers, which puts a collective into the "
                "local phase. Only the masked engine can do that: use engine='masked' with controller 'equal' or "
                "'static', or let BatchNorm take its statistics over fixed groups (sync='groups')."
            )
        return axis


_CURRENT: ContextVar[SyncAxis | None] = ContextVar("hetjax_sync_axis", default=None)
