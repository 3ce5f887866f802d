"""A heterogeneous cluster on one machine: compare controllers on four processes under real CPU quotas.

    python experiments/bench_cluster.py [--json FILE] [--batch-size 4096] [--controllers balanced,equal] [--quick]

Each process computes on one thread, throttled to a fraction of a core by a control group. The
ideal is the sum of the workers' solo speeds: same engine, same quotas, all running at once, no reduce. The speed of a
shared machine changes by a third within seconds, so all controllers run in the same processes, in rounds: each runs
its share of the steps per round, in rotating order, and solo speeds are measured before and after each share. Then the
quotas are swapped during training, under one controller after another. Controllers with a period act every 5 steps;
NAME@K acts every K steps.

efficiency      samples/s / ideal (mean of the solo speeds before and after), mean over rounds ± standard error; without
                the first 10 steps and the first step of every further round
use             samples/s / sum of the workers' rates in their local times of the same steps: independent of the
                machine's current speed, but blind to how fast the workers could have been
lead            of balanced over each other controller: mean difference over rounds ± standard error
unrest          F statistic of drift in the workers' relative speeds: variance of their means over sevenths of the steps
                / variance expected from noise alone; about 1 if speeds are constant
imbalance       (max - min) / mean of the workers' mean local times
overhead        median of step time - slowest local time, and its share of the step time
noise ceiling   efficiency of the best FIXED split: mean over steps of mean / max worker time, for counts that equalize
                mean times, times (1 - overhead share); over the workers in use in each step
recovery_steps  steps after a swap of the fastest and slowest worker's quotas until one takes at most 15% longer than
                before: median over swaps; the number of steps between swaps if none does
against         with --against: percent by which a step takes longer than one of a second run with other settings, whose
                processes share the quotas and take turns; in units of the ideals around both, with the 95% interval
breakdown       with --breakdown: mean milliseconds outside the slowest local phase, by cause, in the slowest process of
                every step and in each process
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
from typing import Any

import numpy as np
from benches.breakdown import breakdown as breakdown_of
from benches.breakdown import table as table_of_causes
from benches.flags import JsonFile, Switch, Text, from_flags
from benches.torch_cluster import TorchCluster, TorchMissing, check_torch, figures_of_torch
from rich.console import Console
from rich.table import Table
from studies.wire_accuracy import interval

from hetjax import environment
from hetjax.fleet.rendezvous import free_port
from hetjax.launch import child
from hetjax.launch.quotas import CpuQuota, QuotasRefused, check_cores, remove_stale
from hetjax.planning.controllers import make
from hetjax.reduce.wire import FORMATS, WIRES

WORKER = Path(__file__).with_name("benches") / "cluster_worker.py"
PERIOD = 5  # steps between plans of controllers with a period
SKIP = 10  # first steps, in which controllers with a period find their shares
RECOVERED = 1.15  # step time over that before a swap


def _differences(text: str | None) -> dict[str, str]:
    """The settings of a second run; {} without one."""
    parts = [part.partition("=") for part in text.split(",")] if text else []
    found = {name: value for name, _, value in parts}
    if len(found) != len(parts) or not set(found) <= {"transport", "update", "wire"} or not all(found.values()):
        raise ValueError(f"--against is {text!r}: give transport=, update= or wire=, comma-separated, once each.")
    return found


class Cluster:
    """The processes of a run of hetjax in these control groups; they train until they give the turn to others.

    Args:
        settings: of the run.
        groups: a control group for each process.
        stack: kills the processes when it closes.
    """

    def __init__(self, settings: dict[str, Any], groups: Sequence[CpuQuota], stack: ExitStack):
        self.groups, self.processes, self.messages, self.waits = groups, [], [], False
        address = f"127.0.0.1:{free_port('127.0.0.1')}"
        start = [sys.executable, "-I", "-S", child.__file__, str(os.getpid())]
        command = [sys.executable, str(WORKER), json.dumps(settings)]
        for i, group in enumerate(groups):
            identity = {
                environment.COORDINATOR: address,
                environment.PROCESSES: str(len(groups)),
                environment.PROCESS: str(i),
                environment.TRANSPORT: settings["transport"],
            }
            process = subprocess.Popen(
                [*start, str(group.path / "cgroup.procs"), "-", *command],
                env={**os.environ, **identity, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE if i == 0 else subprocess.DEVNULL,
                text=True,
            )
            stack.callback(process.kill)
            self.processes.append(process)

    def run(self) -> bool:
        """Go on until the processes give their turn away; whether they did, and have not ended."""
        first = self.processes[0]
        assert first.stdout is not None
        if self.waits:
            self._answer()
        for line in first.stdout:
            if not line.startswith("{"):
                continue  # output of gloo
            message = json.loads(line)
            if "quotas" in message:
                for group, cores in zip(self.groups, message["quotas"] or [None] * len(self.groups), strict=True):
                    group.set(cores)
                self._answer()
            elif "turn" in message:
                self.waits = True
                return True
            else:
                self.messages.append(message)
        return False

    def check_end(self) -> None:
        """Raise RuntimeError if a process did not end well."""
        for i, process in enumerate(self.processes):
            if process.wait(timeout=60) != 0:
                raise RuntimeError(f"Process {i} of the cluster ended with exit code {process.returncode}.")

    def _answer(self) -> None:
        first = self.processes[0]
        assert first.stdin is not None
        first.stdin.write("done\n")
        first.stdin.flush()
        self.waits = False


def run_cluster(settings: dict[str, Any], limit: float) -> list[dict[str, Any]]:
    """Start the processes, set quotas when process 0 requests them, and collect its messages."""
    with ExitStack() as stack:
        remove_stale()
        groups = [stack.enter_context(CpuQuota(f"worker{i}")) for i in range(len(settings["quotas"]))]
        clusters: list[Cluster] = []

        def end() -> None:
            for process in (process for cluster in clusters for process in cluster.processes):
                process.kill()

        timer = threading.Timer(limit, end)
        timer.daemon = True
        timer.start()
        stack.callback(timer.cancel)
        messages: list[dict[str, Any]] = []
        other = torch = None
        if settings["torch"]:
            torch = stack.enter_context(TorchCluster(settings["torch"], settings, [group.path for group in groups]))
            messages.append({"torch_version": torch.version})
        if settings["against"]:
            clusters.append(
                other := Cluster(settings | settings["against"] | {"second": True, "swaps": 0}, groups, stack)
            )
            other.run()  # until it is compiled and waits for its turn
        clusters.append(cluster := Cluster(settings, groups, stack))
        while cluster.run():
            if other is not None:
                other.run()
            if torch is not None:
                messages.append({"torch": torch.turn()})
        while other is not None and other.run():
            pass
        for group in groups:
            group.set(None)
        if not timer.is_alive():
            raise TimeoutError(f"The cluster did not finish within {limit:.0f} s.")
        for each in clusters:
            each.check_end()
    return [*cluster.messages, *messages, *([] if other is None else [{"against": other.messages}])]


def joined(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Concatenate the rounds of one controller, without the first step of further rounds (it overlaps with nothing)."""
    first, *later = rounds
    by_step = ("counts", "times", "step_times")
    stretch = {key: [*first[key], *(x for run in later for x in run[key][1:])] for key in by_step}
    changed = [changed for run in rounds for changed in run["changed"]]
    if "phases" in first:  # by process
        runs_P = zip(*(run["phases"] for run in rounds), strict=True)
        stretch["phases"] = [[*of_first, *(x for run in of_later for x in run[1:])] for of_first, *of_later in runs_P]
    return stretch | {"changed": changed, "recompiles": sum(run["recompiles"] for run in rounds)}


