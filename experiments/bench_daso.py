"""DASO beside all-reduce on nodes behind slow links: time per epoch, time to a target loss, accuracy.

    python experiments/bench_daso.py [--json FILE] [--links 25,100,400,1000] [--nodes 2] [--seeds 3] [--quick]

Every node is a process on a core of its own, in a network namespace of its own, with the bandwidth between them limited
by `tc ... tbf` (root); where that is not allowed, exchanges are held back as if over such a link, and the link's name
says so. The model has 1,068,810 parameters. Methods:

    allreduce        gradients summed over all nodes in every step
    daso             the defaults; daso-paper: with the paper's blend
    local-sgd        as many exchanges as daso, as large, but all nodes wait for each of them
    ...-unequal      the last node has half a core: samples in proportion to what nodes can do;
                     daso-unequal-steps: steps in proportion; daso-unequal-equal: neither

epoch_s           median seconds of an epoch; of daso and local-sgd those of the cycling phase
run_s             the whole run, warm-up and cool-down included
time_to_target_s  training time until the test loss after an epoch is at or below --target
accuracy          on test data, at the end
exchanges, bytes  of one node in the whole run; bytes as sent over a ring, so that local-sgd can be checked to send as
                  much as daso

All are means over seeds. The test data are looked at after the run, so that this takes none of the time.
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
from typing import Annotated, Any

import numpy as np
import tyro
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
SLOW = 0.5  # cores of the last node, where nodes are unequal
WORTH = 0.1  # of an epoch's time: less is no advantage
_MBIT = re.compile(r"([\d.e+]+) Mbit/s( \(simulated\))?")

METHODS: dict[str, tuple[str, dict[str, Any], bool]] = {  # sync, its options, unequal nodes
    "allreduce": ("allreduce", {}, False),
    "daso": ("daso", {}, False),
    "daso-paper": ("daso", {"blend": "paper"}, False),
    "local-sgd": ("daso", {"overlap": False}, False),
    "allreduce-unequal": ("allreduce", {}, True),
    "daso-unequal": ("daso", {}, True),
    "daso-unequal-steps": ("daso", {"between": "steps"}, True),
    "daso-unequal-equal": ("daso", {"between": "equal"}, True),
}


@dataclass(frozen=True)
class Options:
    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")] = None
    """write the results there; results of other links and methods that are in it already stay"""
    links: str = "25,100,400,1000"
    """Mbit/s, with commas between; 0 for no limit"""
    methods: str = "allreduce,daso,local-sgd,daso-paper,daso-unequal,allreduce-unequal"
    """of those above, with commas between, or all"""
    nodes: int = 2
    """processes, 2 to 4"""
    seeds: int = 3
    """runs of each"""
    epochs: int = 8
    samples: int = 12_288
    batch: int = 1024
    rate: float = 1e-3
    """of Adam"""
    target: float = 0.55
    """test loss"""
    limit: float = 900.0
    """most seconds for one run"""
    quick: bool = False
    """one link, one seed, few steps: does it run?"""


class Places:
    """Where nodes run: in namespaces behind links, or side by side with links simulated."""

    def __init__(self, nodes: int, links: Links | None):
        self.nodes, self.links = nodes, links
        self.coordinator = f"127.0.0.1:{free_port('127.0.0.1')}" if links is None else f"{links.address(0)}:29500"

    def inside(self, node: int) -> list[str]:
        return [] if self.links is None else self.links.inside(node)

    def limit(self, mbit: float) -> float | None:
        """Set the bandwidth; bits a second that are left to simulate."""
        if self.links is None:
            return mbit * 1e6 if mbit else None
        self.links.limit(mbit or None)
        return None

    def name(self, mbit: float) -> str:
        said = f"{mbit:g} Mbit/s" if mbit else "no limit"
        return said if self.links is not None or not mbit else f"{said} (simulated)"


@contextmanager
def places(nodes: int, console: Console) -> Iterator[Places]:
    with ExitStack() as stack:
        try:
            links = stack.enter_context(Links(nodes))
        except LinksRefused as refused:
            console.print(f"Links are simulated: {refused}", highlight=False)
            links = None
        yield Places(nodes, links)


def run_once(orders: dict[str, Any], where: Places, unequal: bool, limit: float) -> dict[str, Any]:
    """Start all nodes, wait, and read what node 0 says. No process is left, whatever happens."""
    cores = sorted(os.sched_getaffinity(0))
    with ExitStack() as stack:
        groups = ["-"] * where.nodes
        if unequal:
            remove_stale()
            quota = stack.enter_context(CpuQuota("slow"))
            quota.set(SLOW)
            groups[-1] = str(quota.path / "cgroup.procs")
        processes = []
        for j, group in enumerate(groups):
            becomes = [sys.executable, "-I", "-S", child.__file__, str(os.getpid()), group, str(cores[j % len(cores)])]
            who = {environment.COORDINATOR: where.coordinator, environment.PROCESSES: str(where.nodes)}
            devices = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2"}  # one computes, one carries the exchanges
            process = subprocess.Popen(
                [*becomes, *where.inside(j), sys.executable, str(NODE), json.dumps(orders)],
                env={**os.environ, **who, environment.PROCESS: str(j), **devices},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            stack.callback(_end, process)
            processes.append(process)
        return _result(processes, limit)


def _result(processes: list[subprocess.Popen[str]], limit: float) -> dict[str, Any]:
    """What node 0 prints at the end; the words of whoever fails."""
    heard: list[list[str]] = [[] for _ in processes]
    readers = [
        threading.Thread(target=lambda p=p, lines=lines: lines.extend(p.stdout), daemon=True)
        for p, lines in zip(processes, heard, strict=True)
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
        why = f"had not ended after {limit:.0f} s" if code is None else f"ended with code {code}"
        raise RuntimeError(f"Node {j} {why}. Its last words:\n{''.join(heard[j][-15:])}")
    for reader in readers:
        reader.join(5)
    return json.loads(next(line for line in heard[0] if line.startswith("result ")).removeprefix("result "))


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()


def measured(result: dict[str, Any], target: float) -> dict[str, Any]:
    """The figures of one run."""
    epochs = result["epochs"]
    cycling = [epoch for epoch in epochs if not epoch["blocking"]] or epochs
    reached = [epoch["until"] for epoch in epochs if epoch["loss"] <= target]
    later = [entry for entry in result["journal"] if entry["received"] > entry["sent"]]
    return {
        "epoch_s": float(np.median([epoch["seconds"] for epoch in cycling])),
        "run_s": epochs[-1]["until"],
        "time_to_target_s": reached[0] if reached else None,
        "accuracy": epochs[-1]["accuracy"],
        "loss": epochs[-1]["loss"],
        "exchange_s": float(np.median([entry["seconds"] for entry in later])) if later else None,
        "waited_s": float(np.median([entry["waited"] for entry in later])) if later else None,
        "exchanges": float(result["exchanges"]),
        "bytes": float(result["bytes"]),
        "curve": [[round(epoch[name], 4) for name in ("until", "loss", "accuracy")] for epoch in epochs],
    }


def over_seeds(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Means; None where a run did not get there."""
    names = [name for name in runs[0] if all(isinstance(run[name], float) for run in runs)]
    told: dict[str, Any] = {name: round(float(np.mean([run[name] for run in runs])), 4) for name in names}
    times = [run["time_to_target_s"] for run in runs]
    told["time_to_target_s"] = None if None in times else round(float(np.mean(times)), 4)
    return told | {"seeds": len(runs), "runs": runs}


