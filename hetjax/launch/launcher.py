"""The launcher: runs a program as several processes on this machine, and restarts it after a failure if requested.

Each process gets its rank from environment variables (`hetjax.environment`), which `hetjax.fleet.initialize` reads. In
a restart HETJAX_RESTART holds its number, and --resume is added to the program's arguments.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from hetjax import environment
from hetjax.fleet.keys import read_key
from hetjax.fleet.registration import Agent
from hetjax.fleet.registry import Patience
from hetjax.fleet.rendezvous import check_free, free_port
from hetjax.fleet.service import Rendezvous
from hetjax.launch import options as flags
from hetjax.launch.elastic import ElasticSupervisor
from hetjax.launch.events import Signals, wants_color
from hetjax.launch.guard import Guard
from hetjax.launch.heartbeat import Listener
from hetjax.launch.options import Options
from hetjax.launch.placement import share_gpus, split_cores, visible_gpus
from hetjax.launch.quotas import (
    CgroupRoot,
    CpuQuota,
    Disturbance,
    QuotasRefused,
    Throttle,
    find_cgroup_root,
    launcher_group,
    remove_stale,
)
from hetjax.launch.restart_costs import RestartCosts
from hetjax.launch.supervisor import USAGE_ERROR, AttemptResult, ProcessSpec, Supervisor

_ALL_INTERFACES = ("0.0.0.0", "::")


def launch(options: Options, program: Sequence[str]) -> int:
    """Run the program in several processes.

    Args:
        options: the launcher's flags
        program: the program and its arguments

    Returns:
        The exit code of the process that failed first, or 0.

    Raises:
        ValueError, OSError: a flag is invalid or cannot be satisfied here; nothing was started.
    """
    flags.check(options)
    command = flags.command_of(program)
    cores_P, disturbances = flags.quotas_of(options), flags.disturbances_of(options)
    devices_P = flags.devices_of(options)
    share_gpus(devices_P, visible_gpus(os.environ))
    if options.key is not None:
        read_key(options.key)
    if not (options.rendezvous or options.join):
        _addresses(options)
    root = None
    if cores_P is not None or disturbances:
        root = _cgroup_root(cores_P or disturbances[0].cores_P, program)
        remove_stale(root)
    run = _Launch(options, command, cores_P or (None,) * options.processes, devices_P, disturbances, root)
    with ExitStack() as stack:
        run.signals = stack.enter_context(Signals())
        run.guard = Guard()
        stack.callback(run.guard.close)
        if root is not None and (group := launcher_group(root.path)).is_dir():
            run.guard.send("+inside", group)
        run.folder = Path(tempfile.mkdtemp(prefix="hetjax-launch-"))
        stack.callback(shutil.rmtree, run.folder, ignore_errors=True)
        run.guard.send("+folder", run.folder)
        return run.elastic() if flags.goes_on(options) else run.attempts()


class _Launch:
    """One call of the launcher, over all its attempts. Ranks number the processes of the current attempt from 0."""

    signals: Signals
    guard: Guard
    folder: Path

    def __init__(
        self,
        options: Options,
        command: Sequence[str],
        cores_P: Sequence[float | None],
        devices_P: Sequence[str | None],
        disturbances: Sequence[Disturbance],
        root: CgroupRoot | None,
    ):
        self.options, self.command, self.cores_P, self.devices_P = options, command, cores_P, devices_P
        self.disturbances, self.root, self.started_at = disturbances, root, time.time()

    def elastic(self) -> int:
        """Run once: the processes that are left go on by themselves."""
        options, secret = self.options, None if self.options.key is None else read_key(self.options.key)
        with ExitStack() as stack:
            address = options.rendezvous or options.join
            if address is None:
                address, bind = _addresses(options)
                service = Rendezvous(
                    bind,
                    options.processes,
                    key=secret,
                    min_members=options.min_members,
                    limits=Patience(silent=options.silent_limit, answer=options.silent_limit / 2),
                    log=_log,
                )
                stack.callback(service.close)
            agent = Agent(address, secret)
            stack.callback(agent.close)
            slots = range(options.processes)
            specs_P, throttle = self._specs(stack, slots, 0, lambda slot: self._membership(address, options.join))
            replacements = itertools.count(1)

            def replace(slot: int) -> ProcessSpec | None:
                if next(replacements) > options.restart:
                    return None
                specs_P[slot].listener.reset()
                variables = {
                    **specs_P[slot].environment,
                    environment.CHILD: secrets.token_hex(8),
                    environment.JOIN: "1",
                }
                return dataclasses.replace(specs_P[slot], environment=variables)

            arguments = (specs_P, options, self.signals, self.guard, throttle, _log, wants_color(sys.stdout.buffer))
            return ElasticSupervisor(agent, replace, *arguments).run().code

    def _membership(self, rendezvous: str, joins: str | None) -> dict[str, str]:
        """Variables of one process of an elastic run."""
        return {
            environment.RENDEZVOUS: rendezvous,
            environment.CHILD: secrets.token_hex(8),
            environment.HOLDERS: str(self.options.holders),
            environment.TRANSPORT: "host",
        } | ({environment.JOIN: "1"} if joins else {})

    def attempts(self) -> int:
        members, restarts, costs = list(range(self.options.processes)), 0, None
        while True:
            result = self._attempt(members, restarts, costs)
            if result.code in (0, USAGE_ERROR) or result.signaled:
                return result.code
            left = [m for rank, m in enumerate(members) if rank not in result.lost or not self.options.elastic]
            allowed = self.options.restart or (self.options.processes - 1 if self.options.elastic else 0)
            if restarts >= allowed or not left:
                if restarts:
                    _log(f"giving up after {_number(restarts, 'restart')}")
                return result.code
            if signals := self.signals.take():
                return 128 + signals[0]
            restarts, members = restarts + 1, left
            costs = RestartCosts(restarts, result.seen_at, result.noticed_at, time.monotonic(), result.step)
            size = _number(len(members), "process", "es")
            _log(f"restarting with {size} from the last checkpoint (restart {restarts} of at most {allowed})")

    def _attempt(self, members: Sequence[int], restarts: int, costs: RestartCosts | None) -> AttemptResult:
        with ExitStack() as stack:
            coordinator, bind = _addresses(self.options, wait=restarts > 0)
            where = {environment.COORDINATOR: coordinator, environment.BIND: bind}
            if self.options.transport is not None:
                where[environment.TRANSPORT] = self.options.transport
            specs, throttle = self._specs(stack, members, restarts, lambda rank: where)
            colored = wants_color(sys.stdout.buffer)
            return Supervisor(specs, self.options, self.signals, self.guard, throttle, _log, colored, costs).run()

    def _specs(
        self, stack: ExitStack, members: Sequence[int], restarts: int, where: Callable[[int], dict[str, str]]
    ) -> tuple[list[ProcessSpec], Throttle | None]:
        """What to start each process with, and what throttles them; `where`: variables by which it finds others."""
        ranks = range(len(members))
        folder = self.folder / f"attempt-{restarts}"
        folder.mkdir()
        listeners_P = [Listener(folder, rank) for rank in ranks]
        for listener in listeners_P:
            stack.callback(listener.close)
        quotas_P = [stack.enter_context(CpuQuota(f"process{m}", self.root)) for m in members] if self.root else []
        for quota in quotas_P:
            self.guard.send("+cgroup", quota.path)
        cores_P = [self.cores_P[m] for m in members]
        throttle = None
        if quotas_P:
            throttle = Throttle(
                quotas_P,
                cores_P,
                [Disturbance(d.step, tuple(d.cores_P[m] for m in members)) for d in self.disturbances],
                from_start=self.options.quota_from == "start",
                log=_log,
            )
            throttle.update([listener.read() for listener in listeners_P], [True for _ in ranks])
        pinned_P: list[list[int] | None] = [None for _ in ranks]
        if self.options.pin:
            pinned_P = [*split_cores([cores or 1.0 for cores in cores_P], sorted(os.sched_getaffinity(0)))]
        placed_P = share_gpus([self.devices_P[m] for m in members], visible_gpus(os.environ))
        specs = [
            ProcessSpec(
                self._command(restarts),
                {**self._environment(rank, members, folder, restarts, *placed_P[rank]), **where(rank)},
                listeners_P[rank],
                quotas_P[rank] if quotas_P else None,
                pinned_P[rank],
            )
            for rank in ranks
        ]
        return specs, throttle

    def _command(self, restarts: int) -> list[str]:
        flag = self.options.resume_flag
        resumes = restarts > 0 and flag != "" and flag not in self.command
        return [*self.command, flag] if resumes else list(self.command)

    def _environment(
        self,
        rank: int,
        members: Sequence[int],
        folder: Path,
        restarts: int,
        devices: str | None,
        gpus: str | None,
    ) -> dict[str, str]:
        variables = {
            environment.PROCESSES: str(len(members)),
            environment.PROCESS: str(rank),
            environment.HEARTBEAT: str(folder),
            environment.PROGRAMS: os.environ.get(environment.PROGRAMS) or str(self.folder / "programs"),
            "PYTHONUNBUFFERED": "1",
        }
        if lost := sorted(set(range(self.options.processes)) - set(members)):
            variables[environment.LOST] = ",".join(map(str, lost))
        if restarts:
            variables[environment.RESTART] = str(restarts)
        if len(self._command(restarts)) > len(self.command):
            variables[environment.STARTED] = str(self.started_at)
        if gpus is not None:  # the first for one backend over all processes, the others for a backend of its own
            for name in ("JAX_LOCAL_DEVICE_IDS", "JAX_CUDA_VISIBLE_DEVICES", "JAX_ROCM_VISIBLE_DEVICES"):
                variables[name] = gpus
        if devices is not None:
            variables[environment.DEVICES] = devices
        if devices == "cpu":  # leaves the memory of GPUs to other processes
            variables["JAX_PLATFORMS"] = "cpu"
        if self.options.key is not None:
            variables[environment.KEY] = str(self.options.key.resolve())
        return {**os.environ, **variables}


def _log(message: str) -> None:
    sys.stderr.write(f"[launcher] {message}\n")
    sys.stderr.flush()


def _number(count: int, noun: str, plural: str = "s") -> str:
    return f"{count} {noun}{'' if count == 1 else plural}"


def _addresses(options: Options, wait: bool = False) -> tuple[str, str]:
    """The coordinator's address and the one that process 0 listens on, with --port or a free port.

    Raises OSError if the port is taken; `wait` retries for a while, as the previous attempt may still be releasing it.
    """
    host = "127.0.0.1" if options.bind in _ALL_INTERFACES else options.bind
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


def _cgroup_root(cores_P: Sequence[float], program: Sequence[str]) -> CgroupRoot:
    try:
        return find_cgroup_root()
    except QuotasRefused as refused:
        speeds = ",".join(f"{cores:g}" for cores in cores_P)
        raise QuotasRefused(
            f"{refused} Or simulate speeds in one process: `python {' '.join(program)} --speeds {speeds}`."
        ) from refused