def solo_speeds(messages: Sequence[dict[str, Any]]) -> tuple[np.ndarray, list[str], np.ndarray]:
    """Each measurement of the workers' own rates, the controllers between two of them, and the ideal of these parts."""
    solos = np.array([message["solo"] for message in messages if "solo" in message])
    parts = [message["controller"] for message in messages if "quiet" in message]
    return solos, parts, (solos[:-1] + solos[1:]).sum(axis=1) / 2


def efficiency_by_round(rounds: list[dict[str, Any]], batch: int, ideals: Sequence[float]) -> list[float]:
    """Rate of each round over the ideal measured around it."""
    found = []
    for k, (run, ideal) in enumerate(zip(rounds, ideals, strict=True)):
        steps = run["step_times"][1 if k else SKIP :]
        found.append(batch * len(steps) / sum(steps) / ideal)
    return found


def check_exchange(transport: str, update: str, wire: str, delay: int, breakdown: bool) -> None:
    """Refuse options before the cluster starts."""
    for name, value, known in (
        ("transport", transport, ("auto", "mesh", "host")),
        ("update", update, ("auto", "sharded", "replicated")),
        ("wire", wire, ("auto", *WIRES)),
        ("delay", delay, (0, 1)),
    ):
        if value not in known:
            raise ValueError(f"--{name} is {value!r}: give {', '.join(map(str, known[:-1]))} or {known[-1]}.")
    if (delay or wire in FORMATS) and (transport == "mesh" or update == "replicated"):
        raise ValueError("--wire and --delay need the transport host and the update sharded: leave these to auto.")
    if breakdown and delay:
        raise ValueError(
            "--breakdown says where the time outside the local phases goes, and with --delay 1 the exchange runs "
            "beside them: give one of the two."
        )


