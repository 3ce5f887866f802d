"""Where the time of a step goes that no local phase takes: milliseconds by cause, for bench_cluster.py --breakdown.

Outside the slowest local phase, a step is what its process does until it starts the next phase. So every step counts
for the process that was slowest in it; columns of single processes hold the same causes over all steps, waits included.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from rich.table import Table

CAUSES = {  # phases of `hetjax.profiling`
    "copy": "sums of the own workers to the host",
    "cut": "to fewer bits and back",
    "send": "sums to their owners",
    "meet": "wait for the tails of all",
    "receive": "wait for pieces of sums",
    "add": "add pieces",
    "check": "finite test",
    "update": "optimizer",
    "return": "results to all",
    "gather": "wait for results",
    "store": "results into the own copy",
    "place": "parameters to the devices",
}


def breakdown(run: dict[str, Any], skip: int) -> dict[str, Any]:
    """Mean milliseconds of every cause, without the first steps.

    Args:
        run: step times, workers' times, and the phases of every process and step.
        skip: number of first steps to leave out.

    Returns:
        `outside_ms`, `by_cause` of the slowest process of each step, and `by_process` the same of each process.
    """
    times = np.array(run["times"], float)[skip:]
    steps, phases_P = np.array(run["step_times"])[skip:], [phases[skip:] for phases in run["phases"]]
    timed = np.flatnonzero(~np.isnan(times).all(axis=1))  # a worker without samples has no time
    slowest = {int(n): int(np.nanargmax(times[n])) for n in timed}
    outside = {n: 1e3 * (steps[n] - np.nanmax(times[n])) for n in slowest}

    def means(process_of: Any) -> dict[str, float]:
        rows = [phases_P[process_of(n)][n] for n in slowest]
        found = {name: 1e3 * float(np.mean([row.get(name, 0.0) for row in rows])) for name in CAUSES}
        inside = sum(found.values()) - found["place"]
        found["rest of the exchange"] = 1e3 * float(np.mean([row.get("reduce", 0.0) for row in rows])) - inside
        return found

    by_cause = means(slowest.__getitem__)
    mean = float(np.mean(list(outside.values())))
    return {
        "outside_ms": mean,
        "outside_ms_median": float(np.median(list(outside.values()))),
        "by_cause": by_cause | {"host, before and after": mean - sum(by_cause.values())},
        "by_process": [means(lambda n, p=p: p) for p in range(len(phases_P))],
    }


def table(found: dict[str, Any]) -> Table:
    """One row per cause."""
    shown = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    shown.add_column("milliseconds outside the slowest phase")
    for column in ("slowest", *(f"process {p}" for p in range(len(found["by_process"])))):
        shown.add_column(column, justify="right", no_wrap=True)
    for cause, value in found["by_cause"].items():
        name = f"{cause}: {CAUSES[cause]}" if cause in CAUSES else cause
        rest = [f"{row[cause]:.1f}" if cause in row else "-" for row in found["by_process"]]
        shown.add_row(name, f"{value:.1f}", *rest)
    shown.add_row("all", f"{found['outside_ms']:.1f}", *("" for _ in found["by_process"]))
    return shown
