"""A pool of index ranges: every position of every epoch is handed out once, and again only if it came back undone."""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from dataclasses import dataclass

Interval = tuple[int, int]  # half-open, in samples since the start of training


@dataclass(frozen=True)
class Range:
    """The half-open range [start, stop) of positions in the order of one epoch."""

    epoch: int
    start: int
    stop: int
    last: bool = False  # it ends its epoch

    @property
    def count(self) -> int:
        return self.stop - self.start


class RangePool:
    """Hands out the samples `begin .. end - 1` of training, `size` to an epoch, in order and each exactly once.

    A range is out from `take` until it is `done` or comes back by `give_back`; what came back is handed out before
    anything new. Ranges never reach over the end of an epoch. There is no barrier between epochs: the next one begins
    while ranges of the last are still out.

    `left` are spans below `begin` that were never done: what a run that was stopped had out at that moment.
    """

    def __init__(self, size: int, end: int, begin: int = 0, left: Iterable[Interval] = ()):
        if size < 1:
            raise ValueError(f"The data set is empty ({size} samples): there is nothing to hand out.")
        self.size, self.end = size, end
        self._fresh = begin  # the first sample that was never handed out
        self._back: list[Interval] = []
        self._out: set[Range] = set()
        for start, stop in left:
            if not 0 <= start < stop <= begin:
                raise ValueError(
                    f"The span {start} to {stop} is said to be left over, but only {begin} were handed out."
                )
            self._put_back(int(start), int(stop))

    def take(self, count: int) -> Range | None:
        """The next range of up to `count` samples; None while there is nothing to hand out."""
        if count < 1:
            raise ValueError(f"A range of {count} samples was asked for: expected at least 1.")
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
        """The samples of this range have been learned from."""
        self._return(taken)

    def give_back(self, taken: Range) -> None:
        """Nothing came of this range: somebody else is to have it."""
        self._return(taken)
        start = taken.epoch * self.size + taken.start
        self._put_back(start, start + taken.count)

    @property
    def available(self) -> bool:
        """Whether `take` has something to hand out."""
        return bool(self._back) or self._fresh < self.end

    @property
    def cursor(self) -> int:
        """How many samples are done since the start of training."""
        return self._fresh - sum(stop - start for start, stop in self._back) - sum(r.count for r in self._out)

    @property
    def empty(self) -> bool:
        """Whether every sample is done: nothing is left and nothing is out."""
        return not self.available and not self._out

    @property
    def handed(self) -> int:
        """The samples below this one have all been handed out at least once."""
        return self._fresh

    def undone(self) -> list[Interval]:
        """The spans below `handed` that are not done, those out included: what to give as `left` to go on later."""
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
            raise ValueError(f"{taken} is not out: it was never handed out, or it is back or done already.")
        self._out.remove(taken)

    def _put_back(self, start: int, stop: int) -> None:
        """Into its place, joined to neighbors, so that a large batch can take it whole."""
        place = bisect.bisect(self._back, (start, stop))
        if place < len(self._back) and self._back[place][0] == stop:
            stop = self._back.pop(place)[1]
        if place and self._back[place - 1][1] == start:
            place -= 1
            start = self._back.pop(place)[0]
        self._back.insert(place, (start, stop))
