"""How numbers travel between processes: as they are, or cut to 16 or 8 bits with error feedback.

What a cut leaves over is not lost: it is kept and added to what is sent next (Seide et al., Interspeech 2014; Karimireddy
et al., arXiv 1901.09847). Sums are cut by their senders and added in float32 by the owners of the slices:

    v = g + e            g: the sender's sum of gradients, e: what was left over before
    c = decode(encode(v))  is what the owner adds
    e = v - c

New parameters come back as differences to the parameters that all processes have, and the owner keeps the float32
masters w. What the differences leave over is part of the next one without any further memory:

    d = decode(encode(w - p)),   p = p + d

Every process computes p by the same two IEEE operations from the same bytes, so replicas have the same bits.

The price: 4 bytes per parameter in every process (8 during an exchange), 4 more for masters, and exact allocation
invariance, as a cut depends on which samples a process had.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import ml_dtypes
import numpy as np

from hetjax import processes

WIRES = ("float32", "bfloat16", "int8")
BLOCK = 256  # values of one scale
_AT_ONCE = 2**16  # values that stay in a processor's cache from one operation to the next
_TINY = float(np.finfo(np.float32).tiny)
_WORTH = 0.75  # of the time of an exchange: a coarser format has to be as quick
_ROUNDS = 3  # after one warm-up round

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


class Feedback:
    """What the cuts of this process have left over, per sample of the global batch, by piece of the vector.

    Steps may have unlike numbers of samples: sums and their errors are proportional to it.

    Args:
        form: the format of sums.
        sizes: elements of each piece.
    """

    def __init__(self, form: Format, sizes: Sequence[int]):
        self.form, self.sizes = form, sizes
        self.left: dict[int, np.ndarray] = {}  # by piece; none: zero
        self._next: dict[int, np.ndarray | None] = {}  # after this step
        self._spare: list[np.ndarray] = []

    def with_left(self, k: int, runs: Sequence[np.ndarray] | None, samples: int) -> np.ndarray:
        """v = g + e of a piece, in a new vector; None: no samples, so g = 0."""
        same = [vector for vector in self._spare if len(vector) == self.sizes[k]]
        value = same[0] if same else np.empty(self.sizes[k], np.float32)
        self._spare = [vector for vector in self._spare if vector is not value]
        if runs is None:
            value[:] = 0
        else:
            np.concatenate(runs, out=value)
        if k in self.left:
            for start in range(0, len(value), _AT_ONCE):
                part = slice(start, start + _AT_ONCE)
                value[part] += self.left[k][part] * np.float32(samples)
        return value

    def encode(self, k: int, runs: Sequence[np.ndarray], samples: int) -> list[np.ndarray]:
        """The frames of a piece that goes to its owner; the error is kept once the step has succeeded."""
        value = self.with_left(k, runs, samples)
        frames = self.form.encode(value)
        self._next[k] = value
        self._sent[k] = frames, samples
        return frames

    def flush(self, k: int, runs: Sequence[np.ndarray] | None, samples: int) -> np.ndarray:
        """v = g + e of a piece that is not cut, of which nothing is left over."""
        self._next[k] = None
        return self.with_left(k, runs, samples)
