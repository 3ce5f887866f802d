"""Delayed updates: the sums of a step travel while the next step computes, for links where the exchange dominates.

Step n computes its gradient g_n at parameters that lack the update of the step before:

    x_0 = x_1,   g_n = sum of the gradients of step n at x_n,   x_{n+1} = update(x_n, g_{n-1})

This is another algorithm than the synchronous one: stochastic gradient descent with a delay of one (Langford, Smola and
Zinkevich, NeurIPS 2009). It needs smaller learning rates, or a warm-up.

The state after n steps holds all n updates; reading it waits for them. A checkpoint also holds the parameters
that the next step reads, 4 bytes per parameter, so a run that is resumed takes the same steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from hetjax.reduce.base import Replicas
from hetjax.reduce.layout import Parts, StepReport
from hetjax.reduce.trainable import trainable
from hetjax.sampling.order import PlannedStep
from hetjax.state import Deferred, State, gathered


@dataclass
class DelayedCore:
    """The core that workers read, and the one that an exchange in the background makes of it."""

    read: Any
    exchange: Future[tuple[Any, Any]] | None = None  # -> (core, tail); None: nothing is in flight

    def latest(self) -> Any:
        """The core with all updates; waits for the exchange."""
        return self.read if self.exchange is None else self.exchange.result()[0]


class Delayed:
    """A reduce whose exchange runs in the background while the next step computes.

    Args:
        reduce: makes the exchange; it must not donate the buffers of its core.
    """

    def __init__(self, reduce: Any):
        self.reduce, self.name, self.wire = reduce, reduce.name, reduce.wire
        reduce.all_take_part = True  # who sits out would get parameters on the way, beside the exchange in flight
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="hetjax-exchange")
        self._flying: Future[Any] | None = None

    def __call__(
        self, core: DelayedCore, parts_w: Sequence[Parts], slots_w: Sequence[list[float]], step: PlannedStep
    ) -> tuple[DelayedCore, Future[tuple[Any, Any]]]:
        before = core.latest()
        self._flying = exchange = self._thread.submit(self.reduce, before, parts_w, slots_w, step)
        return DelayedCore(before, exchange), exchange

    def land(self) -> None:
        """Wait for the exchange in flight, in which every wait has the carrier's limit and names the process.

        Raises:
            Exception: what the exchange has failed with, once.
        """
        flying, self._flying = self._flying, None
        if flying is not None:
            flying.result()

    def close(self) -> None:
        """End the thread, after the exchange in flight; see `land`."""
        try:
            self.land()
        finally:
            self._thread.shutdown()

    def read(self, tail: Future[tuple[Any, Any]]) -> StepReport:
        """The report of a step; waits for its exchange, while the workers compute the next step."""
        return self.reduce.read(tail.result()[1])

    def replicas(self, core: DelayedCore, tail: Any) -> Replicas:
        """Parameters without the update in flight."""
        return self.reduce.replicas(core.read, None)

    def view(self, core: DelayedCore, step: int, cursor: int) -> State:
        """The state with all updates, as this process holds it."""
        state = self.reduce.view(core.latest(), step, cursor)
        return replace(state, more=Deferred(lambda: self._more(core, gathered(state, "more").more)))

    def state(self, core: DelayedCore, step: int, cursor: int) -> State:
        """The whole state with all updates; collective."""
        state = self.reduce.state(core.latest(), step, cursor)
        return replace(state, more=self._more(core, state.more))

    def evaluated(self, core: DelayedCore, step: int, cursor: int) -> State:
        """The state with all updates but without that of the optimizer; collective."""
        return self.reduce.evaluated(core.latest(), step, cursor)

    def _more(self, core: DelayedCore, more: Any) -> Any:
        """What `State.more` holds besides: the parameters and model state that the next step reads."""
        if core.exchange is None:
            return more
        read = self.reduce.view(core.read, 0, 0)
        behind = [np.array(leaf) for leaf in jax.tree.leaves((trainable(read.params), read.model_state))]
        return {**(more or {}), "behind": behind}

    def place(self, core: Any, more: Any) -> DelayedCore:
        """The core to start from, reading what the run before read in its last step."""
        placed = self.reduce.place(core)
        if not isinstance(more, dict) or "behind" not in more:
            return DelayedCore(placed)
        return DelayedCore(self.reduce.like(placed, more["behind"]), _done((placed, None)))


def _done(result: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(result)
    return future
