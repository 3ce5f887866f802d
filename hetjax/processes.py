"""Which process of a run this is, and how all of them exchange small values; nothing else in the package asks JAX.

Every process may keep its own JAX backend, in which `jax.process_count()` is 1 and `jax.process_index()` 0. So who is
who is known by the link that joined the processes (`hetjax.fleet.carrier`), which `hetjax.fleet.initialize` sets here.
All functions that exchange something are collective: all processes call them in the same order.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np


class ProcessLink(Protocol):
    """What joins the processes of a run."""

    index: int
    count: int
    others: list[int]  # the other processes
    transport: str  # how sums travel: 'mesh' or 'host'
    elastic: int  # expected number of processes, where members may come and go; otherwise 0

    @property
    def first(self) -> bool:
        """Whether this process prints and writes files."""
        ...

    def channel(self) -> Any:
        """A new channel for messages between two processes; all processes open theirs in the same order."""
        ...

    def gather(self, content: bytes) -> list[bytes]:
        """The content of every process, in process order."""
        ...

    def collect(self, content: bytes) -> list[bytes] | None:
        """The content of every process, in process 0; None in the others."""
        ...

    def broadcast(self, content: bytes | None) -> bytes:
        """The content of process 0."""
        ...

    def close(self, together: bool) -> None:
        """End the link."""
        ...


_link: ProcessLink | None = None


def join(link: ProcessLink | None) -> None:
    """Set the link of this process; None: it is alone."""
    global _link
    _link = link


def link() -> ProcessLink | None:
    """The link to the other processes; None in a single process."""
    return _link


def index() -> int:
    """Index of this process, from 0."""
    return 0 if _link is None else _link.index


def count() -> int:
    """Number of processes."""
    return 1 if _link is None else _link.count


def first() -> bool:
    """Whether this is process 0, which prints and writes files."""
    return _link is None or _link.first


def by_host() -> bool:
    """Whether there are several processes, each with a JAX backend of its own, joined by way of their hosts."""
    return _link is not None and _link.transport == "host"


def elastic() -> int:
    """Expected number of processes of a fleet whose members may come and go; 0: they are fixed."""
    return 0 if _link is None else _link.elastic


def usable_cores() -> int:
    """CPU cores that this process may use: a launcher or a container may have given it fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def gather(value: Any) -> list[Any]:
    """Gather a JSON value from every process, in process order."""
    if _link is None:
        return [value]
    return [json.loads(content) for content in _link.gather(json.dumps(value).encode())]


def gather_rows(own: np.ndarray, rows_P: Sequence[int]) -> list[np.ndarray]:
    """Gather arrays that differ in their number of rows, `rows_P[p]` of process p."""
    if _link is None:
        return [own]
    contents = _link.gather(np.ascontiguousarray(own).tobytes())
    shaped = lambda content, rows: np.frombuffer(content, own.dtype).reshape(rows, *own.shape[1:])
    return [shaped(content, rows) for content, rows in zip(contents, rows_P, strict=True)]


def collect_rows(own: np.ndarray) -> np.ndarray | None:
    """The rows [n, ...] of all processes, in process order, in process 0; None in the others."""
    if _link is None:
        return own
    contents = _link.collect(np.ascontiguousarray(own).tobytes())
    if contents is None:
        return None
    return np.concatenate([np.frombuffer(content, own.dtype).reshape(-1, *own.shape[1:]) for content in contents])


def broadcast_bytes(content: bytes | None) -> bytes:
    """The bytes of process 0 in all processes; the others pass None."""
    if _link is None:
        assert content is not None
        return content
    return _link.broadcast(content)
