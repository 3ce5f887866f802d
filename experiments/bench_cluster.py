"""A real heterogeneous cluster on one machine: four processes under CPU quotas, the controllers in turn.

    python experiments/bench_cluster.py [--json FILE] [--batch-size 4096] [--controllers balanced,equal] [--quick]

Every process computes on one thread and is throttled to its quota of a core by a control group; gradients are summed
by gloo. The ideal is the sum of the workers' solo speeds: the same engine under the same quotas, all running at once,
no reduce. All comes from one run of the same processes, in rounds, as the machine itself changes its speed, on a
shared one by a third within seconds: every controller goes on for its part of the steps in each, another one first, and
the solo speeds are measured before and after every part. Then the quotas are swapped, under one controller after the
other. The laws that act seldom do so every 5 steps, and are called by their plain name; NAME@K acts every K steps.

efficiency      samples/s / ideal, from the eleventh step on, the first one of every further round left out: the mean
                over the rounds, each over the solo speeds measured before and after it; ± its standard error
use             samples/s / what the workers did in their local times of the same steps, so that it does not matter how
                fast the machine was just then; nor, though, how fast the workers could have been
lead            of balanced over the others: the mean difference over the rounds; ± its standard error
unrest          of the workers' speeds against each other, whatever the controller: the variance of their means over
                sevenths of the steps, divided by what noise alone would give; about 1 in a quiet stretch
imbalance       (max - min) / mean of the workers' mean local times
overhead        median of step time - slowest local time; its share of the step time
noise ceiling   what the best FIXED split could reach: mean over steps of mean / max worker time, for the counts that
                equal the workers' mean times, times the share that the overhead leaves
recovery_steps  steps that took over 15% more than before, after the quotas of the fastest and slowest worker were
                swapped: median over the swaps; `steps of a swap stretch` where it never came back
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from hetjax import environment
from hetjax.fleet.rendezvous import free_port
from hetjax.launch import child
from hetjax.launch.quotas import CpuQuota, QuotasRefused, check_cores, remove_stale
from hetjax.planning.controllers import make

WORKER = Path(__file__).with_name("benches") / "cluster_worker.py"
SELDOM = 5
SKIP = 10  # steps in which controllers that act seldom find their shares
BACK = 1.15


def run_cluster(orders: dict[str, Any], limit: float) -> list[dict[str, Any]]:
    """Start the processes, set quotas when process 0 asks, and collect what it tells."""
    quotas, heard = orders["quotas"], []
    address = f"127.0.0.1:{free_port('127.0.0.1')}"
    with ExitStack() as stack:
        remove_stale()
        groups = [stack.enter_context(CpuQuota(f"worker{i}")) for i in range(len(quotas))]
        start = [sys.executable, "-I", "-S", child.__file__, str(os.getpid())]
        command = [sys.executable, str(WORKER), json.dumps(orders)]
        processes = []
        for i, group in enumerate(groups):
            who = {
                environment.COORDINATOR: address,
                environment.PROCESSES: str(len(quotas)),
                environment.PROCESS: str(i),
            }
            process = subprocess.Popen(
                [*start, str(group.path / "cgroup.procs"), "-", *command],
                env={**os.environ, **who, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE if i == 0 else subprocess.DEVNULL,
                text=True,
            )
            stack.callback(process.kill)
            processes.append(process)
        first, late = processes[0], threading.Timer(limit, lambda: [process.kill() for process in processes])
        late.daemon = True
        late.start()
        stack.callback(late.cancel)
        assert first.stdin is not None
        assert first.stdout is not None
        for line in first.stdout:
            if not line.startswith("{"):
                continue  # gloo greets its peers
            message = json.loads(line)
            if "quotas" in message:
                for group, cores in zip(groups, message["quotas"] or [None] * len(groups), strict=True):
                    group.set(cores)
                first.stdin.write("done\n")
                first.stdin.flush()
            else:
                heard.append(message)
        for group in groups:
            group.set(None)
        if not late.is_alive():
            raise TimeoutError(f"The cluster did not finish within {limit:.0f} s.")
        for i, process in enumerate(processes):
            if process.wait(timeout=60) != 0:
                raise RuntimeError(f"Process {i} of the cluster ended with exit code {process.returncode}.")
    return heard


def joined(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """The rounds of one controller as one stretch; nothing overlaps with the first step of a round."""
    first, *later = rounds
    by_step = ("counts", "times", "step_times")
    stretch = {key: [*first[key], *(x for seen in later for x in seen[key][1:])] for key in by_step}
    changed = [changed for seen in rounds for changed in seen["changed"]]
    return stretch | {"changed": changed, "recompiles": sum(seen["recompiles"] for seen in rounds)}


def efficiency_by_round(rounds: list[dict[str, Any]], batch: int, ideals: Sequence[float]) -> list[float]:
    """Each round's rate over the ideal around it: what the machine's own changes leave."""
    found = []
    for k, (seen, ideal) in enumerate(zip(rounds, ideals, strict=True)):
        steps = seen["step_times"][1 if k else SKIP :]
        found.append(batch * len(steps) / sum(steps) / ideal)
    return found


def use_by_round(rounds: list[dict[str, Any]]) -> list[float]:
    """Each round's rate over the sum of the workers' own rates in the same steps."""
    found = []
    for k, seen in enumerate(rounds):
        steps, times, counts = (
            np.array(seen[key], float)[1 if k else SKIP :] for key in ("step_times", "times", "counts")
        )
        timed = ~np.isnan(times).any(axis=1)
        own = (counts[timed].sum(axis=0) / times[timed].sum(axis=0)).sum()
        found.append(float(counts[timed].sum() / steps[timed].sum() / own))
    return found


def mean_and_error(by_round: Sequence[float] | np.ndarray) -> tuple[float, float]:
    """The mean over the rounds and its standard error, which one round alone does not tell."""
    error = np.std(by_round, ddof=1) / len(by_round) ** 0.5 if len(by_round) > 1 else np.nan
    return float(np.mean(by_round)), float(error)


def leads(by_round: dict[str, list[float]], first: str = "balanced") -> dict[str, tuple[float, float]]:
    """How far one controller was ahead of each of the others in the same rounds."""
    others = [name for name in by_round if name != first] if first in by_round else []
    return {name: mean_and_error(np.subtract(by_round[first], by_round[name])) for name in others}


def figures(seen: dict[str, Any], batch: int) -> dict[str, float]:
    """What a stretch of steps came to, the first ones aside."""
    times = np.array(seen["times"], float)[SKIP:]
    steps = np.array(seen["step_times"])[SKIP:]
    timed = ~np.isnan(times).any(axis=1)
    overhead = steps[timed] - times[timed].max(axis=1)
    mean_W = times[timed].mean(axis=0)
    return {
        "samples_per_s": batch * len(steps) / steps.sum(),
        "imbalance": float((mean_W.max() - mean_W.min()) / mean_W.mean()),
        "overhead_ms": 1e3 * float(np.median(overhead)),
        "overhead_share": float(np.median(overhead / steps[timed])),
        "changes": sum(seen["changed"][SKIP:]),
        "recompiles": seen["recompiles"],
    }


def noise_ceiling(seen: dict[str, Any], overhead_share: float) -> float:
    """From the seconds per sample that every worker showed in every step."""
    times, counts = np.array(seen["times"], float)[SKIP:], np.array(seen["counts"], float)[SKIP:]
    per_sample = times[~np.isnan(times).any(axis=1)] / counts[~np.isnan(times).any(axis=1)]
    fixed = per_sample / per_sample.mean(axis=0)  # a split after which all need the same on average
    return float((fixed.mean(axis=1) / fixed.max(axis=1)).mean() * (1 - overhead_share))


def unrest(seen: dict[str, Any]) -> float:
    """F statistic of the workers' times per sample, in logarithms, each against the mean of all workers."""
    times, counts = np.array(seen["times"], float)[SKIP:], np.array(seen["counts"], float)[SKIP:]
    timed = ~np.isnan(times).any(axis=1)
    own = np.log(times[timed] / counts[timed])
    blocks = np.array_split(own - own.mean(axis=1, keepdims=True), 7)
    if min(map(len, blocks)) < 2:
        return float("nan")
    between_W = np.var([block.mean(axis=0) for block in blocks], axis=0, ddof=1) * len(own) / len(blocks)
    return float((between_W / np.mean([block.var(axis=0, ddof=1) for block in blocks], axis=0)).mean())


