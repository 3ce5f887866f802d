"""A pool of index ranges: every position of every epoch is handed out once, and again only if it was given back."""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from dataclasses import dataclass

Interval = tuple[int, int]  # half-open, in samples since the start of training


@dataclass(frozen=True)
class Range:
    """The half-open range [start, stop) of positions in one epoch's order."""

    epoch: int
    start: int
    stop: int
    last: bool = False  # whether it ends its epoch

    @property
    def count(self) -> int:
        return self.stop - self.start


class RangePool:
    """Hands out the samples [begin, end) of training, in order and each exactly once.

    A range is out from `take` until `done` or `give_back`. Ranges given back are handed out before new ones. A range
    never crosses the end of an epoch, but there is no barrier between epochs: the next one starts while ranges of the
    last are still out.

    Args:
        size: Samples per epoch.
        end: Samples since the start of training at which to stop.
        begin: Samples handed out before, by the run that is resumed.
        left: Intervals below `begin` that were handed out but never done (`undone` of the run that is resumed).
    """

    def __init__(self, size: int, end: int, begin: int = 0, left: Iterable[Interval] = ()):
        if size < 1:
            raise ValueError(f"The dataset is empty ({size} samples): there is nothing to hand out.")
        self.size, self.end = size, end
        self._fresh = begin  # the first sample not handed out yet
        self._back: list[Interval] = []
        self._out: set[Range] = set()
        for start, stop in left:
            if not 0 <= start < stop <= begin:
                raise ValueError(
                    f"left holds the interval {start} to {stop}, but only {begin} samples were handed out."
                )
            self._put_back(int(start), int(stop))

    def take(self, count: int) -> Range | None:
        """Return the next range of up to `count` samples; None while there is nothing to hand out."""
        if count < 1:
            raise ValueError(f"Cannot take a range of {count} samples: expected at least 1.")
        if self._back:
            start, stop = self._back.pop(0)
            cut = self._cut(start, stop, count)
            if cut < stop:
                self._back.insert(0, (cut, stop))
        elif self._fresh < self.end:
            start = self._fresh
            cut = self._fresh = self._cut(start, self.end, count)
        else:
            return None
        epoch, first = divmod(start, self.size)
        taken = Range(epoch, first, first + cut - start, last=cut % self.size == 0)
        self._out.add(taken)
        return taken

    def done(self, taken: Range) -> None:
        """Mark the samples of this range as trained on."""
        self._return(taken)

    def give_back(self, taken: Range) -> None:
        """Return an unused range, to be handed out again."""
        self._return(taken)
        start = taken.epoch * self.size + taken.start
        self._put_back(start, start + taken.count)

    @property
    def available(self) -> bool:
        """Whether `take` has something to hand out."""
        return bool(self._back) or self._fresh < self.end

    @property
    def cursor(self) -> int:
        """Number of samples done since the start of training."""
        return self._fresh - sum(stop - start for start, stop in self._back) - sum(r.count for r in self._out)

    @property
    def empty(self) -> bool:
        """Whether every sample is done: none available and none out."""
        return not self.available and not self._out

    @property
    def handed(self) -> int:
        """All samples below this one have been handed out at least once."""
        return self._fresh

    def undone(self) -> list[Interval]:
        """Intervals below `handed` that are not done, including those out; the `left` of a resumed run."""
        out = [(r.epoch * self.size + r.start, r.epoch * self.size + r.stop) for r in self._out]
        joined: list[Interval] = []
        for start, stop in sorted([*self._back, *out]):
            if joined and joined[-1][1] == start:
                joined[-1] = (joined[-1][0], stop)
            else:
                joined.append((start, stop))
        return joined

    def _cut(self, start: int, stop: int, count: int) -> int:
        return min(stop, start + count, (start // self.size + 1) * self.size)

    def _return(self, taken: Range) -> None:
        if taken not in self._out:
            raise ValueError(f"{taken} is not out: it was never handed out, or is already done or given back.")
        self._out.remove(taken)

    def _put_back(self, start: int, stop: int) -> None:
        """Insert in order and merge with adjacent intervals, so that a large batch can take them whole."""
        at = bisect.bisect(self._back, (start, stop))
        if at < len(self._back) and self._back[at][0] == stop:
            stop = self._back.pop(at)[1]
        if at and self._back[at - 1][1] == start:
            at -= 1
            start = self._back.pop(at)[0]
        self._back.insert(at, (start, stop))
