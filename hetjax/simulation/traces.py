"""Trace files: simulated speeds that change by step, as JSON.

    {"speeds": [1, 1, 0.5, 0.25],
     "startup": [0, 0, 0, 0],
     "changes": [{"step": 100, "speeds": [1, 0.5, 0.5, 0.25]},
                 {"step": 200, "startup": 0.01}]}

`speeds` has one relative speed per worker. `startup` is the fixed time of a worker's step in seconds, one number or one
per worker (default: 0). A change applies from its `step` on (the first step of a run is 0); what it leaves out stays.
"""

from __future__ import annotations

import json
import reprlib
from bisect import bisect_right
from pathlib import Path
from typing import Any

from hetjax.simulation.speeds import Trace, constant


def read_trace(path: str | Path) -> Trace:
    """Read and check a trace file. Errors name the file and the entry."""
    path = Path(path)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FileNotFoundError(f"There is no trace file {path}.") from None
    except OSError as error:
        raise OSError(f"The trace file {path} cannot be read ({error.strerror}).") from error
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}).") from error
    except RecursionError:
        raise ValueError(f"{path} is not a trace: it is nested too deeply.") from None
    if not isinstance(content, dict) or "speeds" not in content:
        raise ValueError(f'{path} is not a trace: expected an object such as {{"speeds": [1, 0.5], "changes": []}}.')
    _refuse_unknown(path, "it", content, {"speeds", "startup", "changes"})
    speeds, startup = content["speeds"], content.get("startup", 0.0)
    traces = [_constant(path, "speeds", speeds, startup)]
    steps = [0]
    changes = content.get("changes", [])
    if not isinstance(changes, list):
        raise ValueError(f'{path}: changes is {reprlib.repr(changes)}; expected a list of {{"step": 100, ...}}.')
    for i, change in enumerate(changes):
        where = f"changes[{i}]"
        if not isinstance(change, dict) or type(change.get("step")) is not int:  # which excludes bool
            found = reprlib.repr(change)
            raise ValueError(f'{path}: {where} is {found}; expected {{"step": 100, "speeds": [...]}}.')
        _refuse_unknown(path, where, change, {"step", "speeds", "startup"})
        if change["step"] <= steps[-1]:
            raise ValueError(f"{path}: {where} is at step {change['step']}; steps must increase, after {steps[-1]}.")
        speeds, startup = change.get("speeds", speeds), change.get("startup", startup)
        traces.append(_constant(path, where, speeds, startup))
        if len(traces[-1](0)[0]) != len(traces[0](0)[0]):
            raise ValueError(f"{path}: {where} has a different number of speeds than the beginning.")
        steps.append(change["step"])
    return lambda step: traces[bisect_right(steps, max(step, 0)) - 1](step)


def _constant(path: Path, where: str, speeds: Any, startup: Any) -> Trace:
    for name, given in (("speeds", speeds), ("startup", startup)):
        if any(type(number) not in (int, float) for number in (given if isinstance(given, list) else [given])):
            raise ValueError(f"{path}: {where}: {name} is {reprlib.repr(given)}; expected numbers.")
    try:
        return constant(speeds, startup)
    except (ValueError, OverflowError) as error:
        raise ValueError(f"{path}: {where}: {error}") from error


def _refuse_unknown(path: Path, where: str, given: dict[str, Any], known: set[str]) -> None:
    if unknown := sorted(given.keys() - known):
        raise ValueError(f"{path}: {where} holds {', '.join(unknown)}; expected {', '.join(sorted(known))}.")