def show(results: dict[str, Any], console: Console) -> None:
    """The figures, in at most 80 columns; a dash for what was not measured."""
    number = lambda value, digits=2: "-" if value is None else f"{value:.{digits}f}"
    for link, methods in results.items():
        table = Table(
            title=f"{link}: seconds, MB sent; less: than all-reduce on these nodes",
            box=box.SIMPLE_HEAD,
            padding=(0, 1, 0, 0),
            pad_edge=False,
        )
        for column in ("method", "epoch", "less", "run", "target", "acc.", "exch.", "wait", "MB"):
            table.add_column(column, justify="left" if column == "method" else "right", no_wrap=True)
        for method, told in methods.items():
            beside = methods.get("allreduce-unequal" if "unequal" in method else "allreduce")
            less = "-" if beside is None else f"{100 * _less(told, beside):.0f}%"
            run, target, exchange, waited = (
                number(told.get(name)) for name in ("run_s", "time_to_target_s", "exchange_s", "waited_s")
            )
            accuracy, size = number(told["accuracy"], 4), "-" if "bytes" not in told else number(told["bytes"] / 1e6, 0)
            table.add_row(method, number(told["epoch_s"]), less, run, target, accuracy, exchange, waited, size)
        console.print(table)


def _less(told: dict[str, Any], beside: dict[str, Any]) -> float:
    return 1 - told["epoch_s"] / beside["epoch_s"]


