"""Thinning: which steps of a long run are kept, so that its records and its metrics.jsonl stay bounded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

LIMIT = 20_000  # records of a history, and lines of a metrics.jsonl
_GOLDEN = 0x9E3779B9  # 2**32 over the golden ratio: its multiples fall evenly mod 2**32, whatever the steps' spacing

Row = TypeVar("Row")


class Thinning:
    """Keeps all steps up to a limit; beyond it an evenly spread half of them, then a quarter, an eighth, ...

    Steps at which something happened (events: the plan changed, a value was not finite) are thinned out separately,
    and only while they make up more than a quarter of the limit. The first and the last step are always kept. What is
    kept depends on the step numbers alone, so a resumed run goes on with the rows that an earlier one left.
    """

    def __init__(self, limit: int = LIMIT):
        self.limit = limit
        self._stride, self._event_stride = 1, 1

    def keeps(self, step: int, event: bool) -> bool:
        """Whether a step between the first and the last one is kept: every stride-th is, on average."""
        return step * _GOLDEN % 2**32 * (self._event_stride if event else self._stride) < 2**32

    def thin(self, rows: Sequence[Row], key: Callable[[Row], tuple[int, bool]]) -> list[Row]:
        """The rows to keep of these, at most `limit`; `key` gives a row's step and whether it is an event."""
        kept = list(rows)
        while len(kept) > self.limit:
            if sum(key(row)[1] for row in kept) > self.limit // 4:
                self._event_stride *= 2
            else:
                self._stride *= 2
            last = len(kept) - 1
            kept = [row for place, row in enumerate(kept) if place in (0, last) or self.keeps(*key(row))]
        return kept
