"""One step's exchange of sums between processes by way of their hosts.

    everyone                sends its tail (loss, metrics, slots) to all, and the pieces of its sums to their owners
    the owner of a piece    adds what came in process order, and sends the result to all

What the result is (the total, or new parameters) is up to the caller. Pieces are sent without waiting, and an owner
adds what comes before the last tail, so copies, the network and adding overlap. All processes add the same numbers in
the same order, so they get the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from hetjax import profiling
from hetjax.reduce.finite import LARGE, NONFINITE
from hetjax.reduce.same_host import SameHost

Runs = list[np.ndarray]
Run = tuple[int, int, int]  # (part, start, stop)
Frames = Sequence[Any]
Read = Callable[[Frames, int], Runs]
Missing = list[tuple[int, int]]  # messages (sender, number) that have not arrived

FRAME = 2**22  # elements, or bytes, of one frame of a long message
_TAIL = 0  # number of the message with the tail; pieces follow


@dataclass
class _Sum:
    """The sums of a piece so far."""

    added: int = 0  # processes
    held: Runs | None = None  # the first summand: added to the second one without a copy

    def add(self, came: Runs, sums: Runs, keep: bool) -> None:
        """Add the next summand; `keep`: its memory stays as it is in this round."""
        with np.errstate(invalid="ignore", over="ignore"):  # looked for later
            for run, (first, other) in zip(sums, zip(self.held or sums, came, strict=True), strict=True):
                if self.added:
                    np.add(first, other, out=run)
                elif not keep:
                    run[:] = other
        self.held = came if keep and not self.added else None
        self.added += 1


class SumExchange:
    """Exchanges the pieces of a vector; used by one thread, once per step, in all processes.

    Args:
        channel: a `hetjax.fleet.carrier.Channel` of its own.
        process: index of this process.
        runs: where each piece lies in the parts of the vector.
        dtype: dtype of the vector.
    """

    def __init__(self, channel: Any, process: int, runs: Sequence[Sequence[Run]], dtype: Any):
        self.channel, self.process = channel, process
        self.runs, self.dtype = runs, np.dtype(dtype)
        self.owners = [process] * len(runs)  # of each piece
        self.seconds: dict[int, int] = {}  # of pieces with a second holder, which adds the same sums
        self.same_host: SameHost | None = None
        self.cut: frozenset[int] = frozenset()  # pieces whose sums travel in another form than they have
        self._sent: dict[int, list[Any]] = {}  # trackers of results, whose buffers are used again
        self._totals: dict[int, Runs] = {}
        self._begun: dict[int, _Sum] = {}  # own pieces of this round

    def share_memory(self) -> None:
        """Let processes of one host exchange pieces in shared memory; all processes call this."""
        sizes = [sum(stop - start for _, start, stop in piece) for piece in self.runs]
        self.same_host = SameHost(sizes, self.dtype, turns=2 if self.seconds else 1)

    def follow(self, process: int, channel: Any) -> None:
        """Go on as this process of another membership, over a new channel."""
        self.process, self.channel, self.same_host = process, channel, None
        self._sent.clear()  # to members that are gone
        self._begun.clear()

    @property
    def _near(self) -> Container[int]:
        """Processes that read what this one writes into shared memory."""
        return () if self.same_host is None else self.same_host.readers

    @property
    def own(self) -> list[int]:
        """The pieces whose sums this process adds."""
        return [k for k in range(len(self.owners)) if self.process in self.holders(k)]

    def holders(self, k: int) -> list[int]:
        """The processes that add the sums of a piece; the first is the owner, whose result counts."""
        return [self.owners[k], *([self.seconds[k]] if k in self.seconds else [])]

    def runs_of(self, parts: Sequence[np.ndarray], k: int) -> Runs:
        """The runs of a piece in the parts of a vector."""
        return [parts[part][start:stop] for part, start, stop in self.runs[k]]

    def send(
        self, parts: Sequence[np.ndarray] | None, tail: np.ndarray, listeners: Sequence[int],
        frames_of: Callable[[int], Frames] | None = None,
    ) -> None:  # fmt: skip
        """Start a round: send the tail to all listeners, and the pieces of the sums to their owners.

        Args:
            parts: the sums of this process, which must not change before the next round; None: it has none.
            tail: its tail.
            listeners: other processes that receive the tail.
            frames_of: makes the frames of a piece, if it is in `self.cut`. Default: its runs in the parts.
        """
        with profiling.phase("send"):
            if self.same_host is not None:
                self.same_host.begin()
            for peer in listeners:
                self.channel.send(peer, _TAIL, [tail])
        for k in range(len(self.owners) if parts is not None else 0):
            holders = [holder for holder in self.holders(k) if holder != self.process]
            if not holders:
                continue
            assert parts is not None
            frames = self.runs_of(parts, k) if frames_of is None else frames_of(k)
            with profiling.phase("send"):
                near = [holder for holder in holders if holder in self._near and k not in self.cut]
                if near:
                    assert self.same_host is not None
                    np.concatenate(frames, out=self.same_host.sums(k))
                for holder in holders:
                    self.channel.send(holder, 1 + k, [] if holder in near else frames)

    def tail(
        self, own: np.ndarray | None, senders: Sequence[int], meanwhile: Callable[[], Missing] | None = None
    ) -> np.ndarray:
        """The sum of all tails, in process order.

        Args:
            own: the tail of this process; None: it sends none.
            senders: processes with tails.
            meanwhile: adds what has arrived of the pieces, and returns the messages that come next (`add_arrived`).
        """
        total: np.ndarray | None = None
        for sender in senders:
            one = own if sender == self.process else self._tail_of(sender, meanwhile)
            assert one is not None
            total = one.copy() if total is None else total + one
        assert total is not None
        return total

    def _tail_of(self, sender: int, meanwhile: Callable[[], Missing] | None) -> np.ndarray:
        tail = sender, _TAIL
        while True:
            missing = [] if meanwhile is None else meanwhile()
            with profiling.phase("meet"):
                if not missing or self.channel.first_arrived([tail, *missing]) == tail:
                    return self._read(self.channel.receive(*tail)[0])

    def total(
        self, k: int, parts: Sequence[np.ndarray] | None, senders: Sequence[int], read: Read | None = None,
        own: Callable[[], Runs] | None = None,
    ) -> Runs:  # fmt: skip
        """The sums of an own piece over these processes, in process order.

        Args:
            k: number of the piece.
            parts: the sums of this process, if it is among the senders.
            senders: processes with sums.
            read: (frames, sender) -> runs, for a piece that travels cut; its memory may be used again.
            own: makes the runs of this process. Default: those in the parts.
        """
        self.add_arrived(k, parts, senders, read, own, wait=True)
        held = self._begun.pop(k).held
        return held if held is not None else self._totals[k]

    def add_arrived(
        self, k: int, parts: Sequence[np.ndarray] | None, senders: Sequence[int], read: Read | None = None,
        own: Callable[[], Runs] | None = None, wait: bool = False,
    ) -> Missing:  # fmt: skip
        """Add to the sums of an own piece as far as they have arrived, in process order; see `total`.

        Returns:
            The message that comes next; none: nothing is waited for.
        """
        sums = self._totals.setdefault(k, [np.empty(stop - start, self.dtype) for _, start, stop in self.runs[k]])
        if k not in self._begun:
            if not wait and not all(tracker.done for tracker in self._sent.get(k, [])):
                return []  # the memory is still being sent
            with profiling.phase("receive"):
                for tracker in self._sent.pop(k, []):
                    tracker.wait(self.channel.carrier.wait_limit)
            self._begun[k] = _Sum()
        begun = self._begun[k]
        for sender in senders[begun.added :]:
            if sender == self.process:
                came = self.runs_of(parts or [], k) if own is None else own()
            else:
                with profiling.phase("receive"):
                    receive = self.channel.receive if wait else self.channel.take
                    frames = receive(sender, 1 + k)
                if frames is None:
                    return [(sender, 1 + k)]
                came = self._runs_of(k, frames, sender, "sums") if read is None else read(frames, sender)
            with profiling.phase("add"):
                begun.add(came, sums, keep=sender == self.process or read is None)
        return []

    def drop(self, k: int, senders: Sequence[int]) -> None:
        """Take the rest of an own piece, whose sums are not needed."""
        begun = self._begun.pop(k, _Sum())
        for sender in senders[begun.added :]:
            if sender != self.process:
                self.channel.receive(sender, 1 + k)

    def publish(
        self, k: int, header: np.ndarray, runs: Sequence[np.ndarray], to: Sequence[int], like_sums: bool = True
    ) -> None:
        """Send the result of an own piece; its buffers must not change before the next but one round.

        Args:
            k: number of the piece.
            header: a few values.
            runs: the result.
            to: processes that receive it.
            like_sums: whether the result has the runs of the piece. Otherwise it is any frames.
        """
        number = 1 + len(self.owners) + k
        with profiling.phase("return"):
            near = [peer for peer in to if like_sums and peer in self._near]
            if near:
                assert self.same_host is not None
                np.concatenate(runs, out=self.same_host.result(k))
            for peer in near:
                self.channel.send(peer, number, [header])
            far = [peer for peer in to if peer not in near and peer != self.process]
            self._sent[k] = [self.channel.send(peer, number, [header, *runs]) for peer in far]

    def result(self, k: int, like_sums: bool = True) -> tuple[np.ndarray, Sequence[Any]]:
        """The header and the runs of another process's result, or its frames; they are valid in this round only."""
        with profiling.phase("gather"):
            header, *frames = self.channel.receive(self.owners[k], 1 + len(self.owners) + k)
        runs = self._runs_of(k, frames, self.owners[k], "result") if like_sums else frames
        return np.frombuffer(header, np.float64), runs

    def _runs_of(self, k: int, frames: Sequence[Any], peer: int, what: Literal["sums", "result"]) -> Runs:
        """The runs of a piece that came in frames, or without any by shared memory."""
        if frames:
            return [self._read(frame) for frame in frames]
        assert self.same_host is not None
        memory = self.same_host
        place = memory.sums(k, peer) if what == "sums" else memory.result(k, peer)
        return np.split(place, np.cumsum([stop - start for _, start, stop in self.runs[k]])[:-1])

    def vector_sum(self, own: np.ndarray, members: Sequence[int], second: bool = False) -> np.ndarray:
        """The sum of a short float64 vector over these processes, in process order; all of them call this.

        Args:
            own: the vector of this process.
            members: the processes.
            second: whether it is another one than the first of the round.
        """
        number = (4 if second else 1) + 2 * len(self.owners)
        for peer in members:
            if peer != self.process:
                self.channel.send(peer, number, [own])
        total = np.zeros_like(own)
        for peer in members:
            total += own if peer == self.process else np.frombuffer(self.channel.receive(peer, number)[0])
        return total

    def send_arrays(self, peers: Sequence[int], *frames: np.ndarray) -> None:
        """Send arrays to these processes, which wait for them in this round."""
        for peer in peers:
            self.channel.send(peer, 3 + 2 * len(self.owners), list(frames))

    def receive_frames(self, sender: int) -> list[memoryview]:
        """The frames that a process sends by `send_arrays` in this round."""
        return self.channel.receive(sender, 3 + 2 * len(self.owners))

    def receive_arrays(self, sender: int, like: Sequence[Any]) -> list[np.ndarray]:
        """Arrays of these shapes and dtypes, of which a process sends the `chunks` of their bytes."""
        frames, found = iter(self.receive_frames(sender)), []
        for x in like:
            parts = [next(frames) for _ in range(0, math.prod(x.shape) * x.dtype.itemsize, FRAME)]
            found.append(np.frombuffer(b"".join(parts), x.dtype).reshape(x.shape))
        return found

    def receive_vector(self, sender: int) -> np.ndarray:
        """The vector that a process sends by `send_arrays` in this round."""
        return self._read(self.receive_frames(sender)[0]).copy()

    def send_slots(self, slots: np.ndarray, to: int) -> None:
        """Send the slots of this process, which sits the step out, to another one that does not wait for them."""
        self.channel.send(to, 2 + 2 * len(self.owners), [np.asarray(slots, np.float64)])

    def latest_slots(self, senders: Sequence[int]) -> dict[int, np.ndarray]:
        """The newest slots of each of these processes that have arrived."""
        carrier, number = self.channel.carrier, 2 + 2 * len(self.owners)
        found = {peer: carrier.latest(peer, self.channel.number, self.channel.round, number) for peer in senders}
        return {peer: np.frombuffer(mail[0]) for peer, mail in found.items() if mail is not None}

    def end(self) -> None:
        """End the round."""
        self.channel.round += 1

    def _read(self, frame: memoryview) -> np.ndarray:
        return np.frombuffer(frame, self.dtype)


def chunks(arrays: Sequence[np.ndarray]) -> Iterator[np.ndarray]:
    """The frames of long arrays."""
    for array in arrays:
        for start in range(0, len(array), FRAME):
            yield array[start : start + FRAME]


def as_bytes(arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The memory of arrays as flat bytes."""
    return [np.ascontiguousarray(x).reshape(-1).view(np.uint8) for x in arrays]


def sum_of_squares(runs: Sequence[np.ndarray]) -> float:
    """Sum of the squares of all values; not finite if one of them is not, or if the squares overflow."""
    with np.errstate(over="ignore", invalid="ignore"):
        return float(sum(float(np.vdot(run, run).real) for run in runs))


def level_of(runs: Sequence[np.ndarray], squares: float) -> float:
    """The `nonfinite_level` of values with this sum of squares."""
    if np.isfinite(squares):
        return 0.0
    return LARGE if all(np.isfinite(run).all() for run in runs) else NONFINITE