def recovery(seen: dict[str, Any], every: int, swaps: int) -> float:
    """Median over the swaps of the number of steps until one is back within 15% of those before."""
    steps, found = np.array(seen["step_times"]), []
    for k in range(1, swaps + 1):
        at = every * k
        before, after = np.median(steps[at - 10 : at]), steps[at : at + every]
        back = np.flatnonzero(after <= BACK * before)
        found.append(int(back[0]) if len(back) else every)
    return float(np.median(found))


def _made(name: str) -> tuple[str, dict[str, int]]:
    """The controller's name and options: `dbs@7` acts every 7 steps, `dbs` every 5."""
    kind, _, every = name.partition("@")
    seldom = {"every": SELDOM} if kind in ("dp", "edp", "dbs", "proportional") else {}
    options = {"every": int(every)} if every else seldom
    make(kind, **options)
    return kind, options


def _cores(quotas: str) -> list[float]:
    """The quotas of two processes or more."""
    try:
        cores = [float(part) for part in quotas.split(",")]
    except ValueError:
        cores = []
    if len(cores) < 2:
        raise ValueError(f"--quotas is {quotas!r}: expected cores of two processes or more, such as 0.8,0.4.")
    for each in cores:
        check_cores(each)
    return cores


def with_error(mean: float, error: float, sign: str = "") -> str:
    return f"{mean:{sign}.3f}" + (f" ±{error:.3f}" if np.isfinite(error) else "")


