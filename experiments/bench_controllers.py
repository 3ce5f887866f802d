"""Every controller on every trace, in virtual time: regret, false changes, and steps to recover.

    python experiments/bench_controllers.py --json controllers.json --figure controllers.png     # about 4 minutes
    python experiments/bench_controllers.py --quick                                              # within 50 s

Expected: `balanced` has the lowest regret in every row, at most 0.01 on quiet traces and 0.05 on disturbed ones; it
settles in 2 changes, makes no false ones at 5% noise, and recovers within 5 steps. The traces are in
controller_traces.py.

- Regret: total time / the oracle's - 1, on the same noise. The oracle knows the mean costs of the current step, but
  neither the noise nor single spikes; `oracle+1` knows those of the step before. The first 1 + delay steps, which no
  timing can reach, are excluded; their time over the oracle's is `uninformed`. `regret_from_second_step` excludes only
  the very first step.
- Settled: the plan's noise-free time is within 5% of the oracle's and stays there.
- False changes: changes of the plan in the 1,000 steps after the first 200, at constant speeds.
- Recovery: steps after one worker becomes 2x slower until the plan is within 10% of the best.

`dp` and `edp` differ only in the weights of gradients, so their times are the same.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from benches.flags import File, JsonFile, Switch, from_flags
from rich.console import Console
from rich.table import Table

from benches.controller_traces import DISTURBED, QUIET, recovery  # isort: skip
from hetjax.planning.controllers import Balanced, Observation, make
from hetjax.planning.limits import Limits
from hetjax.planning.simulator import SimulatedRun, Trace, best_times, simulate

COLUMNS: dict[str, tuple[str, dict[str, Any]]] = {
    "equal": ("equal", {}),
    "static": ("static", {}),
    **{
        f"{law}{at}": (law, options)
        for law in ("dp", "edp", "dbs", "proportional")
        for at, options in (("", {}), ("@1", {"every": 1}), ("@5", {"every": 5}))
    },
    "lbbsp": ("lbbsp", {}),
    "lbb": ("lbb", {}),
    "balanced": ("balanced", {}),
}
SHORT = {"hetero2": "h2", "hetero6": "h6", "hetero10": "h10", "fleet1024": "fleet", "slow50": "s50"} | {
    f"noise{p}": f"n{p}" for p in (2, 5, 10, 15, 20)
}
UP_TO_5_PERCENT = ("hetero2", "hetero6", "hetero10", "noise2", "noise5", "caps", "slow50", "fleet1024")
NOISES = (0.02, 0.05, 0.10, 0.15, 0.20)


@dataclass(frozen=True)
class Args:
    json: JsonFile = None
    """Where to write the results as JSON."""
    figure: File = None
    """Where to write the figure (PNG): controllers by traces colored by regret, and time lines of one trace."""
    timeline: str = "step"
    """The trace of the time lines."""
    seed_base: int = 0
    """First seed; another number gives new traces and noise."""
    quick: Switch = False
    """One seed and shorter traces."""
    jobs: int = min(2, os.cpu_count() or 1)
    """Number of processes."""

    @property
    def seeds(self) -> list[int]:
        """The seeds of traces and noise."""
        return [self.seed_base + k for k in range(1 if self.quick else 3)]

    def steps(self, trace: str) -> int:
        """Length of a trace."""
        if trace == "fleet1024":
            return 200 if self.quick else 1000
        return 450 if self.quick and trace not in ("noise5", "noise15") else 1200


@dataclass(frozen=True)
class Score:
    """One controller on one trace; the terms are defined at the top of this file."""

    regret: float
    from_second_step: float
    uninformed: float
    worst_step: float
    settle: float  # changes until settled; infinite if never
    late_changes: int  # after the first 200 steps


def judge(run: SimulatedRun, oracle_T: np.ndarray, best_T: np.ndarray, delay: int) -> Score:
    """Score a run.

    Args:
        run: The run.
        oracle_T: Times of the oracle, with the same noise.
        best_T: Noise-free times of the oracle.
        delay: Steps between a timing and the first plan that uses it.
    """
    first = 1 + delay
    unsettled_T = np.flatnonzero(run.mean_times_T > 1.05 * best_T)
    settled = int(unsettled_T[-1]) + 1 if len(unsettled_T) else 0
    return Score(
        regret=float(run.times_T[first:].sum() / oracle_T[first:].sum() - 1.0),
        from_second_step=float(run.times_T[1:].sum() / oracle_T[1:].sum() - 1.0),
        uninformed=float(run.times_T[:first].sum() / oracle_T[:first].sum()),
        worst_step=float((run.times_T[first:] / oracle_T[first:]).max()),
        settle=float(run.changed_T[: settled + 1].sum()) if settled < len(best_T) else np.inf,
        late_changes=int(run.changed_T[200:].sum()),
    )


def oracle_run(trace: Trace, eps_TxW: np.ndarray, staleness: int) -> SimulatedRun:
    """The oracle on a trace, with costs `staleness` steps old."""
    counts_TxW, best_T = best_times(trace, staleness)
    times_T = np.array([(trace.mean_times(k, counts_TxW[k]) * eps_TxW[k]).max() for k in range(trace.steps)])
    changed_T = np.concatenate([[False], np.any(counts_TxW[1:] != counts_TxW[:-1], axis=1)])
    return SimulatedRun(times_T, best_T, changed_T, counts_TxW)


def bench(job: tuple[str, int, int]) -> tuple[str, int, dict[int, dict[str, Score]]]:
    """All controllers on one trace with one seed, for both delays."""
    name, steps, seed = job
    trace = (QUIET | DISTURBED)[name](steps, seed)
    eps_TxW = trace.draw(seed)
    oracle, stale = oracle_run(trace, eps_TxW, 0), oracle_run(trace, eps_TxW, 1)
    scores: dict[int, dict[str, Score]] = {}
    for delay in (0, 1):
        scores[delay] = {"oracle+1": judge(stale, oracle.times_T, oracle.mean_times_T, delay)}
        for column, (law, options) in COLUMNS.items():
            if law == "edp":
                scores[delay][column] = scores[delay][column.replace("edp", "dp")]
                continue
            run = simulate(make(law, **options), trace, eps_TxW, delay)
            scores[delay][column] = judge(run, oracle.times_T, oracle.mean_times_T, delay)
    return name, seed, scores


def recover(job: tuple[str, float, int, int]) -> tuple[str, float, int, float]:
    """Steps that a controller takes to recover from the slowdown; infinite if it never does."""
    column, noise, seed, delay = job
    trace = recovery(300, seed, noise)
    law, options = COLUMNS[column]
    run = simulate(make(law, **options), trace, trace.draw(seed), delay)
    good_T = (run.mean_times_T <= 1.1 * best_times(trace)[1])[150:]
    return column, noise, delay, float(np.argmax(good_T)) if good_T.any() else np.inf


def plan_milliseconds(workers: int) -> float:
    """Median time of a full update of `balanced`, with a solve in every step, on 8 kinds of staircases."""
    rng = np.random.default_rng(workers)
    capacity, rungs = 256, (1, 2, 4, 8, 12, 16, 24, 32)
    stairs = tuple(np.ceil(np.arange(capacity + 1) / rung) * rung for rung in rungs)
    capacity_W, kind_W = np.full(workers, capacity), np.arange(workers) % 8
    limits = Limits(capacity_W, np.zeros(workers, np.int64), 1, kind_W, stairs)
    rate_W = np.exp(0.4 * rng.standard_normal(workers))
    always = Balanced(min_gain=-0.5, rest=0)
    spent = []
    for step in range(12 if workers > 2000 else 30):
        start = time.perf_counter()
        plan = always.plan(64 * workers, limits)
        spent.append(time.perf_counter() - start)
        work_W = limits.work(plan.counts_W)
        times_W = np.round(work_W / rate_W * np.exp(0.05 * rng.standard_normal(workers)), 6)
        start = time.perf_counter()
        always.observe(Observation(plan.counts_W, work_W, times_W, 0, step))
        spent[-1] += time.perf_counter() - start
    return 1000.0 * float(np.median(spent[2:]))


def collect(args: Args) -> dict[str, Any]:
    """Run everything; the results as they are written to JSON."""
    names = [*QUIET, *DISTURBED]
    jobs = [(name, args.steps(name), seed) for name in ["fleet1024", *names] for seed in args.seeds]
    jobs = list(dict.fromkeys(jobs))  # the longest one first
    levels = NOISES if not args.quick else (0.05, 0.10)
    recovery_seeds = range(args.seed_base, args.seed_base + (8 if args.quick else 20))
    recoveries = [(c, n, s, d) for c in COLUMNS for n in (0.02, 0.05) for s in args.seeds for d in (0, 1)]
    recoveries += [("balanced", n, s, d) for n in levels for s in recovery_seeds for d in (0, 1)]
    with ProcessPoolExecutor(args.jobs) as pool:
        scored = list(pool.map(bench, jobs))
        recovered = list(pool.map(recover, recoveries, chunksize=20))
    scores = {name: {seed: by for n, seed, by in scored if n == name} for name in names}

    def table(field: str, delay: int, over: Any) -> dict[str, dict[str, Any]]:
        columns = scores[names[0]][args.seeds[0]][0].keys()
        return {
            name: {c: over([getattr(by[delay][c], field) for by in scores[name].values()]) for c in columns}
            for name in names
        }  # fmt: skip

    def worst(field: str, traces: Iterable[str]) -> dict[str, float]:
        """Over traces, seeds and both delays."""
        return {
            c: max(getattr(by[delay][c], field) for name in traces for by in scores[name].values() for delay in (0, 1))
            for c in COLUMNS
        }

    mean = lambda values: float(np.mean(values))
    percentile = {
        str(noise): {
            f"delay{delay}": float(
                np.quantile([r for c, n, d, r in recovered if (c, n, d) == ("balanced", noise, delay)], 0.9)
            )
            for delay in (0, 1)
        }
        for noise in levels
    }
    return {
        "regret": table("regret", 1, mean),
        "regret_delay0": table("regret", 0, mean),
        "regret_from_second_step": table("from_second_step", 1, mean),
        "regret_spread": table("regret", 1, lambda values: [min(values), max(values)]),
        "regret_spread_delay0": table("regret", 0, lambda values: [min(values), max(values)]),
        "uninformed": {name: mean([by[1]["equal"].uninformed for by in scores[name].values()]) for name in names},
        "worst_step": table("worst_step", 1, max),
        "changes_to_settle": worst("settle", UP_TO_5_PERCENT),
        "changes_to_settle_by_trace": {name: worst("settle", [name]) for name in QUIET},
        "false_changes": worst("late_changes", ["noise5"]),
        "false_changes_by_trace": {name: worst("late_changes", [name]) for name in QUIET if args.steps(name) == 1200},
        "recovery_steps": {c: max(r for column, n, _, r in recovered if column == c and n <= 0.05) for c in COLUMNS},
        "recovery_steps_90th_percentile": percentile,
        "plan_ms": {str(workers): plan_milliseconds(workers) for workers in (10, 100, 1000, 10_000, 100_000)},
        "seeds": args.seeds,
    }


def percent(fraction: float) -> str:
    """A fraction in %, with three digits."""
    value = 100.0 * fraction
    return f"{value:.2f}" if abs(value) < 9.995 else f"{value:.1f}" if value < 99.95 else f"{value:.0f}"


def count_text(number: float) -> str:
    """A count; infinity means never."""
    return f"{number:.0f}" if number < np.inf else "never"


def finite(value: Any) -> Any:
    """The results with None, null in JSON, instead of infinity."""
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    return None if value == np.inf else value


def show(results: dict[str, Any], console: Console) -> None:
    """Print the tables."""
    for delay, key in ((1, "regret"), (0, "regret_delay0")):
        for kind, names in (("quiet", list(QUIET)[:6]), ("quiet", list(QUIET)[6:]), ("disturbed", list(DISTURBED))):
            table = Table(title=f"regret in %, delay {delay}, {kind} traces", box=None, padding=(0, 1))
            table.add_column("controller")
            for name in names:
                table.add_column(SHORT.get(name, name), justify="right")
            for column in ("oracle+1", *COLUMNS):
                cells = [percent(results[key][name][column]) for name in names]
                table.add_row(column, *cells, style="bold green" if column == "balanced" else None)
            console.print(table)
    table = Table(title="calm and quick (worst over seeds and delays)", box=None, padding=(0, 1))
    for title in ("controller", "changes to settle", "false changes", "steps to recover", "worst step"):
        table.add_column(title, justify="left" if title == "controller" else "right")
    for column in COLUMNS:
        worst_step = max(results["worst_step"][name][column] for name in results["worst_step"])
        numbers = [results[key][column] for key in ("changes_to_settle", "false_changes", "recovery_steps")]
        style = "bold green" if column == "balanced" else None
        table.add_row(column, *map(count_text, numbers), f"{worst_step:.1f}x", style=style)
    console.print(table)
    for noise, by in results["recovery_steps_90th_percentile"].items():
        steps = ", ".join(f"{delay} {count_text(steps)}" for delay, steps in by.items())
        console.print(f"balanced recovers at noise {noise}, 90th percentile of steps: {steps}")
    scale = ", ".join(f"{int(workers):,}: {ms:.2f}" for workers, ms in results["plan_ms"].items())
    console.print(f"balanced, milliseconds a step by workers: {scale}")


def verdict(results: dict[str, Any], console: Console) -> bool:
    """Check the expectations, print those that fail, and return whether all hold."""
    lines: list[tuple[bool, str]] = []
    for delay, key in ((1, "regret"), (0, "regret_delay0")):
        for name, row in results[key].items():
            others = {c: x for c, x in row.items() if c not in ("balanced", "oracle+1")}
            best = min(others, key=lambda c: others[c])
            limit = 0.01 if name in QUIET else 0.05
            ok = row["balanced"] <= others[best] + 0.005 and row["balanced"] <= limit
            text = f"{name}, delay {delay}: balanced {percent(row['balanced'])}%, {best} {percent(others[best])}%"
            lines.append((ok, f"{text}, limit {100 * limit:.0f}%"))
    settle, allowed = results["changes_to_settle_by_trace"], {"lag": 3, "noise15": 3, "noise20": 99}
    lines += [
        (s["balanced"] <= allowed.get(n, 2), f"{n}: settled in {count_text(s['balanced'])} changes")
        for n, s in settle.items()
    ]
    false = results["false_changes_by_trace"]
    lines += [(false["noise5"]["balanced"] == 0, f"false changes at 5%: {false['noise5']['balanced']}")]
    lines += [(false["noise15"]["balanced"] <= 2, f"false changes at 15%: {false['noise15']['balanced']}")]
    for noise in ("0.05", "0.1"):
        for delay, steps in results["recovery_steps_90th_percentile"][noise].items():
            lines.append((steps <= 5, f"recovery at noise {noise}, {delay}, 90th percentile: {steps:.0f} steps"))
    lines.append(
        (results["recovery_steps"]["balanced"] <= 5, f"recovery up to 5%: {results['recovery_steps']['balanced']}")
    )
    lines.append((results["plan_ms"]["10000"] < 20, f"10,000 workers: {results['plan_ms']['10000']:.1f} ms"))
    for ok, text in lines:
        if not ok:
            console.print(f"[red]falls short[/red] {text}")
    console.print(f"{sum(ok for ok, _ in lines)} of {len(lines)} lines hold")
    return all(ok for ok, _ in lines)


def draw(results: dict[str, Any], args: Args, path: Path) -> None:
    """Draw the regrets and the time lines of one trace."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names, columns = list(results["regret"]), ["oracle+1", *COLUMNS]
    regret_CxT = 100.0 * np.array([[results["regret"][name][c] for name in names] for c in columns])
    figure, (top, bottom) = plt.subplots(2, 1, figsize=(13, 12), height_ratios=[3, 2], layout="constrained")
    shown_CxT = np.log10(np.clip(regret_CxT, 0.1, 100.0))
    image = top.imshow(shown_CxT, cmap="RdYlGn_r", aspect="auto")
    top.set_xticks(range(len(names)), names, rotation=40, ha="right")
    top.set_yticks(range(len(columns)), columns)
    for (c, t), value in np.ndenumerate(regret_CxT):
        dark = not 0.15 < (shown_CxT[c, t] + 1.0) / 3.0 < 0.85
        top.text(t, c, percent(value / 100.0), ha="center", va="center", fontsize=7, color="white" if dark else "black")
    top.set_title("Regret over the oracle in %, delay 1")
    bar = figure.colorbar(image, ax=top, pad=0.01)
    bar.set_ticks([-1, 0, 1, 2], labels=["0.1", "1", "10", "100"])
    trace = (QUIET | DISTURBED)[args.timeline](600, args.seed_base)
    eps_TxW, best_T = trace.draw(args.seed_base), best_times(trace)[1]
    for column in ("static", "dbs", "dbs@5", "lbb", "balanced"):
        law, options = COLUMNS[column]
        ratio_T = simulate(make(law, **options), trace, eps_TxW, 1).mean_times_T / best_T
        bottom.plot(ratio_T, label=column, linewidth=2.2 if column == "balanced" else 1.2, alpha=0.9)
    bottom.set_ylim(0.98, 2.2)
    bottom.set_xlabel("step")
    bottom.set_ylabel("noise-free step time / oracle's")
    bottom.set_title(f"Time lines of the trace '{args.timeline}'")
    bottom.legend(ncols=5, frameon=False)
    bottom.grid(alpha=0.3)
    figure.savefig(path, dpi=110)


def main(args: Args) -> None:
    """Run the bench."""
    console = Console(width=80, highlight=False)
    start = time.perf_counter()
    results = collect(args)
    show(results, console)
    verdict(results, console)
    console.print(f"seeds {args.seeds}, {time.perf_counter() - start:.0f} s")
    if args.json:
        args.json.write_text(json.dumps(finite(results), indent=1))
    if args.figure:
        draw(results, args, args.figure)


if __name__ == "__main__":
    main(from_flags(Args))
