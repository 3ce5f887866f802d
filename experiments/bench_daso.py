"""DASO and all-reduce on nodes behind slow links: times and accuracy.

    python experiments/bench_daso.py [--json FILE] [--links 25,100,400,1000] [--nodes 2] [--seeds 3] [--quick]

Every node is a process on its own core, in its own network namespace, with the bandwidth between nodes limited by
`tc ... tbf` (needs root). Without root the link is simulated by delaying exchanges, and its name says so. The model has
1,068,810 parameters and is trained by SGD with momentum, the only optimizer of the paper; a node has two workers.
Methods:

    allreduce        gradients summed over all nodes in every step, in 32 bits: the paper's control
    allreduce-16     the same in 16 bits: the control for methods that send 16 bits
    wire-16, wire-8  hetjax's exchange in every step, gradients and parameters in 16 or 8 bits, with error feedback
    wire-auto        the same in the format that is quickest when the run starts; "wire" in its runs says which
    delay, wire-16-delay, wire-8-delay    the same, and updates late by one step; behind real links only
    daso             the defaults, in 16 bits; daso-32: in 32; daso-paper: as published, 32 bits while cycling
    local-sgd        the same number and size of exchanges as daso, but nodes block on each of them; local-sgd-32
    ...-unequal      the last node has half a core: samples in proportion to speed;
                     daso-unequal-steps: steps in proportion; daso-unequal-equal: neither

epoch_s           median seconds per epoch; for daso and local-sgd of the cycling phase
run_s             the whole run, warm-up and cool-down included
time_to_target_s  training time until the test loss after an epoch is at or below --target
accuracy          on test data, at the end
exchanges, bytes  of one node in the whole run; bytes as sent over a ring, to check that local-sgd sends as much as daso

All are means over seeds. Evaluation takes place after the run and is not part of its time.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from benches.flags import JsonFile, Switch, from_flags
from benches.links import Links, LinksRefused
from rich import box
from rich.console import Console
from rich.table import Table

from hetjax import environment
from hetjax.fleet.rendezvous import free_port
from hetjax.launch import child
from hetjax.launch.quotas import CpuQuota, QuotasRefused, remove_stale

NODE = Path(__file__).with_name("benches") / "daso_node.py"
FASHION = Path("/usr/share/datasets/fashion-mnist")
PARAMETERS = 1_068_810
SLOW = 0.5  # cores of the last node, if nodes are unequal
WORTH = 0.1  # share of an epoch's time to be saved: less is no advantage
_MBIT = re.compile(r"([\d.e+]+) Mbit/s( \(simulated\))?")

METHODS: dict[str, tuple[str, dict[str, Any], bool]] = {  # sync, its options, unequal nodes
    "allreduce": ("allreduce", {}, False),
    "allreduce-16": ("allreduce-16", {}, False),
    "wire-16": ("allreduce", {"wire": "bfloat16"}, False),
    "wire-8": ("allreduce", {"wire": "int8"}, False),
    "wire-auto": ("allreduce", {"wire": "auto"}, False),
    "delay": ("allreduce", {"delay": 1}, False),
    "wire-16-delay": ("allreduce", {"wire": "bfloat16", "delay": 1}, False),
    "wire-8-delay": ("allreduce", {"wire": "int8", "delay": 1}, False),
    "daso": ("daso", {}, False),
    "daso-32": ("daso", {"wire": "full"}, False),
    "daso-paper": ("daso", {"faithful": True}, False),
    "local-sgd": ("daso", {"overlap": False}, False),
    "local-sgd-32": ("daso", {"overlap": False, "wire": "full"}, False),
    "allreduce-unequal": ("allreduce", {}, True),
    "daso-unequal": ("daso", {}, True),
    "daso-unequal-steps": ("daso", {"between": "steps"}, True),
    "daso-unequal-equal": ("daso", {"between": "equal"}, True),
}


@dataclass(frozen=True)
class Options:
    """The command line."""

    json: JsonFile = None
    """write results to this file; results of other links and methods in it are kept"""
    links: str = "25,100,400,1000"
    """bandwidths in Mbit/s, comma-separated; 0: unlimited"""
    methods: str = "allreduce,allreduce-16,daso,local-sgd,daso-paper,daso-unequal,allreduce-unequal"
    """methods of the list above, comma-separated, or all"""
    nodes: int = 2
    """number of processes, 2 to 4"""
    seeds: int = 3
    """runs per method"""
    epochs: int = 8
    samples: int = 12_288
    batch: int = 1024
    rate: float = 0.05
    """learning rate of SGD with momentum 0.9"""
    target: float = 0.55
    """test loss for time_to_target_s"""
    limit: float = 900.0
    """time limit of one run in seconds"""
    quick: Switch = False
    """one link, one seed, few steps: a check that it runs"""


class Cluster:
    """Where nodes run: behind real links, or side by side with a simulated link (links=None)."""

    def __init__(self, nodes: int, links: Links | None):
        self.nodes, self.links = nodes, links
        self.coordinator = f"127.0.0.1:{free_port('127.0.0.1')}" if links is None else f"{links.address(0)}:29500"

    def command_prefix(self, node: int) -> list[str]:
        """Arguments to put before a command to run it on this node."""
        return [] if self.links is None else self.links.command_prefix(node)

    def limit(self, mbit: float) -> float | None:
        """Set the bandwidth; returns the bits per second that the nodes have to simulate, None for none."""
        if self.links is None:
            return mbit * 1e6 if mbit else None
        self.links.limit(mbit or None)
        return None

    def link_name(self, mbit: float) -> str:
        """The name of a link in the results."""
        name = f"{mbit:g} Mbit/s" if mbit else "no limit"
        return name if self.links is not None or not mbit else f"{name} (simulated)"


@contextmanager
def open_cluster(nodes: int, console: Console) -> Iterator[Cluster]:
    """A cluster behind real links if possible, otherwise with simulated ones."""
    with ExitStack() as stack:
        try:
            links = stack.enter_context(Links(nodes))
        except LinksRefused as refused:
            console.print(f"Links are simulated: {refused}", highlight=False)
            links = None
        yield Cluster(nodes, links)


def run_once(spec: dict[str, Any], cluster: Cluster, unequal: bool, limit: float) -> dict[str, Any]:
    """Run all nodes to the end and return the result of node 0. No process is left, whatever happens.

    Args:
        spec: the JSON argument of the node program.
        cluster: where to run.
        unequal: give the last node half a core.
        limit: seconds for the run.

    Raises:
        RuntimeError: If a node fails or exceeds the limit; with its last output.
        QuotasRefused: If `unequal` and CPU quotas are not available.
    """
    cores = sorted(os.sched_getaffinity(0))
    with ExitStack() as stack:
        groups = ["-"] * cluster.nodes
        if unequal:
            remove_stale()
            quota = stack.enter_context(CpuQuota("slow"))
            quota.set(SLOW)
            groups[-1] = str(quota.path / "cgroup.procs")
        processes = []
        for j, group in enumerate(groups):
            launcher = [sys.executable, "-I", "-S", child.__file__, str(os.getpid()), group, str(cores[j % len(cores)])]
            fleet = {environment.COORDINATOR: cluster.coordinator, environment.PROCESSES: str(cluster.nodes)}
            devices = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2"}
            process = subprocess.Popen(
                [*launcher, *cluster.command_prefix(j), sys.executable, str(NODE), json.dumps(spec)],
                env={**os.environ, **fleet, environment.PROCESS: str(j), **devices},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            stack.callback(_end, process)
            processes.append(process)
        return _result(processes, limit)


def _result(processes: list[subprocess.Popen[str]], limit: float) -> dict[str, Any]:
    """Wait for all nodes; the result that node 0 prints."""
    output: list[list[str]] = [[] for _ in processes]
    readers = [
        threading.Thread(target=lambda p=p, lines=lines: lines.extend(p.stdout), daemon=True)
        for p, lines in zip(processes, output, strict=True)
    ]
    for reader in readers:
        reader.start()
    deadline = time.monotonic() + limit
    while any(process.poll() is None for process in processes):
        if any(process.poll() for process in processes) or time.monotonic() > deadline:
            break
        time.sleep(0.05)
    failed = [j for j, process in enumerate(processes) if process.poll()] or [
        j for j, process in enumerate(processes) if process.poll() is None
    ]
    for j in failed:
        code = processes[j].poll()
        _end(processes[j])
        readers[j].join(5)
        cause = f"did not end within {limit:.0f} s" if code is None else f"ended with code {code}"
        raise RuntimeError(f"Node {j} {cause}. Its last output:\n{''.join(output[j][-15:])}")
    for reader in readers:
        reader.join(5)
    return json.loads(next(line for line in output[0] if line.startswith("result ")).removeprefix("result "))


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()


def figures(result: dict[str, Any], target: float) -> dict[str, Any]:
    """The figures of one run, as described above."""
    epochs = result["epochs"]
    cycling = [epoch for epoch in epochs if not epoch["blocking"]] or epochs
    reached = [epoch["until"] for epoch in epochs if epoch["loss"] <= target]
    stale = [record for record in result["journal"] if record["received"] > record["sent"]]
    return {
        "epoch_s": float(np.median([epoch["seconds"] for epoch in cycling])),
        "run_s": epochs[-1]["until"],
        "time_to_target_s": reached[0] if reached else None,
        "accuracy": epochs[-1]["accuracy"],
        "loss": epochs[-1]["loss"],
        "exchange_s": float(np.median([record["seconds"] for record in stale])) if stale else None,
        "waited_s": float(np.median([record["waited"] for record in stale])) if stale else None,
        "exchanges": float(result["exchanges"]),
        "bytes": float(result["bytes"]),
        **({"wire": result["wire"]} if "wire" in result else {}),
        "curve": [[round(epoch[name], 4) for name in ("until", "loss", "accuracy")] for epoch in epochs],
    }


def over_seeds(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Means over runs; time_to_target_s is None if a run did not reach the target."""
    names = [name for name in runs[0] if all(isinstance(run[name], float) for run in runs)]
    means: dict[str, Any] = {name: round(float(np.mean([run[name] for run in runs])), 4) for name in names}
    times = [run["time_to_target_s"] for run in runs]
    means["time_to_target_s"] = None if None in times else round(float(np.mean(times)), 4)
    return means | {"seeds": len(runs), "runs": runs}


