"""How much each gradient counts by its batch, and how far updates go by where training stands."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hetjax.sampling.ranges import Range
from hetjax.sync.hogbatch.rate_scale import CAP, rate_scale


@dataclass(frozen=True)
class Rate:
    """The factor min(b / reference, cap) on gradients, and the factor schedule(samples / step) on updates.

    `schedule` is for rates that change over training. A schedule inside the optimizer counts updates, whose number
    nobody knows beforehand; this one counts in steps of `step` samples.
    """

    reference: float
    cap: float | None = CAP
    by_batch: bool = True
    schedule: Callable[[float], float] | None = None
    step: int = 1
    alone: bool = False  # there is one worker, which is to do what sequential SGD does

    def scale(self, span: Range, batch: int) -> float:
        """Of the gradient of a range that was handed out for a batch.

        The short range at the end of an epoch counts as what it is: a handful of samples must not move the model like
        a full batch. Sequential SGD does let them, and so does one worker alone.
        """
        counted = batch if self.alone else span.count
        return rate_scale(counted, self.reference, self.cap) if self.by_batch else 1.0

    def at(self, samples: int) -> float:
        """Of an update after so many samples."""
        return 1.0 if self.schedule is None else float(self.schedule(samples / self.step))
