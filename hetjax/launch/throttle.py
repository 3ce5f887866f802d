"""The CPU quotas of a run: each holds while its process takes steps, and changes at the steps that were named."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hetjax.launch.heartbeat import Beat
from hetjax.launch.options import Disturbance
from hetjax.launch.quotas import CpuQuota


class Throttle:
    """Keeps every process's group at the quota that is due.

    Between `fit`s (compiling, testing) there is no limit, unless `from_start`. A further `fit` of process 0 begins with
    the first quotas again. `say` is told what changes.
    """

    def __init__(
        self,
        quotas_P: Sequence[CpuQuota],
        cores_P: Sequence[float | None],
        disturbances: Sequence[Disturbance] = (),
        *,
        from_start: bool = False,
        say: Callable[[str], None] = lambda told: None,
    ):
        self._quotas_P, self._first_P = list(quotas_P), list(cores_P)
        self._disturbances, self._from_start, self._say = list(disturbances), from_start, say
        self._due_P, self._left, self._begun = list(cores_P), list(disturbances), 0

    def follow(self, beats_P: Sequence[Beat], running_P: Sequence[bool]) -> None:
        """Set what is due by the processes' beats; those that have ended are left alone."""
        leader = beats_P[0]
        if leader.begun != self._begun:
            self._begun, self._due_P, self._left = leader.begun, list(self._first_P), list(self._disturbances)
        while self._left and leader.stepping and leader.step >= self._left[0].step:
            disturbance = self._left.pop(0)
            self._due_P = list(disturbance.cores_P)
            self._say(f"step {leader.step}: quotas are now {', '.join(f'{c:g}' for c in disturbance.cores_P)} cores")
        for quota, cores, beat, running in zip(self._quotas_P, self._due_P, beats_P, running_P, strict=True):
            due = cores if self._from_start or beat.stepping else None
            if running and quota.cores != due:
                quota.set(due)
