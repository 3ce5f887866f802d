"""The launcher: starts a program several times on this machine as one run, and starts it again where that was asked.

Every process learns from its environment who it is (see `variables`), and `hetjax.fleet.initialize` does the rest. When
it is started again, HETJAX_RESTART counts the times and --resume is added to the program's arguments.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from hetjax import environment
from hetjax.fleet.rendezvous import check_free, free_port
from hetjax.launch import options as flags
from hetjax.launch.guard import Guard
from hetjax.launch.heartbeat import Listener
from hetjax.launch.options import Options
from hetjax.launch.output import wants_color
from hetjax.launch.placement import cores_for, gpus_here, shares_of_gpus
from hetjax.launch.quotas import (
    CgroupRoot,
    CpuQuota,
    Disturbance,
    QuotasRefused,
    Throttle,
    find_home,
    launchers_own,
    remove_stale,
)
from hetjax.launch.signals import Signals
from hetjax.launch.team import Ending, Member, Team

MISTAKE = 2  # a program's exit code for a mistake of its user, which starting again would only repeat
_EVERYWHERE = ("0.0.0.0", "::")


def launch(options: Options, program: Sequence[str]) -> int:
    """Run the program; the exit code of the first process that failed, or 0. Mistakes raise before anything starts."""
    flags.check(options)
    command = flags.command_of(program)
    cores_P, disturbances = flags.quotas_of(options), flags.disturbances_of(options)
    shares_of_gpus(options.processes, gpus_here(os.environ))
    _address(options)
    home = None
    if cores_P is not None or disturbances:
        home = _find_home(cores_P or disturbances[0].cores_P, program)
        remove_stale(home)
    run = _Launch(options, command, cores_P or (None,) * options.processes, disturbances, home)
    with ExitStack() as stack:
        run.signals = stack.enter_context(Signals())
        run.guard = Guard()
        stack.callback(run.guard.dismiss)
        if home is not None and (inside := launchers_own(home.path)).is_dir():
            run.guard.tell("+inside", inside)
        run.folder = Path(tempfile.mkdtemp(prefix="hetjax-launch-"))
        stack.callback(shutil.rmtree, run.folder, ignore_errors=True)
        run.guard.tell("+folder", run.folder)
        return run.attempts()


class _Launch:
    """One call of the launcher, over all its attempts."""

    signals: Signals
    guard: Guard
    folder: Path

    def __init__(
        self,
        options: Options,
        command: Sequence[str],
        cores_P: Sequence[float | None],
        disturbances: Sequence[Disturbance],
        home: CgroupRoot | None,
    ):
        self.options, self.command, self.cores_P = options, command, cores_P
        self.disturbances, self.home, self.began = disturbances, home, time.time()

    def attempts(self) -> int:
        members, restarts = list(range(self.options.processes)), 0
        while True:
            ending = self._attempt(members, restarts)
            if ending.code in (0, MISTAKE) or ending.asked:
                return ending.code
            left = [m for place, m in enumerate(members) if place not in ending.lost or not self.options.elastic]
            allowed = self.options.restart or (self.options.processes - 1 if self.options.elastic else 0)
            if restarts >= allowed or not left:
                if restarts:
                    self._say(f"gives up after {restarts} further starts")
                return ending.code
            if late := self.signals.taken():
                return 128 + late[0]
            restarts, members = restarts + 1, left
            several = f"{len(members)} processes" if len(members) > 1 else "1 process"
            self._say(f"starts again with {several} from the last checkpoint ({restarts} of at most {allowed} times)")

    def _attempt(self, members: Sequence[int], restarts: int) -> Ending:
        with ExitStack() as stack:
            folder = self.folder / f"attempt-{restarts}"
            folder.mkdir()
            listeners = [Listener(folder, place) for place in range(len(members))]
            for listener in listeners:
                stack.callback(listener.close)
            quotas_P = [stack.enter_context(CpuQuota(f"process{m}", self.home)) for m in members] if self.home else []
            for quota in quotas_P:
                self.guard.tell("+cgroup", quota.path)
            cores_P = [self.cores_P[m] for m in members]
            throttle = None
            if quotas_P:
                throttle = Throttle(
                    quotas_P,
                    cores_P,
                    [Disturbance(d.step, tuple(d.cores_P[m] for m in members)) for d in self.disturbances],
                    from_start=self.options.quota_from == "start",
                    say=self._say,
                )
                throttle.follow([listener.read() for listener in listeners], [True] * len(members))
            pinned: list[list[int] | None] = [None] * len(members)
            if self.options.pin:
                pinned = [*cores_for([cores or 1.0 for cores in cores_P], sorted(os.sched_getaffinity(0)))]
            coordinator, bind = _address(self.options, wait=restarts > 0)
            gpus = shares_of_gpus(len(members), gpus_here(os.environ))
            team = Team(
                [
                    Member(
                        self._command(restarts),
                        self._environment(place, members, coordinator, bind, folder, restarts, gpus[place]),
                        listeners[place],
                        quotas_P[place] if quotas_P else None,
                        pinned[place],
                    )
                    for place in range(len(members))
                ],
                self.options,
                self.signals,
                self.guard,
                throttle,
                self._say,
                wants_color(sys.stdout.buffer),
            )
            return team.run()

    def _command(self, restarts: int) -> list[str]:
        flag = self.options.resume_flag
        again = restarts > 0 and flag != "" and flag not in self.command
        return [*self.command, flag] if again else list(self.command)

    def _environment(
        self,
        process: int,
        members: Sequence[int],
        coordinator: str,
        bind: str,
        folder: Path,
        restarts: int,
        gpus: str | None,
    ) -> dict[str, str]:
        told = {
            environment.COORDINATOR: coordinator,
            environment.BIND: bind,
            environment.PROCESSES: str(len(members)),
            environment.PROCESS: str(process),
            environment.HEARTBEAT: str(folder),
            environment.PROGRAMS: os.environ.get(environment.PROGRAMS) or str(self.folder / "programs"),
            "PYTHONUNBUFFERED": "1",
        }
        if lost := sorted(set(range(self.options.processes)) - set(members)):
            told[environment.LOST] = ",".join(map(str, lost))
        if restarts:
            told[environment.RESTART] = str(restarts)
        if len(self._command(restarts)) > len(self.command):
            told[environment.STARTED] = str(self.began)
        if gpus is not None:
            told["JAX_LOCAL_DEVICE_IDS"] = gpus
        return {**os.environ, **told}

    def _say(self, told: str) -> None:
        sys.stderr.write(f"[launcher] {told}\n")
        sys.stderr.flush()


def _address(options: Options, wait: bool = False) -> tuple[str, str]:
    """Where processes meet and where process 0 listens: a free port, or the one that was asked for, if it is free.

    `wait`: the port was ours until a moment ago.
    """
    host = "127.0.0.1" if options.bind in _EVERYWHERE else options.bind
    port = options.port or free_port(options.bind)
    shown = {name: f"[{name}]" if ":" in name else name for name in (host, options.bind)}
    bind = f"{shown[options.bind]}:{port}"
    deadline = time.monotonic() + (5.0 if wait else 0.0)
    while True:
        try:
            check_free(bind)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
        else:
            return f"{shown[host]}:{port}", bind


def _find_home(cores_P: Sequence[float], program: Sequence[str]) -> CgroupRoot:
    try:
        return find_home()
    except QuotasRefused as refused:
        speeds = ",".join(f"{cores:g}" for cores in cores_P)
        raise QuotasRefused(
            f"{refused} Or simulate speeds in one process: `python {' '.join(program)} --speeds {speeds}`."
        ) from refused