def floor(mbit: float, parameters: int, steps: int, nodes: int, bits: int) -> float:
    """Seconds an epoch's exchanges take at least on a link: a node sends and receives its share of sums and results."""
    return steps * 2 * (nodes - 1) / nodes * parameters * bits / (mbit * 1e6) if mbit else 0.0


def show(results: dict[str, Any], console: Console) -> None:
    """Print a table per link, at most 80 columns wide; a dash for what was not measured."""
    number = lambda value, digits=2: "-" if value is None else f"{value:.{digits}f}"
    for link, methods in results.items():
        table = Table(
            title=f"{link}: seconds, MB sent; less: time saved against all-reduce",
            box=box.SIMPLE_HEAD,
            padding=(0, 1, 0, 0),
            pad_edge=False,
        )
        for column in ("method", "epoch", "less", "run", "target", "acc.", "exch.", "wait", "MB"):
            table.add_column(column, justify="left" if column == "method" else "right", no_wrap=True)
        for method, means in methods.items():
            baseline = methods.get("allreduce-unequal" if "unequal" in method else "allreduce")
            less = "-" if baseline is None else f"{100 * _saved(means, baseline):.0f}%"
            run, target, exchange, waited = (
                number(means.get(name)) for name in ("run_s", "time_to_target_s", "exchange_s", "waited_s")
            )
            accuracy = number(means["accuracy"], 4)
            size = "-" if "bytes" not in means else number(means["bytes"] / 1e6, 0)
            table.add_row(method, number(means["epoch_s"]), less, run, target, accuracy, exchange, waited, size)
        console.print(table)


