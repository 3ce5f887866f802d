"""How numbers travel between processes: as they are, or cut to 16 or 8 bits with error feedback.

What a cut leaves over is not lost: it is kept and added to what is sent next (Seide et al., Interspeech 2014;
Karimireddy et al., arXiv 1901.09847). Sums are cut by their senders and added in float32 by the owners of the slices:

    v = g + e            g: the sender's sum of gradients, e: what was left over before
    c = decode(encode(v))  is what the owner adds
    e = v - c

New parameters come back as differences to the parameters that all processes have, and the owner keeps the float32
masters w. What the differences leave over is part of the next one without any further memory:

    d = decode(encode(w - p)),   p = p + d

Every process computes p by the same two IEEE operations from the same bytes, so replicas have the same bits.

The price: in every process 4 bytes for each parameter, those of e where others own it and of w where it does itself,
besides what is on its way in a step; and exact allocation invariance, as a cut depends on which samples a process had.
It is memory of the host, which `memory` does not count.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import ml_dtypes
import numpy as np

from hetjax import processes

log = logging.getLogger("hetjax")

WIRES = ("float32", "bfloat16", "int8")
BLOCK = 256  # values of one scale
_AT_ONCE = 2**16  # values that stay in a processor's cache from one operation to the next
_TINY = float(np.finfo(np.float32).tiny)
_WORTH = 0.75  # of the time of an exchange: a coarser format has to be as quick
_ROUNDS = 3  # after one warm-up round
_LONG = 1.0  # seconds of an exchange that is all link: once in each format says enough

Frames = Sequence[Any]


class Format(Protocol):
    """A format of float32 vectors on the wire."""

    name: str

    def encode(self, values: np.ndarray) -> list[np.ndarray]:
        """A vector as frames of a message; it keeps NaN, and infinity becomes infinity or NaN."""
        ...

    def decode(self, frames: Frames, out: np.ndarray) -> np.ndarray:
        """The vector of frames, written to `out`; the same bits on every host."""
        ...


class BFloat16:
    """The upper 16 bits of float32, rounded to nearest, ties to even."""

    name = "bfloat16"

    def encode(self, values: np.ndarray) -> list[np.ndarray]:
        """See `Format`."""
        return [values.astype(ml_dtypes.bfloat16).view(np.uint16)]

    def decode(self, frames: Frames, out: np.ndarray) -> np.ndarray:
        """See `Format`."""
        bits = out.view(np.uint32)
        bits[:] = np.frombuffer(frames[0], np.uint16)
        np.left_shift(bits, 16, out=bits)
        return out


class Int8:
    """Integers from -127 to 127 with one float32 scale per block of 256 values: q = round(v / s), s = max |v| / 127.

    A block with a value that is not finite has the scale NaN.
    """

    name = "int8"

    def encode(self, values: np.ndarray) -> list[np.ndarray]:
        """See `Format`."""
        scales = np.empty(-(-len(values) // BLOCK), np.float32)
        numbers = np.empty(len(values), np.int8)
        for start in range(0, len(values), _AT_ONCE):
            for block, (first, stop) in _blocks(values, start):
                scale = np.abs(block).max(axis=1) / np.float32(127)
                scale[~np.isfinite(scale)] = np.nan
                scale[scale < _TINY] = 0
                inverse = np.divide(1, scale, out=np.zeros_like(scale), where=scale > 0)
                with np.errstate(invalid="ignore"):  # infinity times zero; the scale says so
                    scaled = block * inverse[:, None]
                np.rint(scaled, out=scaled)
                scaled[np.isnan(scale)] = 0
                np.clip(scaled, -127, 127, out=scaled)
                numbers[first:stop] = scaled.reshape(-1)
                scales[first // BLOCK : -(-stop // BLOCK)] = scale
        return [scales, numbers]

    def decode(self, frames: Frames, out: np.ndarray) -> np.ndarray:
        """See `Format`."""
        scales, numbers = np.frombuffer(frames[0], np.float32), np.frombuffer(frames[1], np.int8)
        for start in range(0, len(out), _AT_ONCE):
            for block, (first, stop) in _blocks(out, start):
                whole = numbers[first:stop].reshape(block.shape)
                np.multiply(whole, scales[first // BLOCK : -(-stop // BLOCK), None], out=block, dtype=np.float32)
        return out


def _blocks(values: np.ndarray, start: int) -> list[tuple[np.ndarray, tuple[int, int]]]:
    """The blocks [n, BLOCK] of a stretch, and the last one [1, rest]; with their places."""
    stop = min(start + _AT_ONCE, len(values))
    middle = start + (stop - start) // BLOCK * BLOCK
    cuts = [(start, middle, BLOCK), (middle, stop, stop - middle)]
    return [(values[a:b].reshape(-1, width), (a, b)) for a, b, width in cuts if b > a]


FORMATS: dict[str, Format] = {"bfloat16": BFloat16(), "int8": Int8()}


class Cut:
    """Cuts the sums and the new parameters of pieces, and keeps what is left over, per sample of the global batch.

    Steps may have unlike numbers of samples: sums and their errors are proportional to it.

    Args:
        form: the format.
        runs: lengths of the runs of each piece.
    """

    def __init__(self, form: Format, runs: Sequence[Sequence[int]]):
        self.form, self.sizes = form, [sum(lengths) for lengths in runs]
        self._ends = [np.cumsum(lengths)[:-1] for lengths in runs]
        self.left: dict[int, np.ndarray] = {}  # by piece; none: zero
        self._next: dict[int, tuple[list[np.ndarray], Frames, int] | None] = {}  # runs, frames and samples of this step
        self._scratch = [np.empty(max(self.sizes, default=0), np.float32) for _ in range(2)]

    def split(self, k: int, vector: np.ndarray) -> list[np.ndarray]:
        """The runs of a piece."""
        return np.split(vector, self._ends[k])

    # -- sums --

    def encoded(self, k: int, runs: Sequence[np.ndarray], samples: int) -> Frames:
        """The frames of a piece that goes to its owner; the error counts once the step has succeeded.

        The runs must not change until then.
        """
        frames = self.form.encode(self._with_left(k, runs, samples, self._scratch[0][: self.sizes[k]]))
        self._next[k] = list(runs), frames, samples
        return frames

    def whole(self, k: int, runs: Sequence[np.ndarray] | None, samples: int) -> np.ndarray:
        """The sum of a piece with all that was left over, not cut; no runs: this process has no samples.

        For pieces that this process owns itself, and for the last sum of one that leaves the exchange.
        """
        self._next[k] = None
        return self._with_left(k, runs, samples, np.empty(self.sizes[k], np.float32))

    def decoded(self, k: int, frames: Frames, whole: bool) -> list[np.ndarray]:
        """The runs of a piece that a process sent; valid until the next call."""
        out = self._scratch[0][: self.sizes[k]]
        return self.split(k, np.frombuffer(frames[0], np.float32) if whole else self.form.decode(frames, out))

    def commit(self) -> None:
        """The step has succeeded: keep what its cuts have left over, in the memory of what was left over before."""
        for k, sent in self._next.items():
            if sent is None:
                self.left.pop(k, None)
                continue
            runs, frames, samples = sent
            if k not in self.left:
                self.left[k] = np.zeros(self.sizes[k], np.float32)
            error = self._with_left(k, runs, samples, self.left[k])
            error -= self.form.decode(frames, self._scratch[0][: self.sizes[k]])
            error /= np.float32(samples)
        self._next.clear()

    def drop(self) -> None:
        """The step had no effect: what was left over before it stays."""
        self._next.clear()

    def _with_left(self, k: int, runs: Sequence[np.ndarray] | None, samples: int, out: np.ndarray) -> np.ndarray:
        """The sums of a piece with what was left over, written to `out`, which may be the memory of that."""
        if k in self.left:
            np.multiply(self.left[k], np.float32(samples), out=out)
        else:
            out[:] = 0
        for part, run in zip(self.split(k, out), runs or (), strict=runs is not None):
            part += run
        return out

    # -- parameters --

    def differences(self, k: int, masters: Sequence[np.ndarray], params: Sequence[np.ndarray]) -> Frames:
        """The frames of what new masters of a piece differ by from the parameters that all processes have."""
        out = self._scratch[1][: self.sizes[k]]
        np.subtract(np.concatenate(masters), np.concatenate(params), out=out)
        return self.form.encode(out)

    def moved(self, k: int, params: Sequence[np.ndarray], frames: Frames) -> list[np.ndarray]:
        """The new parameters of a piece: the same bits from the same frames, in every process."""
        out = self.form.decode(frames, self._scratch[0][: self.sizes[k]])
        np.add(np.concatenate(params), out, out=out)
        return self.split(k, out)


def quickest(seconds_of: Callable[[str], float]) -> str:
    """The format whose exchange is quickest; collective. A coarser one has to save a quarter of the time.

    Args:
        seconds_of: makes one exchange in a format, in all processes, and returns its time, the same in all.

    Returns:
        Its name, the same in all processes.
    """
    seconds, rounds = {}, 1 + _ROUNDS
    for name in WIRES:
        times = [seconds_of(name)]
        if times[0] > _LONG:
            rounds = 1
        times += [seconds_of(name) for _ in range(1, rounds)]
        seconds[name] = float(np.median(times[1:] or times))
    chosen = WIRES[0]
    for name in WIRES[1:]:
        if seconds[name] < _WORTH * seconds[chosen]:
            chosen = name
    log.info("Numbers travel in %s: an exchange takes %s.", chosen,
             ", ".join(f"{1e3 * each:.0f} ms in {name}" for name, each in seconds.items()))  # fmt: skip
    return chosen


def slowest_seconds(run: Callable[[], None]) -> float:
    """The longest time over all processes, which start together; the same in all of them."""
    processes.gather(None)
    began = time.perf_counter()
    run()
    return max(processes.gather(time.perf_counter() - began))
