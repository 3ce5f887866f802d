"""Agree in every step: gradients are summed over all workers and all apply the same update."""

from __future__ import annotations

from typing import Any

from hetjax.reduce.base import Reduce
from hetjax.reduce.transports import make_reduce
from hetjax.reduce.update import State
from hetjax.sync.base import Sync, SyncContext
from hetjax.sync.replicas import average


class AllReduce(Sync):
    """The sync `allreduce`."""

    name = "allreduce"

    def open(self, setting: SyncContext, state: State) -> tuple[Reduce, Any]:
        core = average(state).core  # of a run that kept several sets until now
        return make_reduce(setting.transport, setting.workers, setting.layout, setting.rule.update(), core)
