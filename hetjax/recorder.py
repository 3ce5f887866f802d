"""The bookkeeping of one run: records into a history, hooks, and what the run as a whole came to."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from hetjax.devices.compile import compiles
from hetjax.history import History, Record
from hetjax.simulation.speeds import Simulation

log = logging.getLogger("hetjax")
Hook = Callable[[Record, Any], None]  # may also have begin(history) and end(history), called around the steps


class Recorder:
    """A context around the steps of a run.

    Args:
        history: where records go.
        hooks: called with every record and the state after its step.
        simulation: simulated speeds, or None.
    """

    def __init__(self, history: History, hooks: Sequence[Hook] = (), simulation: Simulation | None = None):
        self.history, self.hooks, self.simulation = history, hooks, simulation
        self._compiled = 0
        self._ideal_s, self._samples = 0.0, 0

    def __enter__(self) -> Recorder:
        if self.simulation is not None:
            self.history.ideal_samples_per_s = self.simulation.ideal()
        self._tell("begin")
        self._compiled = compiles()
        return self

    def add(self, record: Record, state: Any) -> None:
        """A finished step; hooks must copy what they want to keep of the state, whose buffers will be reused."""
        self.append(record)
        for hook in self.hooks:
            hook(record, state)

    def append(self, record: Record) -> None:
        """The same for the history alone."""
        self.history.add(record)
        samples = int(record.counts_W.sum())
        if self.simulation is not None:
            self._samples, self._ideal_s = self._samples + samples, self._ideal_s + samples / self.simulation.ideal()

    def finish(self, rate: float | None, waited: float) -> None:
        """The run has ended well.

        Args:
            rate: samples a second of all workers together at best, where speeds are real.
            waited: seconds that it stood still for data.
        """
        history = self.history
        history.recompiles_after_warmup = compiles() - self._compiled
        history.ideal_samples_per_s = self._samples / self._ideal_s if self._ideal_s else rate
        history.data_wait_s = waited
        if self.simulation is not None:
            history.overruns = self.simulation.overruns
            if warning := self.simulation.verdict():
                log.warning(warning)

    def __exit__(self, *_: object) -> None:
        self._tell("end")

    def _tell(self, what: str) -> None:
        for hook in self.hooks:
            if hasattr(hook, what):
                getattr(hook, what)(self.history)
