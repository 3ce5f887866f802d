"""Synchronous data parallelism: gradients are summed over all workers in every step, and all apply the same update."""

from __future__ import annotations

from typing import Any

from hetjax.reduce.base import Reduce
from hetjax.reduce.transports import make_reduce
from hetjax.state import State
from hetjax.sync.base import Sync, SyncContext
from hetjax.sync.replicas import average


class AllReduce(Sync):
    """The sync `allreduce`: one model, identical on all workers; a state with replicas continues from their mean."""

    name = "allreduce"

    def open(self, context: SyncContext, state: State) -> tuple[Reduce, Any]:
        core = average(state).core
        return make_reduce(context.options, context.workers, context.layout, context.rule, core, state.more)
