"""Thinning: which steps of a long run are kept, so that its records and its metrics.jsonl stay bounded in size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

LIMIT = 20_000  # records of a history, and lines of a metrics.jsonl
_GOLDEN = 0x9E3779B9  # 2**32 / golden ratio: its multiples spread evenly mod 2**32, for any spacing of the steps

Row = TypeVar("Row")


class Thinning:
    """Keeps all steps up to a limit, and beyond it an evenly spread half of them, then a quarter, an eighth, ...

    Events (steps at which the plan changed or a value was not finite) are thinned separately, and only while they
    exceed a quarter of the limit. The first and the last step are always kept. The selection depends on the step
    numbers alone, so a resumed run continues the selection of the run before.

    Args:
        limit: maximum number of steps kept.
    """

    def __init__(self, limit: int = LIMIT):
        self.limit = limit
        self._stride, self._event_stride = 1, 1

    def keeps(self, step: int, event: bool) -> bool:
        """Return whether a step between the first and the last is kept; on average every stride-th is."""
        return step * _GOLDEN % 2**32 * (self._event_stride if event else self._stride) < 2**32

    def thin(self, rows: Sequence[Row], key: Callable[[Row], tuple[int, bool]]) -> list[Row]:
        """Return the rows to keep, at most `limit`; `key` gives a row's step and whether it is an event."""
        kept = list(rows)
        while len(kept) > self.limit:
            if sum(key(row)[1] for row in kept) > self.limit // 4:
                self._event_stride *= 2
            else:
                self._stride *= 2
            last = len(kept) - 1
            kept = [row for i, row in enumerate(kept) if i in (0, last) or self.keeps(*key(row))]
        return kept
