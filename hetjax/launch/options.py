"""The flags of `hetjax launch`: declared, checked and parsed."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from hetjax.devices.choice import parse
from hetjax.fleet.rendezvous import split_address
from hetjax.launch.quotas import Disturbance, check_cores

RESTARTS = 3  # for --restart without a number
_EXAMPLE = "hetjax launch --processes 2 -- hetjax train --steps 100"


def optional(metavar: str) -> object:
    """Shows a flag in --help with this metavar and without "(default: None)"."""
    return tyro.conf.arg(metavar=metavar, help_behavior_hint="")


Switch = Annotated[bool, tyro.conf.arg(help_behavior_hint="")]  # without "(default: False)"


@dataclass(frozen=True)
class Options:
    """How to start the program, and what to do when a process fails."""

    processes: int = 2
    """number of processes"""
    quotas: Annotated[str | None, optional("CORES,...")] = None
    """CPU quota of each process in cores, such as 0.8,0.4; needs permission to write cgroups"""
    quota_from: Literal["first-step", "start"] = "first-step"
    """apply quotas only while steps are taken, so that compilation is not slowed down, or from the start"""
    disturb: Annotated[str | None, optional("STEP:QUOTAS;...")] = None
    """change the quotas when process 0 reaches a step, such as '30:0.2,0.8;90:0.8,0.2'"""
    devices: Annotated[str | None, optional("KINDS[/KINDS...]")] = None
    """devices of each process, such as 'gpu', or 'cuda:0/cuda:1+cpu/cpu' with one entry per process; sets
    HETJAX_DEVICES (default: the GPUs are shared out, else one CPU device each)"""
    transport: Annotated[Literal["auto", "mesh", "host"] | None, optional("{auto,mesh,host}")] = None
    """how sums travel: host for any mix of devices, mesh (XLA) for one kind; sets HETJAX_TRANSPORT (default: auto)"""
    key: Annotated[Path | None, optional("FILE")] = None
    """key of the fleet (hetjax key FILE), to authenticate and encrypt; sets HETJAX_KEY (default: none)"""
    pin: Switch = False
    """pin each process to its own cores, in proportion to the quotas; cores are shared if there are too few"""
    restart: int = 0
    """maximum number of restarts of all processes, with --resume, after a failure (3 if given without a number)"""
    elastic: Switch = False
    """restart without the process that failed, as long as one is left; with --transport host the others go on instead,
    and --restart N starts up to N processes in place of lost ones"""
    min_members: int = 1
    """an elastic run stops, with a checkpoint, when fewer processes are left"""
    holders: Literal[1, 2] = 2
    """processes that hold each slice of the optimizer's state; with 1 a loss goes back to the last checkpoint"""
    rendezvous: Annotated[str | None, optional("HOST:PORT")] = None
    """start an elastic run at this rendezvous, see hetjax rendezvous (default: one in the launcher)"""
    join: Annotated[str | None, optional("HOST:PORT")] = None
    """join the elastic run at this rendezvous"""
    chaos: Annotated[float | None, optional("SECONDS")] = None
    """kill a process of an elastic run now and then, on average after this time, to see that it goes on"""
    resume_flag: str = "--resume"
    """argument added to the program's arguments in a restart; empty to add none"""
    port: Annotated[int | None, optional("INT")] = None
    """port of the coordinator, process 0 (default: a free one)"""
    bind: str = "127.0.0.1"
    """address that process 0 listens on; loopback is reachable from this machine only"""
    silent_limit: float = 10.0
    """seconds without a heartbeat after which a process counts as hung"""
    step_limit: float = 900.0
    """seconds without a completed step, during training, after which a process counts as hung"""
    grace: float = 5.0
    """seconds between SIGTERM and SIGKILL when the remaining processes are stopped"""


def goes_on(options: Options) -> bool:
    """Whether the others go on when a process is lost."""
    return bool(options.rendezvous or options.join) or (options.elastic and options.transport == "host")


