"""Names in a profiler's trace, one per step and phase (microseconds while nothing is traced), and a hook that traces.

hetjax.step    the host's part of a step: it packs and starts this one, sums and reads the one before
hetjax.plan    the controller chooses the counts
hetjax.pack    rows are laid out and sent to the devices, while the step before runs
hetjax.local   one worker's local phase, in that worker's thread
hetjax.wait    the host waits for the slowest local phase
hetjax.reduce  the sum and the update are started; between processes with `host`, also the exchange
hetjax.report  the host reads the report, the only array of a step that it reads
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import jax

from hetjax import processes
from hetjax.arguments import whole

log = logging.getLogger("hetjax")


def phase(name: str, **values: Any) -> jax.profiler.TraceAnnotation:
    """A context that appears in a trace as `hetjax.NAME`, with these values."""
    return jax.profiler.TraceAnnotation(f"hetjax.{name}", **values)


def step(number: int) -> jax.profiler.StepTraceAnnotation:
    """A context that appears in a trace as one step of the run."""
    return jax.profiler.StepTraceAnnotation("hetjax.step", step_num=number)


class Profile:
    """A hook for `Trainer.fit` that writes a trace of some steps for XProf, TensorBoard or Perfetto.

    In a loop of your own, put `with jax.profiler.trace(folder):` around a few calls of the step.

    Examples:
        >>> trainer.fit(state, source, epochs=1, hooks=[hetjax.Profile("runs/mine/profile", steps=5)])

    Args:
        folder: where the trace goes; with several processes each writes to a folder of its own in it.
        steps: number of steps in the trace. Writing it lengthens the step after the last one.
        warm_up: number of steps before it, in which plans settle and caches warm up.

    Raises:
        TypeError: if a number is no whole number.
        ValueError: if a number is out of range.
    """

    def __init__(self, folder: str | Path, steps: int = 5, *, warm_up: int = 10):
        self.folder, self.steps = Path(folder), whole("steps", steps, 1)
        self.warm_up = whole("warm_up", warm_up, 1)
        self._seen, self._tracing = 0, False

    def __call__(self, record: Any, state: Any) -> None:
        """Start and end the trace; `fit` calls this after every step.

        Args:
            record: the record of the step.
            state: the state after it.
        """
        self._seen += 1
        if self._seen == self.warm_up:
            own = self.folder / f"process{processes.index()}" if processes.count() > 1 else self.folder
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0  # every Python call would be traced, which slows the host down
            jax.profiler.start_trace(str(own), profiler_options=options)
            self._tracing = True
        elif self._seen == self.warm_up + self.steps:
            self._stop()

    def end(self, history: Any) -> None:
        """End the trace of a run that ends before it is complete; `fit` calls this.

        Args:
            history: the history of the run.
        """
        if self._seen < self.warm_up:
            log.warning(
                "There is no trace in %s: the run had %d steps, and the trace starts after %d. Give warm_up a smaller "
                "number, or train longer.", self.folder, self._seen, self.warm_up,
            )  # fmt: skip
        self._stop()

    def _stop(self) -> None:
        if self._tracing:
            self._tracing = False
            jax.profiler.stop_trace()