def pairs(messages: list[dict[str, Any]], by_round: dict[str, list[float]], batch: int) -> dict[str, list[float]]:
    """Percent by which a step takes longer than in the second run, in units of the ideals around both, by round."""
    _, parts, around = solo_speeds(messages)
    found = {}
    for name, first in by_round.items():
        rounds = [message["quiet"] for message in messages if message.get("controller") == name and "quiet" in message]
        second = efficiency_by_round(rounds, batch, around[[part == name for part in parts]])
        found[name] = [100 * (b / a - 1) for a, b in zip(first, second, strict=True)]
    return found


def use_by_round(rounds: list[dict[str, Any]]) -> list[float]:
    """Rate of each round over the sum of the workers' own rates in the same steps."""
    found = []
    for k, run in enumerate(rounds):
        steps, times, counts = (
            np.array(run[key], float)[1 if k else SKIP :] for key in ("step_times", "times", "counts")
        )
        at_work = (counts > 0) & ~np.isnan(times)  # a worker on the bench has no time
        timed, used = at_work.any(axis=1), at_work.any(axis=0)
        sums = [np.where(at_work, values, 0.0).sum(axis=0)[used] for values in (counts, times)]
        found.append(float(counts[timed].sum() / steps[timed].sum() / (sums[0] / sums[1]).sum()))
    return found


def mean_and_error(by_round: Sequence[float] | np.ndarray) -> tuple[float, float]:
    """Mean over rounds and its standard error; NaN for a single round."""
    error = np.std(by_round, ddof=1) / len(by_round) ** 0.5 if len(by_round) > 1 else np.nan
    return float(np.mean(by_round)), float(error)


def leads(by_round: dict[str, list[float]], first: str = "balanced") -> dict[str, tuple[float, float]]:
    """Mean lead of one controller over each other one in the same rounds, and its standard error."""
    others = [name for name in by_round if name != first] if first in by_round else []
    return {name: mean_and_error(np.subtract(by_round[first], by_round[name])) for name in others}


def figures(run: dict[str, Any], batch: int) -> dict[str, float]:
    """Summary of a sequence of steps, without the first `SKIP`."""
    times = np.array(run["times"], float)[SKIP:]
    steps = np.array(run["step_times"])[SKIP:]
    timed = ~np.isnan(times).all(axis=1)
    overhead = steps[timed] - np.nanmax(times[timed], axis=1)
    at_work = ~np.isnan(times) & (np.array(run["counts"])[SKIP:] > 0)
    used = at_work.any(axis=0)  # without those that were always on the bench
    by_all = at_work[:, used].all(axis=1)
    mean_W = np.nanmean(times[by_all if by_all.any() else timed][:, used], axis=0)
    return {
        "samples_per_s": batch * len(steps) / steps.sum(),
        "imbalance": float((mean_W.max() - mean_W.min()) / mean_W.mean()),
        "overhead_ms": 1e3 * float(np.median(overhead)),
        "overhead_share": float(np.median(overhead / steps[timed])),
        "changes": sum(run["changed"][SKIP:]),
        "recompiles": run["recompiles"],
    }


