"""Names in a profiler's trace, one per step and phase (microseconds while nothing is traced), and a hook that traces.

hetjax.step    the host's part of a step: it packs and starts this one, sums and reads the one before
hetjax.plan    the controller chooses the counts
hetjax.pack    rows are laid out and sent to the devices, while the step before runs
hetjax.local   one worker's local phase, in that worker's thread
hetjax.wait    the host waits for the slowest local phase
hetjax.reduce  the sum and the update are started; between processes with `host`, also the exchange
hetjax.place   new parameters go to the devices
hetjax.report  the host reads the report, the only array of a step that it reads

Between processes, `hetjax.reduce` consists of

hetjax.copy     sums of the own workers come to the host
hetjax.cut      sums and parameters are cut to fewer bits, and made float32 again
hetjax.send     they are handed to the carrier
hetjax.meet     wait until all processes have sent their loss and slots: until the slowest has finished
hetjax.receive  an owner waits for the pieces of others
hetjax.add      it adds them
hetjax.check    it looks for values that are not finite
hetjax.update   it applies the optimizer
hetjax.return   it hands the result to the carrier
hetjax.gather   wait for the results of other owners
hetjax.store    write them to the own copy of the parameters
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import jax

from hetjax import processes
from hetjax.arguments import whole

log = logging.getLogger("hetjax")


class phase(jax.profiler.TraceAnnotation):
    """A context that appears in a trace as `hetjax.NAME`, with these values, and in `Seconds`."""

    def __init__(self, name: str, **values: Any):
        super().__init__(f"hetjax.{name}", **values)
        self._name = name

    def __enter__(self) -> Any:
        self._began = time.perf_counter()
        return super().__enter__()

    def __exit__(self, *error: Any) -> Any:
        if Seconds.current is not None:
            Seconds.current.add(self._name, time.perf_counter() - self._began)
        return super().__exit__(*error)


def step(number: int) -> jax.profiler.StepTraceAnnotation:
    """A context that appears in a trace as one step of the run."""
    return jax.profiler.StepTraceAnnotation("hetjax.step", step_num=number)


class Seconds:
    """The seconds of each phase on the host's threads, without a profiler; one object at a time collects them."""

    current: Seconds | None = None

    def __init__(self) -> None:
        self._by_name: dict[str, float] = {}
        Seconds.current = self

    def add(self, name: str, seconds: float) -> None:
        """Add to a phase."""
        self._by_name[name] = self._by_name.get(name, 0.0) + seconds

    def take(self) -> dict[str, float]:
        """The seconds since the last call."""
        taken, self._by_name = self._by_name, {}
        return taken

    def end(self) -> None:
        """Collect no more."""
        Seconds.current = None


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