def split_program(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split at `--` into the launcher's arguments and the program; completes --restart without a number."""
    arguments = list(arguments)
    end = arguments.index("--") if "--" in arguments else len(arguments)
    own, program = arguments[:end], arguments[end + 1 :]
    for i, argument in enumerate(own):
        if argument == "--restart" and (i + 1 == len(own) or own[i + 1].startswith("-")):
            own[i] = f"--restart={RESTARTS}"
    return own, program


def check(options: Options) -> None:
    """Raise ValueError for numbers out of range."""
    most = max(64, 16 * (os.cpu_count() or 1))
    if not 1 <= options.processes <= most:
        raise ValueError(f"--processes is {options.processes}: expected 1 to {most} on this machine.")
    if options.restart < 0:
        raise ValueError(f"--restart is {options.restart}: expected a number of restarts, 0 for none.")
    if options.port is not None and not 0 < options.port < 65536:
        raise ValueError(f"--port is {options.port}: expected 1 to 65535.")
    if options.chaos is not None and (options.chaos <= 0 or not goes_on(options)):
        raise ValueError("--chaos takes seconds above 0, in an elastic run: add --elastic.")
    if options.min_members < 1:
        raise ValueError(f"--min-members is {options.min_members}: expected at least 1.")
    if options.rendezvous and options.join:
        raise ValueError("--rendezvous starts a run and --join enters one: give only one of them.")
    for address in filter(None, (options.rendezvous, options.join)):
        split_address(address)
    if (options.rendezvous or options.join) and options.transport not in (None, "host"):
        raise ValueError(f"--transport {options.transport} cannot be used in an elastic run: its transport is host.")
    for name in ("silent_limit", "step_limit", "grace"):
        if not getattr(options, name) > 0:
            raise ValueError(f"--{name.replace('_', '-')} is {getattr(options, name)}: expected seconds above 0.")
    if options.silent_limit < 2:
        raise ValueError(
            f"--silent-limit is {options.silent_limit}: expected at least 2 s, as heartbeats are 0.5 s apart."
        )


def devices_of(options: Options) -> tuple[str | None, ...]:
    """The entry of --devices for each process; None without the flag."""
    if options.devices is None:
        return (None,) * options.processes
    entries = [entry.strip() for entry in options.devices.split("/")]
    if len(entries) not in (1, options.processes):
        raise ValueError(
            f"--devices gives {len(entries)} entries for {options.processes} processes: give one for all, or one for "
            "each, separated by /, such as gpu/gpu+cpu."
        )
    for entry in entries:
        parse(entry)
    return tuple(entries * options.processes)[: options.processes]


def quotas_of(options: Options) -> tuple[float, ...] | None:
    """The quotas of --quotas; None without it."""
    return None if options.quotas is None else _cores("--quotas", options.quotas, options.processes)


def disturbances_of(options: Options) -> tuple[Disturbance, ...]:
    """The quota changes of --disturb."""
    if options.disturb is None:
        return ()
    disturbances = []
    for part in options.disturb.split(";"):
        step, colon, cores = part.partition(":")
        if not colon or not step.strip().isdigit():
            raise ValueError(f"--disturb has {part!r}: expected STEP:QUOTAS, such as 30:0.2,0.8, separated by ;.")
        cores_P = _cores(f"--disturb at step {step.strip()}", cores, options.processes)
        disturbances.append(Disturbance(int(step), cores_P))
    steps = [disturbance.step for disturbance in disturbances]
    if steps != sorted(set(steps)):
        raise ValueError(f"--disturb names the steps {steps}: expected each once, in increasing order.")
    return tuple(disturbances)


def _cores(flag: str, text: str, processes: int) -> tuple[float, ...]:
    try:
        cores_P = tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"{flag} is {text!r}: expected cores separated by commas, such as 0.8,0.4.") from None
    if len(cores_P) != processes:
        raise ValueError(f"{flag} gives {len(cores_P)} quotas for {processes} processes: give one for each.")
    for cores in cores_P:
        check_cores(cores)
        if cores > (most := len(os.sched_getaffinity(0))):
            raise ValueError(f"{flag} gives a process {cores:g} cores: this machine has {most}, give at most that.")
    return cores_P


def command_of(program: Sequence[str]) -> list[str]:
    """The command line of the program: a Python file, -m MODULE, or an executable."""
    if not program:
        raise ValueError(f"There is nothing to run: give the program after --, as in {_EXAMPLE}.")
    first, *rest = program
    if first == "hetjax":  # also where the command is not on the path
        return [sys.executable, "-m", *program]
    if first == "-m":
        return [sys.executable, *program]
    path = Path(first)
    if path.is_file():
        python = path.suffix == ".py" or not os.access(path, os.X_OK)
        return [sys.executable, *program] if python else [str(path.resolve()), *rest]
    if (executable := shutil.which(first)) is None:
        raise ValueError(
            f"There is no program {first!r}: expected a Python file, -m MODULE or a command, as in {_EXAMPLE}."
        )
    return [executable, *rest]
