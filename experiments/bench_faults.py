"""Faults on purpose: members of a fleet die, hang, leave and join.

    python experiments/bench_faults.py [--events 40] [--seed 0] [--json FILE] [--silent-limit 5] [--no-restart]

Three to six processes train on this machine. Event after event, at random:

    kill          SIGKILL of a member, which its launcher reports
    crash         SIGKILL that nobody reports: the others find it by the connection
    two           SIGKILL of two at once; the state that both held goes back to a checkpoint or the start
    leave         SIGTERM of a member
    hang          SIGSTOP until the others went on; then its launcher kills it
    wake          SIGSTOP, and SIGCONT after the others went on: it finds out that it is no member any more
    rendezvous    SIGKILL of the rendezvous, which is started again
    join          another process enters

After every event the run has to go on, and new processes join where fewer than three are left. Ctrl-C ends the events
early. At the end all of this is checked, and the program fails if something is wrong:

    samples   every step's sum contained every sample of that step exactly once, by a metric that counts them
    loss      the curve equals that of one undisturbed process: 1e-5 over the first 50 steps; later ones are reported
    nothing   no process, port, temporary file or shared memory is left

`seconds` are from the event to the third step that was finished after it, so that the event was in one of them; for
joins, to the newcomer's first step. `standstill` is the longest time between two steps of any member during the event.
`restart` is the same kill under `hetjax launch --restart`, where all start again from a checkpoint. For the table of
docs/faults.md write the results to docs/faults.json and run `python docs/faults.py`.
"""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import random
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from benches.flags import File, JsonFile, Switch, Text, from_flags
from matplotlib.figure import Figure

from hetjax import environment
from hetjax.fleet.registration import Agent
from hetjax.fleet.registry import Patience
from hetjax.fleet.rendezvous import check_free, free_port
from hetjax.fleet.service import serve
from hetjax.launch.child import PR_SET_PDEATHSIG
from hetjax.report.drawing import BLUE, DARK, style, worker_color

SMALLEST, LARGEST = 3, 6
PAUSE = 0.02  # seconds added to every step
PATIENCE = 120.0  # seconds in which the run has to go on
WEIGHTS = {"kill": 6, "crash": 2, "two": 1, "leave": 3, "hang": 1, "wake": 1, "rendezvous": 2, "join": 4}
CURVE = 50  # steps of the loss curve that have to agree to 1e-5
DRAWN = 25  # events in the picture: the first ones
SHARED = Path("/dev/shm")
MEMBER = Path(__file__).with_name("benches") / "fleet_member.py"


@dataclass(frozen=True)
class Options:
    """How much to break."""

    events: int = 40
    """number of events"""
    seed: int = 0
    """seed of the events"""
    silent_limit: float = 5.0
    """seconds after which a silent member is lost"""
    restart: bool = True
    """also measure a restart of the whole run from a checkpoint, for comparison"""
    kinds: Text = None
    """only these events, separated by commas (default: all)"""
    verbose: Switch = False
    """print every event"""
    picture: File = None
    """file for a picture: the loss and the members over time"""
    json: JsonFile = None
    """file for the results"""


@dataclass
class Member:
    """A process of the fleet, and what it has logged."""

    name: str
    process: Any
    log: Path
    output: Path
    joins: bool
    steps: dict[int, dict[str, Any]] = field(default_factory=dict)
    stopped: bool = False  # by SIGSTOP
    spared: bool = False  # nobody kills it when it hangs
    silent: bool = False  # nobody reports its end
    reported: bool = False
    leaving: bool = False
    _read: int = 0

    def look(self) -> None:
        """Read new lines of the log."""
        if not self.log.exists():
            return
        with open(self.log, "rb") as file:
            file.seek(self._read)
            content = file.read()
        whole = content[: content.rfind(b"\n") + 1]
        self._read += len(whole)
        for found in map(json.loads, whole.splitlines()):
            self.steps[found["step"]] = found

    def send(self, number: int) -> None:
        """Send the process a signal, if it is still there."""
        with suppress(ProcessLookupError):
            os.kill(self.process.pid, number)

    @property
    def newest(self) -> int:
        return max(self.steps, default=0)

    @property
    def alive(self) -> bool:
        return self.process.exitcode is None and not (self.stopped or self.leaving)

    @property
    def training(self) -> bool:
        return self.alive and bool(self.steps)