def where_it_ends(results: dict[str, Any]) -> list[str]:
    """At which bandwidth daso no longer makes epochs 10% shorter than all-reduce: a sentence for real links and one for
    simulated ones, where there are several."""
    said = []
    for kind in ("", " (simulated)"):
        less = {}
        for link, methods in results.items():
            found = _MBIT.fullmatch(link)
            if found is not None and (found[2] or "") == kind and {"allreduce", "daso"} <= set(methods):
                less[float(found[1])] = _less(methods["daso"], methods["allreduce"])
        if len(less) > 1:
            said.append(_end_of(less, kind))
    return said


def _end_of(less: dict[float, float], kind: str) -> str:
    """less: by Mbit/s, the share of an epoch's time that is saved."""
    links = sorted(less)
    tell = lambda mbit: f"{mbit:g} Mbit/s{kind} ({100 * less[mbit]:.0f}% less)"
    worth = [mbit for mbit in links if less[mbit] >= WORTH]
    if not worth:
        return f"No link was slow enough for daso to make epochs 10% shorter: {tell(links[0])}."
    if worth[-1] == links[-1]:
        return f"Epochs of daso are at least 10% shorter than those of all-reduce up to {tell(links[-1])}."
    last, beyond = worth[-1], links[links.index(worth[-1]) + 1]
    part = (less[last] - WORTH) / (less[last] - less[beyond])
    return (
        "The advantage of daso over all-reduce, epochs at least 10% shorter, ends at about "
        f"{float(f'{last * (beyond / last) ** part:.2g}'):g} Mbit/s, between {tell(last)} and {tell(beyond)}."
    )


def main(asked: Options) -> int:
    console = Console()
    if asked.quick:
        small = {"links": "100", "seeds": 1, "epochs": 3, "samples": 1024, "batch": 256}
        asked = replace(asked, **small)
    dataset = f"idx:{FASHION}" if FASHION.is_dir() else "synthetic"
    names = list(METHODS) if asked.methods == "all" else asked.methods.split(",")
    unknown = [name for name in names if name not in METHODS]
    if unknown or not 2 <= asked.nodes <= 4:
        console.print(f"error: Methods are {', '.join(METHODS)}; nodes 2 to 4. Got {unknown or asked.nodes}.")
        return 2
    results = json.loads(asked.json.read_text()) if asked.json is not None and asked.json.exists() else {}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that everything is taken away then, too
    with places(asked.nodes, console) as where:
        for mbit in (float(part) for part in asked.links.split(",")):
            link = where.limit(mbit)
            told = results.setdefault(where.name(mbit), {})
            for name in names:
                sync, options, unequal = METHODS[name]
                orders = {"sync": sync, "options": options, "link": link, "dataset": dataset, "tested": 10_000}
                orders |= {field: getattr(asked, field) for field in ("epochs", "samples", "batch", "rate")}
                try:
                    runs = [
                        measured(run_once(orders | {"seed": seed}, where, unequal, asked.limit), asked.target)
                        for seed in range(asked.seeds)
                    ]
                except QuotasRefused as refused:
                    console.print(f"{name} is left out: {refused}", highlight=False)
                    continue
                told[name] = over_seeds(runs)
                console.print(f"{where.name(mbit)}, {name}: {told[name]['epoch_s']:.2f} s an epoch", highlight=False)
                if asked.json is not None:
                    asked.json.write_text(json.dumps(results, indent=1))
    show(results, console)
    for sentence in where_it_ends(results):
        console.print(sentence, highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options, description=__doc__)))