def _saved(means: dict[str, Any], baseline: dict[str, Any]) -> float:
    """The share of the baseline's epoch time that a method saves."""
    return 1 - means["epoch_s"] / baseline["epoch_s"]


def break_even(results: dict[str, Any]) -> list[str]:
    """The bandwidth up to which epochs of daso are 10% shorter than those of all-reduce: a sentence for real links and
    one for simulated ones, if several of the kind were measured."""
    sentences = []
    for kind in ("", " (simulated)"):
        saved = {}
        for link, methods in results.items():
            found = _MBIT.fullmatch(link)
            if found is not None and (found[2] or "") == kind and {"allreduce", "daso"} <= set(methods):
                saved[float(found[1])] = _saved(methods["daso"], methods["allreduce"])
        if len(saved) > 1:
            sentences.append(_break_even_sentence(saved, kind))
    return sentences


def _break_even_sentence(saved: dict[float, float], kind: str) -> str:
    """saved: the share of an epoch's time that daso saves, by Mbit/s."""
    links = sorted(saved)
    describe = lambda mbit: f"{mbit:g} Mbit/s{kind} ({100 * saved[mbit]:.0f}% less)"
    worth = [mbit for mbit in links if saved[mbit] >= WORTH]
    if not worth:
        return f"No link was slow enough for daso to make epochs 10% shorter: {describe(links[0])}."
    if worth[-1] == links[-1]:
        return f"Epochs of daso are at least 10% shorter than those of all-reduce up to {describe(links[-1])}."
    last, beyond = worth[-1], links[links.index(worth[-1]) + 1]
    part = (saved[last] - WORTH) / (saved[last] - saved[beyond])
    return (
        "The advantage of daso over all-reduce, epochs at least 10% shorter, ends at about "
        f"{float(f'{last * (beyond / last) ** part:.2g}'):g} Mbit/s, between {describe(last)} and {describe(beyond)}."
    )