class Fleet:
    """The processes, and the part of a launcher."""

    def __init__(self, folder: Path, options: Options, size: int):
        self.folder, self.options = folder, options
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(["benches.fleet_member"])
        self.port = free_port("127.0.0.1")
        self.address = f"127.0.0.1:{self.port}"
        self.members: list[Member] = []
        self.size = size
        self.rendezvous = self.serve()
        self.agent = Agent(self.address, None)
        for _ in range(size):
            self.start(joins=False)

    def serve(self) -> Any:
        """Start the rendezvous."""
        arguments = (self.address, self.size, self.folder / "state", self.folder / "rendezvous", self.options)
        process = self.context.Process(target=_serve, args=arguments)
        process.start()
        return process

    def start(self, joins: bool) -> Member:
        """Start a member."""
        name, index = secrets.token_hex(8), len(self.members)
        variables = {
            environment.RENDEZVOUS: self.address,
            environment.PROCESSES: str(self.size),
            environment.PROCESS: str(index),
            environment.CHILD: name,
            environment.TRANSPORT: "host",
            environment.HOLDERS: "2",
            environment.PROGRAMS: str(self.folder / "programs"),
        }
        if joins:
            variables[environment.JOIN] = "1"
        log, output = self.folder / f"log-{index}", self.folder / f"output-{index}"
        options = {"steps": 10**6, "pause": PAUSE, "end": self.folder / "end"}
        process = self.context.Process(target=_member, args=(variables, log, output), kwargs=options)
        process.start()
        self.members.append(Member(name, process, log, output, joins))
        return self.members[-1]

    def look(self) -> None:
        """Do what a launcher does, and read the logs."""
        for member in self.members:
            member.look()
            if member.process.exitcode is not None and not member.reported:
                member.reported = True
                member.look()
                code = member.process.exitcode
                if not member.silent:
                    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
                    self.agent.ended(member.name, how, member.joins, code == 0)
            elif member.name in self.agent.kill and not member.spared and member.process.exitcode is None:
                member.send(signal.SIGKILL)

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        """Wait until something holds, doing what a launcher does."""
        deadline = time.monotonic() + PATIENCE
        while True:
            self.look()
            if condition():
                return
            if time.monotonic() > deadline:
                for member in self.members:
                    if member.process.exitcode is None:
                        member.send(signal.SIGUSR2)
                time.sleep(1.0)
                raise AssertionError(f"waited {PATIENCE:g} s for {what}; see {self.folder}")
            failed = [m for m in self.members if (m.process.exitcode or 0) > 0 and not m.spared]
            if failed:
                raise AssertionError(f"a member failed, see {failed[0].output}: {failed[0].output.read_text()[-2000:]}")
            if not (self.folder / "end").exists() and all(m.process.exitcode is not None for m in self.members):
                raise AssertionError(f"no member is left, while waiting for {what}; see {self.folder}")
            time.sleep(0.003)

    @property
    def training(self) -> list[Member]:
        return [member for member in self.members if member.training]

    @property
    def newest(self) -> int:
        return max(member.newest for member in self.members)

    def close(self) -> None:
        """Kill what is left."""
        self.agent.close()
        for process in [*(member.process for member in self.members), self.rendezvous]:
            if process.exitcode is None:
                process.kill()
            process.join()


def _serve(address: str, processes: int, state: Path, output: Path, options: Options) -> None:
    _die_with_parent()
    with open(output, "a") as file:
        say = lambda message: print(f"{time.monotonic():.3f} {message}", file=file, flush=True)
        patience = Patience(silent=options.silent_limit, answer=options.silent_limit / 2)
        deadline = time.monotonic() + 10.0
        while True:
            try:
                serve(address, processes, None, state, limits=patience, log=say)
                return
            except OSError:  # the port is not free yet
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.02)