def noise_ceiling(run: dict[str, Any], overhead_share: float) -> float:
    """Efficiency of the best fixed split, from the seconds per sample of every worker in use in every step."""
    per_sample = _per_sample(run)
    fixed = per_sample / np.nanmean(per_sample, axis=0)  # a split that equalizes mean times
    return float((np.nanmean(fixed, axis=1) / np.nanmax(fixed, axis=1)).mean() * (1 - overhead_share))


def _per_sample(run: dict[str, Any]) -> np.ndarray:
    """Seconds per sample in the timed steps of all workers that were ever in use; NaN while one is on the bench."""
    times, counts = np.array(run["times"], float)[SKIP:], np.array(run["counts"], float)[SKIP:]
    per_sample = np.where(counts > 0, times / np.maximum(counts, 1), np.nan)
    in_use = ~np.isnan(per_sample)
    return per_sample[in_use.any(axis=1)][:, in_use.any(axis=0)]


def unrest(run: dict[str, Any]) -> float:
    """F statistic of the workers' log times per sample, relative to the mean of all workers."""
    per_sample = _per_sample(run)
    own = np.log(per_sample[~np.isnan(per_sample).any(axis=1)])
    blocks = np.array_split(own - own.mean(axis=1, keepdims=True), 7)
    if min(map(len, blocks)) < 2:
        return float("nan")
    between_W = np.var([block.mean(axis=0) for block in blocks], axis=0, ddof=1) * len(own) / len(blocks)
    return float((between_W / np.mean([block.var(axis=0, ddof=1) for block in blocks], axis=0)).mean())


def recovery(run: dict[str, Any], every: int, swaps: int) -> float:
    """Median over swaps of the steps until one is within 15% of those before."""
    steps, found = np.array(run["step_times"]), []
    for k in range(1, swaps + 1):
        at = every * k
        before, after = np.median(steps[at - 10 : at]), steps[at : at + every]
        recovered = np.flatnonzero(after <= RECOVERED * before)
        found.append(int(recovered[0]) if len(recovered) else every)
    return float(np.median(found))


def _parse_controller(name: str) -> tuple[str, str, dict[str, int]]:
    """Name in the table, kind and options: `dbs@7` acts every 7 steps; `dbs` every 5 and is called `dbs@5`."""
    kind, _, every = name.partition("@")
    default = {"every": PERIOD} if kind in ("dp", "edp", "dbs", "proportional") else {}
    options = {"every": int(every)} if every else default
    make(kind, **options)
    return f"{kind}@{options['every']}" if options else kind, kind, options


def _cores(quotas: str) -> list[float]:
    """Parse and check --quotas."""
    try:
        cores = [float(part) for part in quotas.split(",")]
    except ValueError:
        cores = []
    if len(cores) < 2:
        raise ValueError(f"--quotas is {quotas!r}: expected the cores of two processes or more, such as 0.8,0.4.")
    for each in cores:
        check_cores(each)
    return cores