def main(args: Options) -> int:
    """Run all methods on all links; the exit code."""
    console = Console()
    if args.quick:
        small = {"links": "100", "seeds": 1, "epochs": 3, "samples": 1024, "batch": 256}
        args = replace(args, **small)
    dataset = f"idx:{FASHION}" if FASHION.is_dir() else "synthetic"
    names = list(METHODS) if args.methods == "all" else args.methods.split(",")
    unknown = [name for name in names if name not in METHODS]
    if unknown or not 2 <= args.nodes <= 4:
        console.print(f"error: Methods are {', '.join(METHODS)}; nodes 2 to 4. Got {unknown or args.nodes}.")
        return 2
    results = json.loads(args.json.read_text()) if args.json is not None and args.json.exists() else {}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that links and quotas are removed
    with open_cluster(args.nodes, console) as cluster:
        for mbit in (float(part) for part in args.links.split(",")):
            link, link_name = cluster.limit(mbit), cluster.link_name(mbit)
            methods = results.setdefault(link_name, {})
            for name in names:
                sync, options, unequal = METHODS[name]
                if link is not None and {"wire", "delay"} & set(options) and sync == "allreduce":
                    console.print(f"{name} is skipped: it takes real links", highlight=False)
                    continue
                spec = {"sync": sync, "options": options, "link": link, "dataset": dataset, "tested": 10_000}
                spec |= {field: getattr(args, field) for field in ("epochs", "samples", "batch", "rate")}
                try:
                    runs = [
                        figures(run_once(spec | {"seed": seed}, cluster, unequal, args.limit), args.target)
                        for seed in range(args.seeds)
                    ]
                except QuotasRefused as refused:
                    console.print(f"{name} is skipped: {refused}", highlight=False)
                    continue
                methods[name] = over_seeds(runs)
                console.print(f"{link_name}, {name}: {methods[name]['epoch_s']:.2f} s per epoch", highlight=False)
                if args.json is not None:
                    args.json.write_text(json.dumps(results, indent=1))
    show(results, console)
    steps = -(-args.samples // args.batch)
    for mbit in (float(part) for part in args.links.split(",") if float(part)):
        least = [f"{floor(mbit, PARAMETERS, steps, args.nodes, bits):.2f} s in {bits} bits" for bits in (32, 16, 8)]
        console.print(f"{mbit:g} Mbit/s: at least {', '.join(least)} an epoch, for an exchange in every step")
    for sentence in break_even(results):
        console.print(sentence, highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(main(from_flags(Options, description=str(__doc__).partition("\n")[0])))
