"""Reduce host arrays over all processes: each owns a slice, adds it up in process order, and returns it to all.

Each process sends 2 (P - 1) / P times the arrays, as in the best all-reduce over P processes, and all receive the same
bits. Slices travel in pieces, so that one is added up while the next one arrives.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hetjax.processes import ProcessLink

# (index of the array, its parts in process order, messages in process order) -> the reduced part, in the same dtype
Combine = Callable[[int, list[np.ndarray], list[bytes]], np.ndarray]
Range = tuple[int, int, int]  # array, start, stop

_PIECE = 2**16  # elements: 20 ms in float32 over 100 Mbit/s


class SliceExchange:
    """Reduces over all processes, which have to open it and use it in the same order, from one thread at a time.

    Args:
        link: joins the processes.
    """

    def __init__(self, link: ProcessLink):
        self.index, self.count, self.others = link.index, link.count, link.others
        self.channel = link.channel()

    def __call__(
        self, arrays: Sequence[np.ndarray], combine: Combine, message: bytes = b"", limit: float | None = None
    ) -> tuple[list[np.ndarray], list[bytes]]:
        """Reduce arrays of the same shapes in all processes.

        Args:
            arrays: flat and contiguous; sent without a copy, so they must not change for as long as anyone reads them.
            combine: adds up one part of an array.
            message: a few bytes for all processes, which `combine` may use.
            limit: seconds for the whole exchange. Default: the carrier's limit for every message.

        Returns:
            The reduced arrays, identical in all processes, and the messages of all processes in order.

        Raises:
            PeerLost: if a process has ended.
            TimeoutError: if a process does not take part within the limit.
            ValueError: if its arrays have other sizes.
        """
        until = _Until(limit)
        pieces = _pieces([array.size for array in arrays], self.count)
        for peer in self.others:
            self.channel.send(peer, 0, [message])
        for k, (owner, ranges) in enumerate(pieces):
            if owner != self.index:
                self.channel.send(owner, 1 + 2 * k, [_bytes(arrays[i][start:stop]) for i, start, stop in ranges])
        messages = [message if peer == self.index else bytes(self._receive(peer, 0, until)[0]) for peer in self._all]
        reduced = [np.empty(array.size, array.dtype) for array in arrays]
        for k, (owner, ranges) in enumerate(pieces):
            if owner == self.index:
                self._add_up(1 + 2 * k, ranges, arrays, reduced, combine, messages, until)
        for k, (owner, ranges) in enumerate(pieces):
            if owner != self.index:
                for (i, start, stop), part in zip(
                    ranges, self._parts(owner, 2 + 2 * k, ranges, arrays, until), strict=True
                ):
                    reduced[i][start:stop] = part
        self.channel.round += 1
        return reduced, messages

    @property
    def _all(self) -> range:
        return range(self.count)

    def _add_up(
        self, piece: int, ranges: Sequence[Range], arrays: Sequence[np.ndarray], reduced: list[np.ndarray],
        combine: Combine, messages: list[bytes], until: _Until,
    ) -> None:  # fmt: skip
        """Receive a piece of the own slice from all, add it up, and send the result to all."""
        own = [arrays[i][start:stop] for i, start, stop in ranges]
        parts_P = [own if peer == self.index else self._parts(peer, piece, ranges, arrays, until)
                   for peer in self._all]  # fmt: skip
        for (i, start, stop), *parts in zip(ranges, *parts_P, strict=True):
            reduced[i][start:stop] = combine(i, parts, messages)
        for peer in self.others:
            self.channel.send(peer, piece + 1, [_bytes(reduced[i][start:stop]) for i, start, stop in ranges])

    def _parts(
        self, peer: int, piece: int, ranges: Sequence[Range], arrays: Sequence[np.ndarray], until: _Until
    ) -> list[np.ndarray]:
        frames = self._receive(peer, piece, until)
        if [len(frame) for frame in frames] != [(stop - start) * arrays[i].itemsize for i, start, stop in ranges]:
            raise ValueError(f"Process {peer} sent arrays of another size: start all processes with the same model.")
        return [np.frombuffer(frame, arrays[i].dtype) for frame, (i, _, _) in zip(frames, ranges, strict=True)]

    def _receive(self, peer: int, piece: int, until: _Until) -> list[Any]:
        try:
            return self.channel.receive(peer, piece, until.left())
        except TimeoutError as error:
            raise TimeoutError(until.message(peer) or str(error)) from None


class _Until:
    """The end of an exchange, if it has a limit of its own."""

    def __init__(self, limit: float | None):
        self.limit = limit
        self.deadline = None if limit is None else time.monotonic() + limit

    def left(self) -> float | None:
        return None if self.deadline is None else max(0.0, self.deadline - time.monotonic())

    def message(self, peer: int) -> str:
        if self.limit is None:
            return ""
        return (
            f"Process {peer} did not send its part of an exchange within {self.limit:g} s, although it answers: it may "
            "be very slow, or run another program. Check that process; restart from the last checkpoint, or raise "
            "wait_limit."
        )


def _pieces(sizes: Sequence[int], count: int) -> list[tuple[int, list[Range]]]:
    """The owner of every piece and its parts of the arrays, of which every process owns an equal share."""
    ends = np.cumsum(sizes, dtype=np.int64)
    total = int(ends[-1]) if len(sizes) else 0
    pieces = []
    for owner in range(count):
        first, last = total * owner // count, total * (owner + 1) // count
        for start in range(first, last, _PIECE):
            stop = min(start + _PIECE, last)
            between = range(int(np.searchsorted(ends, start, "right")), int(np.searchsorted(ends, stop)) + 1)
            offset = lambda i: int(ends[i]) - sizes[i]
            ranges = [(i, max(0, start - offset(i)), min(sizes[i], stop - offset(i))) for i in between if sizes[i]]
            pieces.append((owner, ranges))
    return pieces


def _bytes(array: np.ndarray) -> np.ndarray:
    """The same memory as bytes: types that NumPy lacks, such as bfloat16, have no buffer."""
    return array.view(np.uint8)
