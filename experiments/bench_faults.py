"""Faults on purpose: members of a fleet die, hang, leave and join.

    python experiments/bench_faults.py [--events 40] [--seed 0] [--json FILE] [--silent-limit 2] [--restarts 3]

Three to six processes train on this machine. They evaluate every 20 steps and save every 50. Event after event, at
random:

    kill          SIGKILL of a member, which its launcher reports
    crash         SIGKILL that nobody reports: the others find it by the connection
    leave         SIGTERM of a member
    hang          SIGSTOP until the others went on; then its launcher kills it
    wake          SIGSTOP, and SIGCONT after the others went on: it finds out that it is no member any more, and ends
    rendezvous    SIGKILL of the rendezvous, which is started again
    newcomer      SIGKILL of a process that starts, compiles, or is about to join
    two           SIGKILL of two members at once; state that only these two held goes back to a checkpoint
    both          SIGKILL of a member and the rendezvous at once
    mixed         two different ones of the first seven at once
    join          another process enters; it starts while other events happen

After every event the run has to go on, and new processes join in place of lost ones. Ctrl-C ends the events early. At
the end all of this is checked, and the program fails if something is wrong:

    samples   every step's sum contained every sample of that step exactly once, by a metric that counts them; every
              evaluation every sample
    loss      the curve equals that of one undisturbed process: 1e-5 over the first 50 steps, 1e-4 over all
    nothing   no process, port, temporary file or shared memory is left

`seconds` are from the event to the end of the first step that was made without the victims; where no member was lost,
of the second step that started after it; for joins, from the start of the process to its first step. `standstill` is
the longest time between two steps of any other member until then; for joins, the time for the newcomer's first step.
`restart` is a kill under `hetjax launch --restart`, where all start again from a checkpoint. For the table of
docs/faults.md write the results to docs/faults.json and run `python docs/faults.py`.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from benches.fault_events import KINDS, LARGEST, SMALLEST, Events, summary
from benches.fault_fleet import Fleet, run_member
from benches.flags import File, JsonFile, Switch, Text, from_flags
from benches.restarts import measure
from matplotlib.figure import Figure

from hetjax.fleet.rendezvous import check_free
from hetjax.report.drawing import BLUE, DARK, style, worker_color

EARLY = 50  # steps of the loss curve that have to agree to 1e-5
DRAWN = 25  # events in the picture: the first ones
SHARED = Path("/dev/shm")
QUICK = "--xla_backend_optimization_level=0"  # fast compiles rather than fast programs: these are small


@dataclass(frozen=True)
class Options:
    """How much to break."""

    events: int = 40
    """number of events"""
    seed: int = 0
    """seed of the events"""
    silent_limit: float = 2.0
    """seconds after which a silent member is lost"""
    restarts: int = 3
    """number of restarts of a whole run from a checkpoint to measure for comparison"""
    kinds: Text = None
    """only these events, separated by commas (default: all)"""
    verbose: Switch = False
    """print every event"""
    picture: File = None
    """file for a picture: the loss and the members over time"""
    json: JsonFile = None
    """file for the results"""


def run(options: Options, folder: Path) -> dict[str, Any]:
    """All events, and the checks at the end."""
    kinds = None if options.kinds is None else options.kinds.split(",")
    if unknown := set(kinds or ()) - KINDS.keys():
        raise ValueError(f"--kinds names {', '.join(sorted(unknown))}; there are {', '.join(KINDS)}.")
    shared, asked = _shared(), list[int]()
    for number in (signal.SIGINT, signal.SIGTERM):  # ends early, with all checks
        signal.signal(number, lambda number, frame: asked.append(number))
    tell = (lambda event: print(json.dumps(event), flush=True)) if options.verbose else (lambda event: None)
    began = time.monotonic()
    fleet = Fleet(folder, options.silent_limit, np.random.default_rng(options.seed).integers(SMALLEST, LARGEST + 1))
    events = Events(fleet, options.seed, kinds, tell)
    try:
        fleet.wait(lambda: all(member.rows for member in fleet.running), "the first steps")
        while len(events.found) < options.events and not asked:
            events.next()
        fleet.wait(lambda: fleet.newest > EARLY, f"{EARLY} steps")
        fleet.end()
    finally:
        fleet.close()
    check_free(fleet.address)
    assert not (left := _shared() - shared), f"shared memory is left: {left}"
    result = {"events": len(events.found), "run_s": round(time.monotonic() - began, 1), **compare(fleet, folder)}
    if options.picture is not None:
        draw(fleet, events.found, options.picture)
    return result | {"seconds": summary(events.found)}


def compare(fleet: Fleet, folder: Path) -> dict[str, Any]:
    """Compare all logs with an undisturbed run of one process."""
    steps = max(member.rows[-1].step for member in fleet.members if member.rows)
    arguments = ({}, folder / "alone", folder / "output-alone")
    alone = fleet.context.Process(target=run_member, args=arguments, kwargs={"steps": steps})
    alone.start()
    alone.join()
    assert alone.exitcode == 0, (folder / "output-alone").read_text()
    expected = {row["step"]: row for row in _rows(folder / "alone")}
    seen, deviation, early, tested = set(), 0.0, 0.0, 0.0
    for found in (row for member in fleet.members for row in _rows(member.log)):
        right, step = expected[found["step"]], found["step"]
        seen.add(step)
        off = _deviation(found, right, f"step {step}")
        deviation, early = max(deviation, off), max(early, off if step <= EARLY else 0.0)
        if "tested" in right:
            tested = max(tested, _deviation(found["tested"], right["tested"], f"the evaluation after step {step}"))
    assert seen == expected.keys(), f"steps are missing: {sorted(expected.keys() - seen)[:10]}"
    assert early <= 1e-5, f"the loss of the first {EARLY} steps is off by {early:.1e}"
    assert max(deviation, tested) <= 1e-4, f"losses are off by {deviation:.1e}, those of evaluations by {tested:.1e}"
    return {"steps": steps, "deviation_50": early, "deviation": deviation, "deviation_of_evaluations": tested}


def _deviation(found: dict[str, Any], right: dict[str, Any], where: str) -> float:
    """The relative deviation of a loss; the samples have to be the same, each counted once."""
    assert not found["twice"], f"{where}: samples {found['twice']} were counted twice"
    assert found["samples"] == right["samples"], f"{where}: other samples than in the undisturbed run"
    return abs(found["loss"] - right["loss"]) / abs(right["loss"])


def _rows(log: Path) -> Iterator[dict[str, Any]]:
    """The lines of a log; the last one may be cut off."""
    if log.exists():
        with open(log) as file:
            yield from (json.loads(line) for line in file if line.endswith("\n"))


def draw(fleet: Fleet, events: list[dict[str, Any]], path: Path) -> None:
    """The loss over time, and below it when each member took part."""
    with style():
        figure = Figure(figsize=(7.2, 4.4), layout="constrained")
        curve, below = figure.subplots(2, 1, height_ratios=[3, 2], sharex=True)
        first: dict[int, tuple[float, float]] = {}
        last = events[DRAWN]["at"] if len(events) > DRAWN else np.inf
        logs = [[row for row in member.steps.values() if row["at"] < last] for member in fleet.members]
        for row in (row for log in logs for row in log):
            first[row["step"]] = min(first.get(row["step"], (np.inf, 0.0)), (row["at"], row["loss"]))
        start = min(at for at, _ in first.values())
        times, losses = np.array(sorted(first.values())).T
        curve.semilogy(times - start, losses, color=BLUE, linewidth=1.4)
        curve.set(ylabel="loss", title=f"{len(events[:DRAWN])} events in {times[-1] - start:.0f} s")
        for number, log in enumerate(filter(None, logs)):
            at = [row["at"] - start for row in log]
            below.plot([min(at), max(at)], [number, number], color=worker_color(number), linewidth=2)
        for event in events[:DRAWN]:
            if event["kind"] != "join":
                for axes in (curve, below):
                    axes.axvline(event["at"] - start, color=DARK, alpha=0.25, linewidth=0.8)
        below.set(xlabel="seconds; lines: a member or the rendezvous was killed, stopped or asked to leave",
                  ylabel="members", yticks=[])  # fmt: skip
        figure.savefig(path, dpi=110)


def _shared() -> set[str]:
    return {path.name for path in SHARED.glob("*hetjax*")} if SHARED.is_dir() else set()


def main(options: Options) -> int:
    """Break, measure, check, print."""
    here = [str(Path(__file__).parent), str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    paths = os.pathsep.join(filter(None, here))  # for the process that members are forked from
    os.environ.update({"JAX_PLATFORMS": "cpu", "XLA_FLAGS": QUICK, "JAX_NUM_CPU_DEVICES": "1", "PYTHONPATH": paths})
    root = Path(tempfile.mkdtemp(prefix="hetjax-faults-"))
    load = os.getloadavg()[0]
    result = {
        "seed": options.seed, "silent_limit_s": options.silent_limit, "cores": os.cpu_count(), "load_before": load,
        **run(options, root),
    }  # fmt: skip
    if options.restarts:
        (root / "restart").mkdir()
        result["restart"] = measure(root / "restart", options.restarts)
    shutil.rmtree(root)
    print(json.dumps(result, indent=2))
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(from_flags(Options, description=str(__doc__).partition("\n")[0])))
