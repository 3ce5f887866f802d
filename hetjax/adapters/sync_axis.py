"""Collectives in the forward pass, which only the masked engine allows.

In `looped` the workers run different trip counts and in `chunked` different programs, so a collective inside would
deadlock. A layer asks for the axis while it is traced, on the host, and gets an error instead of a hang.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax


class SyncAxis:
    """The axis over which a traced program may sum, and whether a layer has used it.

    Args:
        name: name of the mesh axis; None while only shapes are computed.
    """

    def __init__(self, name: str | None):
        self.name = name
        self.used = False

    def sum(self, tree: Any) -> Any:
        """Sum over all workers."""
        self.used = True
        return tree if self.name is None else jax.lax.psum(tree, self.name)

    @contextmanager
    def allowed(self) -> Iterator[SyncAxis]:
        """Make this the current axis."""
        token = _CURRENT.set(self)
        try:
            yield self
        finally:
            _CURRENT.reset(token)

    @staticmethod
    def current() -> SyncAxis:
        """Return the current axis, or raise a ValueError where collectives are not allowed."""
        axis = _CURRENT.get()
        if axis is None:
            raise ValueError(
                "A layer needs exactly synchronized statistics of all workers, which puts a collective into the "
                "local phase. Only the masked engine can do that: use engine='masked' with controller 'equal' or "
                "'static', or let BatchNorm take its statistics over fixed groups (sync='groups')."
            )
        return axis


_CURRENT: ContextVar[SyncAxis | None] = ContextVar("hetjax_sync_axis", default=None)