def table_of(by_name: dict[str, dict[str, Any]], by_round: dict[str, list[float]]) -> Table:
    """A row for each controller, within 80 columns."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for column in ("controller", "samples/s", "efficiency", "imbalance", "overhead", "changes", "recovery"):
        table.add_column(column, justify="left" if column == "controller" else "right", no_wrap=True)
    for name, seen in by_name.items():
        table.add_row(
            name,
            f"{seen['samples_per_s']:,.0f}",
            with_error(*mean_and_error(by_round[name])),
            f"{seen['imbalance']:.3f}",
            f"{seen['overhead_ms']:.0f} ms {100 * seen['overhead_share']:.0f}%",
            str(seen["changes"]),
            str(seen.get("recovery_steps", "-")),
        )
    return table


def main(
    json_file: Annotated[Path | None, tyro.conf.arg(name="json")] = None,
    controllers: str = "equal,static,dbs,proportional,balanced",
    quotas: str = "0.8,0.4,0.2,0.2",
    batch_size: int = 1024,
    steps: int = 210,
    rounds: int = 7,
    hidden: int = 0,
    swaps: int = 5,
    swap_every: int = 30,
    quick: bool = False,
) -> int:
    """Compare controllers on processes under real CPU quotas.

    Args:
        json_file: write the figures to this file (--json FILE).
        controllers: with commas between; NAME@K acts every K steps.
        quotas: cores of each process, with commas between.
        batch_size: samples per step over all workers.
        steps: of each controller while the quotas stay the same.
        rounds: in which these steps are made, all controllers taking turns in each; fewer where the steps are few.
        hidden: width of a hidden layer; 0: none, 20 thousand parameters; 3168: 5 million.
        swaps: how often the quotas of the fastest and the slowest worker are swapped; 0: never.
        swap_every: steps between swaps.
        quick: equal and balanced, few steps, one swap: does it work at all?
    """
    console = Console()
    names = [part.strip() for part in controllers.split(",")]
    if quick:
        names, steps, rounds, swaps = ["equal", "balanced"], 30, 1, 1
    try:
        orders = {"controllers": [[name, *_made(name)] for name in names], "quotas": _cores(quotas)}
        if steps < SKIP + 2 or rounds < 1:
            raise ValueError(f"{steps} steps in {rounds} rounds: give {SKIP + 2} steps or more, in 1 round or more.")
        if swaps and swap_every < SKIP:
            raise ValueError(f"--swap-every is {swap_every}: give {SKIP} steps or more, those before a swap count.")
    except ValueError as error:
        console.print(f"error: {error}", highlight=False, soft_wrap=True)
        return 2
    rounds = min(rounds, steps // (SKIP + 2))
    orders |= {
        "batch_size": batch_size,
        "steps": steps // rounds * rounds,
        "rounds": rounds,
        "hidden": hidden,
        "swaps": swaps,
        "swap_every": swap_every,
        "solo_s": 1.0 if quick else 2.0,
    }
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # control groups are removed on the way out
    try:
        heard = run_cluster(orders, limit=3600)
    except QuotasRefused as refused:
        console.print(f"error: {refused}", highlight=False, soft_wrap=True)
        return 2
    solos = np.array([message["solo"] for message in heard if "solo" in message])
    ideal = float(solos.sum(axis=1).mean())
    parts = [message["controller"] for message in heard if "quiet" in message]  # a solo before and after each
    around = (solos[:-1] + solos[1:]).sum(axis=1) / 2
    by_name: dict[str, dict[str, Any]] = {}
    by_round: dict[str, list[float]] = {}
    used: dict[str, list[float]] = {}
    for name in names:
        mine = [message for message in heard if message.get("controller") == name]
        in_rounds = [message["quiet"] for message in mine if "quiet" in message]
        quiet = joined(in_rounds)
        by_round[name] = efficiency_by_round(in_rounds, batch_size, around[[part == name for part in parts]])
        used[name] = use_by_round(in_rounds)
        means = {"efficiency": float(np.mean(by_round[name])), "use": float(np.mean(used[name]))}
        by_name[name] = figures(quiet, batch_size) | means
        if name == "balanced":
            ceiling, moved = noise_ceiling(quiet, by_name[name]["overhead_share"]), unrest(quiet)
        if swaps:
            by_name[name]["recovery_steps"] = recovery(mine[-1]["swapped"], swap_every, swaps)
    about = next(message for message in heard if "parameters" in message)
    spread = 100 * np.ptp(solos.sum(axis=1)) / ideal
    console.print(
        f"{about['parameters']:,} parameters, B = {batch_size}, quotas {quotas}\n"
        f"microseconds per row of each chunk size: {about['us_per_row']}\n"
        f"ideal {ideal:,.0f} samples/s (solo {np.round(solos.mean(axis=0))}; {len(solos)} measurements, range "
        f"{spread:.0f}%)",
        highlight=False,
    )
    console.print(table_of(by_name, by_round))
    results: dict[str, Any] = {"ideal_samples_per_s": ideal}
    for key in ("samples_per_s", "efficiency", "use", "imbalance", "overhead_share", "overhead_ms", "changes",
                "recompiles"):  # fmt: skip
        results[key] = {name: seen[key] for name, seen in by_name.items()}
    results["recovery_steps"] = {name: seen.get("recovery_steps") for name, seen in by_name.items()}
    if "balanced" in by_name:
        console.print(f"noise ceiling of a fixed split {ceiling:.3f}, unrest {moved:.1f}", highlight=False)
        results |= {"noise_ceiling": ceiling, "unrest": moved if np.isfinite(moved) else None}
        for key, measure in (("lead", by_round), ("lead_in_use", used)):
            ahead = leads(measure)
            told = ", ".join(f"{name} {with_error(*lead, sign='+')}" for name, lead in ahead.items())
            console.print(f"{key.replace('_', ' ')} of balanced: {told or '-'}", highlight=False)
            results[key] = {name: lead[0] for name, lead in ahead.items()}
            results[f"{key}_error"] = {name: lead[1] if rounds > 1 else None for name, lead in ahead.items()}
    if json_file is not None:
        details = {
            "solo_samples_per_s": solos.tolist(),
            "efficiency_by_round": by_round,
            "use_by_round": used,
            **about,
            **orders,
        }
        json_file.write_text(json.dumps({**results, "details": details, "told": heard}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(tyro.cli(main))