def _die_with_parent() -> None:
    """If this program is killed, the process that forks members ends, and they with it; nothing else disturbs them."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.setsid()  # else the end of the shell that started this program wakes up who is stopped


def _member(*arguments: Any, **options: Any) -> None:
    from benches.fleet_member import member

    _die_with_parent()
    member(*arguments, **options)


def event_of(kind: str, fleet: Fleet, chance: random.Random) -> dict[str, Any]:
    """Do one thing to the fleet, wait until it has gone on, and return what was measured."""
    before, began = fleet.newest, time.monotonic()
    victims = chance.sample(fleet.training, 2 if kind == "two" else 1)
    if kind in ("kill", "crash", "two"):
        for victim in victims:
            victim.silent = kind == "crash"
            victim.send(signal.SIGKILL)
            victim.stopped = True
    elif kind == "leave":
        victims[0].leaving = True
        victims[0].send(signal.SIGTERM)
    elif kind in ("hang", "wake"):
        victims[0].spared, victims[0].stopped = kind == "wake", True
        victims[0].send(signal.SIGSTOP)
    elif kind == "rendezvous":
        fleet.rendezvous.kill()
        fleet.rendezvous.join()
        fleet.rendezvous = fleet.serve()
    elif kind == "join":
        victims = [fleet.start(joins=True)]
        fleet.wait(lambda: bool(victims[0].steps), "the newcomer's first step")
        first = min(victims[0].steps.values(), key=lambda row: row["at"])
        before, ended = first["step"], first["at"]
    others = [member for member in fleet.training if member not in victims]
    fleet.wait(lambda: max((m.newest for m in others), default=0) >= before + 3, f"three steps after {kind}")
    if kind != "join":
        ended = min(row["at"] for m in others for step, row in m.steps.items() if step >= before + 3)
    if kind == "wake":
        victims[0].send(signal.SIGCONT)
    if kind in ("hang", "wake", "leave"):
        fleet.wait(lambda: victims[0].process.exitcode is not None, f"the end of the victim of {kind}")
    times = [sorted(row["at"] for row in m.steps.values() if row["at"] > began - 1) for m in others]
    gaps = [gap for each in times for gap in np.diff(each)]
    return {
        "kind": kind,
        "step": before,
        "at": began,
        "seconds": ended - began,
        "standstill": float(max(gaps, default=0.0)),
    }


def run(options: Options, folder: Path) -> dict[str, Any]:
    """All events, and the checks at the end."""
    chance = random.Random(options.seed)
    weights = WEIGHTS if options.kinds is None else {kind: WEIGHTS[kind] for kind in options.kinds.split(",")}
    events: list[dict[str, Any]] = []
    shared, asked = _shared(), list[int]()
    for number in (signal.SIGINT, signal.SIGTERM):  # ends early, with all checks
        signal.signal(number, lambda number, frame: asked.append(number))
    fleet = Fleet(folder, options, chance.randint(SMALLEST, LARGEST))
    try:
        fleet.wait(lambda: all(m.steps or m.reported for m in fleet.members), "the first steps")
        while len(events) < options.events and not asked:
            kind = chance.choices([*weights], [*weights.values()])[0]
            size = len(fleet.training)
            if kind == "join" and size >= LARGEST:
                kind = "kill"
            if size - (2 if kind == "two" else 0 if kind in ("join", "rendezvous") else 1) < SMALLEST - 1:
                kind = "join"
            events.append(event_of(kind, fleet, chance))
            if options.verbose:
                print(json.dumps(events[-1]), len(fleet.training), "members", flush=True)
            while len(fleet.training) < SMALLEST and len(events) < options.events:
                events.append(event_of("join", fleet, chance))
                if options.verbose:
                    print(json.dumps(events[-1]), len(fleet.training), "members", flush=True)
        fleet.wait(lambda: fleet.newest > CURVE, f"{CURVE} steps")
        (folder / "end").touch()
        fleet.wait(lambda: all(m.process.exitcode is not None for m in fleet.members), "the end of all members")
        fleet.wait(lambda: fleet.rendezvous.exitcode is not None, "the end of the rendezvous")
    finally:
        fleet.close()
    check_free(fleet.address)
    assert not (left := _shared() - shared), f"shared memory is left: {left}"
    result = {"events": events, **compare(fleet, folder)}
    if options.picture is not None:
        draw(fleet, events, options.picture)
    return result


def compare(fleet: Fleet, folder: Path) -> dict[str, Any]:
    """Compare all logs with an undisturbed run of one process."""
    steps = fleet.newest
    alone = fleet.context.Process(
        target=_member, args=({}, folder / "alone", folder / "output-alone"), kwargs={"steps": steps}
    )
    alone.start()
    alone.join()
    assert alone.exitcode == 0, (folder / "output-alone").read_text()
    expected = {row["step"]: row for row in map(json.loads, (folder / "alone").read_text().splitlines())}
    rows = [row for member in fleet.members for row in member.steps.values()]
    seen = {row["step"] for row in rows}
    assert seen == set(range(1, steps + 1)), f"steps are missing: {sorted(set(range(1, steps + 1)) - seen)[:10]}"
    deviation, early = 0.0, 0.0
    for found in rows:
        right = expected[found["step"]]
        assert not found["twice"], f"step {found['step']}: samples {found['twice']} were counted twice"
        assert found["samples"] == right["samples"], f"step {found['step']}: other samples than in the undisturbed run"
        off = abs(found["loss"] - right["loss"]) / abs(right["loss"])
        deviation, early = max(deviation, off), max(early, off if found["step"] <= CURVE else 0.0)
    assert early <= 1e-5, f"the loss of the first {CURVE} steps is off by {early:.1e}"
    return {"steps": steps, "deviation_50": early, "deviation": deviation}


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


def restart(folder: Path, limit: float) -> float:
    """Seconds from a kill to the next new step, where all processes start again from a checkpoint."""
    command = [sys.executable, "-m", "hetjax", "launch", "--processes", "3", "--restart", "1", "--"]
    out = open(folder / "output", "wb")  # noqa: SIM115
    launcher = subprocess.Popen([*command, str(MEMBER), str(folder), "1000000"], stdout=out, stderr=out)
    try:
        deadline = time.monotonic() + PATIENCE

        def rows() -> list[dict[str, Any]]:
            time.sleep(0.01)
            assert time.monotonic() < deadline, f"the run did not go on within {PATIENCE:g} s; see {folder}"
            log = folder / "log-0"
            return [json.loads(line) for line in log.read_text().splitlines(True) if line.endswith("\n")] \
                if log.exists() else []  # fmt: skip

        while not (found := rows()) or found[-1]["step"] < 25:
            pass
        victims = [
            int(path.parent.name)
            for path in Path("/proc").glob("[0-9]*/environ")
            if _environment(path).get(environment.PROCESS) == "1" and str(folder) in _command(path)
        ]
        began, newest = time.monotonic(), rows()[-1]["step"]
        os.kill(victims[0], signal.SIGKILL)
        while True:  # steps since the checkpoint are done again, and then there is a new one
            found = rows()
            again = next((k for k in range(1, len(found)) if found[k]["step"] <= found[k - 1]["step"]), len(found))
            newest = max([newest, *(row["step"] for row in found[:again])])
            if new := [row["at"] for row in found[again:] if row["step"] > newest]:
                return new[0] - began
    finally:
        launcher.terminate()
        launcher.wait()
        out.close()


def _environment(path: Path) -> dict[str, str]:
    try:
        return dict(part.split("=", 1) for part in path.read_bytes().decode().split("\0") if "=" in part)
    except OSError:
        return {}


def _command(path: Path) -> str:
    try:
        return path.with_name("cmdline").read_text()
    except OSError:
        return ""


def _shared() -> set[str]:
    return {path.name for path in SHARED.glob("*hetjax*")} if SHARED.is_dir() else set()


def summary(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Median, 95th percentile and worst of the seconds, for each kind."""
    found = {}
    for kind in WEIGHTS:
        seconds = [event["seconds"] for event in events if event["kind"] == kind]
        still = [event["standstill"] for event in events if event["kind"] == kind]
        if seconds:
            found[kind] = {
                "events": len(seconds),
                "median_s": round(float(np.median(seconds)), 3),
                "p95_s": round(float(np.percentile(seconds, 95)), 3),
                "worst_s": round(max(seconds), 3),
                "standstill_median_s": round(float(np.median(still)), 3),
                "standstill_p95_s": round(float(np.percentile(still, 95)), 3),
            }
    return found


def main(options: Options) -> int:
    """Break, measure, check, print."""
    here = [str(Path(__file__).parent), str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    paths = os.pathsep.join(filter(None, here))  # for the process that members are forked from
    os.environ.update({"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "JAX_NUM_CPU_DEVICES": "1", "PYTHONPATH": paths})
    root = Path(tempfile.mkdtemp(prefix="hetjax-faults-"))
    began = time.monotonic()
    result = run(options, root)
    events = result.pop("events")
    result = {
        "events": len(events), "seed": options.seed, "silent_limit_s": options.silent_limit, "cores": os.cpu_count(),
        "load": os.getloadavg()[0], "run_s": round(time.monotonic() - began, 1), **result, "seconds": summary(events),
    }  # fmt: skip
    if options.restart:
        (root / "restart").mkdir()
        result["restart_s"] = round(restart(root / "restart", options.silent_limit), 2)
    shutil.rmtree(root)
    print(json.dumps(result, indent=2))
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(from_flags(Options, description=str(__doc__).partition("\n")[0])))