def finite(value: Any) -> Any:
    """JSON values with null for numbers that are not finite, which JSON lacks."""
    if isinstance(value, dict):
        return {name: finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and not np.isfinite(value) else value


def with_error(mean: float, error: float, sign: str = "") -> str:
    return f"{mean:{sign}.3f}" + (f" ±{error:.3f}" if np.isfinite(error) else "")


def table_of(by_name: dict[str, dict[str, Any]], by_round: dict[str, list[float]]) -> Table:
    """One row per controller, at most 80 columns wide."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for column in ("controller", "samples/s", "efficiency", "imbalance", "overhead", "changes", "recovery"):
        table.add_column(column, justify="left" if column == "controller" else "right", no_wrap=True)
    for name, row in by_name.items():
        table.add_row(
            name,
            f"{row['samples_per_s']:,.0f}",
            with_error(*mean_and_error(by_round[name])),
            f"{row['imbalance']:.3f}",
            f"{row['overhead_ms']:.0f} ms {100 * row['overhead_share']:.0f}%",
            str(row["changes"]),
            str(row.get("recovery_steps", "-")),
        )
    return table


def main(
    json_file: JsonFile = None,
    controllers: str = "equal,static,dbs,proportional,balanced",
    quotas: str = "0.8,0.4,0.2,0.2",
    batch_size: int = 1024,
    steps: int = 210,
    rounds: int = 7,
    hidden: int = 0,
    transport: str = "auto",
    update: str = "auto",
    swaps: int = 5,
    swap_every: int = 30,
    no_bench: Switch = False,
    breakdown: Switch = False,
    with_torch: Switch = False,
    torch_python: str = sys.executable,
    wire: str = "float32",
    delay: int = 0,
    against: Text = None,
    quick: Switch = False,
) -> int:
    """Compare controllers on processes under real CPU quotas.

    Args:
        json_file: write the results to this file (--json FILE).
        controllers: comma-separated; NAME@K acts every K steps.
        quotas: cores of each process, comma-separated.
        batch_size: samples per step over all workers.
        steps: number of steps of each controller under constant quotas.
        rounds: number of rounds to split these steps into, with all controllers in each; reduced for few steps.
        hidden: width of a hidden layer; 0: none, 20 thousand parameters; 3168: 5 million; 15800: 25 million.
        transport: how sums travel: mesh, host or auto.
        update: sharded, replicated or auto.
        swaps: number of swaps of the fastest and slowest worker's quotas.
        swap_every: steps between swaps.
        no_bench: let every process compute in every step, as the ideal does; `balanced` may bench one otherwise.
        breakdown: also print where the time outside the slowest local phase goes.
        with_torch: in turn with the same model in PyTorch (benches/torch_worker.py); each round has all of its modes.
            Needs `pip install -e ".[bench]"`.
        torch_python: another interpreter, that has torch.
        wire: numbers between processes: float32, bfloat16, int8 or auto.
        delay: steps by which updates are late, 0 or 1.
        against: in turn with a second run, whose settings differ: transport=mesh, update=replicated, comma-separated.
        quick: equal and balanced only, few steps, one swap: a smoke test.
    """
    console = Console()
    names = [part.strip() for part in controllers.split(",")]
    if quick:
        names, steps, rounds, swaps = ["equal", "balanced"], 30, 1, 1
    try:
        chosen = [_parse_controller(name) for name in names]
        settings = {"controllers": chosen, "quotas": _cores(quotas)}
        settings["against"] = _differences(against)
        first = {"transport": transport, "update": update, "wire": wire, "delay": delay, "breakdown": breakdown}
        check_exchange(**first)
        check_exchange(**{**first, **settings["against"]})
        names = [name for name, *_ in chosen]
        if steps < SKIP + 2 or rounds < 1:
            raise ValueError(f"{steps} steps in {rounds} rounds: give {SKIP + 2} steps or more, in 1 round or more.")
        if swaps and swap_every < SKIP:
            raise ValueError(
                f"--swap-every is {swap_every}: give {SKIP} steps or more; recovery is relative to those before a swap."
            )
    except ValueError as error:
        console.print(f"error: {error}", highlight=False, markup=False, soft_wrap=True)
        return 2
    rounds = min(rounds, steps // (SKIP + 2))
    settings |= {
        "batch_size": batch_size,
        "steps": steps // rounds * rounds,
        "rounds": rounds,
        "hidden": hidden,
        "transport": transport,
        "update": update,
        "swaps": swaps,
        "swap_every": swap_every,
        "breakdown": breakdown,
        "torch": torch_python if with_torch else None,
        "second": False,
        "no_bench": no_bench,
        "wire": wire,
        "delay": delay,
        "solo_s": 1.0 if quick else 2.0,
    }
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that control groups are removed on exit
    try:
        if with_torch:
            check_torch(torch_python)
        messages = run_cluster(settings, limit=3600)
    except (QuotasRefused, TorchMissing) as refused:
        console.print(f"error: {refused}", highlight=False, markup=False, soft_wrap=True)
        return 2
    solos, parts, around = solo_speeds(messages)
    ideal = float(solos.sum(axis=1).mean())
    by_name: dict[str, dict[str, Any]] = {}
    by_round: dict[str, list[float]] = {}
    used: dict[str, list[float]] = {}
    for name in names:
        mine = [message for message in messages if message.get("controller") == name]
        in_rounds = [message["quiet"] for message in mine if "quiet" in message]
        quiet = joined(in_rounds)
        by_round[name] = efficiency_by_round(in_rounds, batch_size, around[[part == name for part in parts]])
        used[name] = use_by_round(in_rounds)
        means = {"efficiency": float(np.mean(by_round[name])), "use": float(np.mean(used[name]))}
        by_name[name] = figures(quiet, batch_size) | means
        if breakdown:
            by_name[name]["breakdown"] = breakdown_of(quiet, SKIP)
        if name == "balanced":
            ceiling, moved = noise_ceiling(quiet, by_name[name]["overhead_share"]), unrest(quiet)
        if swaps:
            by_name[name]["recovery_steps"] = recovery(mine[-1]["swapped"], swap_every, swaps)
    about = next(message for message in messages if "parameters" in message)
    spread = 100 * np.ptp(solos.sum(axis=1)) / ideal
    console.print(
        f"{about['parameters']:,} parameters, B = {batch_size}, quotas {quotas}\n"
        f"microseconds per row of each chunk size: {about['us_per_row']}\n"
        f"ideal {ideal:,.0f} samples/s (solo {np.round(solos.mean(axis=0))}; {len(solos)} measurements, range "
        f"{spread:.0f}%)",
        highlight=False,
    )
    console.print(table_of(by_name, by_round))
    turns = [message["torch"] for message in messages if "torch" in message]
    in_torch = figures_of_torch(turns, batch_size) if turns else {}
    for mode, row in in_torch.items():
        outside = "" if row["overhead_ms"] is None else f", {row['overhead_ms']:.0f} ms outside the slowest phase"
        console.print(
            f"PyTorch {mode}: {row['samples_per_s']:,.0f} samples/s, efficiency "
            f"{with_error(*mean_and_error(row['efficiency_by_round']))} of {row['ideal']:,.0f}{outside}",
            highlight=False,
        )
    for name, row in by_name.items() if breakdown else ():
        console.print(f"{name}:", highlight=False)
        console.print(table_of_causes(row["breakdown"]))
    results: dict[str, Any] = {"ideal_samples_per_s": ideal}
    for key in ("samples_per_s", "efficiency", "use", "imbalance", "overhead_share", "overhead_ms", "changes",
                "recompiles"):  # fmt: skip
        results[key] = {name: row[key] for name, row in by_name.items()}
    if in_torch:
        results["torch"] = in_torch
    for message in messages:
        for name, ratios in pairs(message["against"], by_round, batch_size).items() if "against" in message else ():
            mean, half = interval(ratios)
            console.print(
                f"{name}: steps take {mean:+.1f}% ± {half:.1f} longer than with {against} (95%, {len(ratios)} pairs)",
                highlight=False,
            )
            results.setdefault("against", {})[name] = {"settings": against, "percent": ratios, "mean": mean}
    if breakdown:
        results["breakdown"] = {name: row["breakdown"] for name, row in by_name.items()}
    results["recovery_steps"] = {name: row.get("recovery_steps") for name, row in by_name.items()}
    if "balanced" in by_name:
        console.print(f"noise ceiling of a fixed split {ceiling:.3f}, unrest {moved:.1f}", highlight=False)
        results |= {"noise_ceiling": ceiling, "unrest": moved}
        for key, measure in (("lead", by_round), ("lead_in_use", used)):
            ahead = leads(measure)
            text = ", ".join(f"{name} {with_error(*lead, sign='+')}" for name, lead in ahead.items())
            console.print(f"{key.replace('_', ' ')} of balanced: {text or '-'}", highlight=False)
            results[key] = {name: lead[0] for name, lead in ahead.items()}
            results[f"{key}_error"] = {name: lead[1] for name, lead in ahead.items()}
    if json_file is not None:
        details = {
            "solo_samples_per_s": solos.tolist(),
            "efficiency_by_round": by_round,
            "use_by_round": used,
            **about,
            **settings,
        }
        written = finite({**results, "details": details, "messages": messages})
        json_file.write_text(json.dumps(written, indent=1, allow_nan=False) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(from_flags(main))
