"""The flags of `python -m hetjax launch`, and what their texts mean; a mistake is answered by a sentence."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from hetjax.launch.quotas import Disturbance, check_cores

RESTARTS = 3  # where --restart says no number
_EXAMPLE = "python -m hetjax launch --processes 2 -- experiments/train.py --steps 100"


def _shown(metavar: str) -> object:
    return tyro.conf.arg(metavar=metavar, help_behavior_hint="")


@dataclass(frozen=True)
class Options:
    """How to start the program, and what to do when a process fails."""

    processes: int = 2
    """how many processes"""
    quotas: Annotated[str | None, _shown("CORES,...")] = None
    """CPU time of each process in cores, such as 0.8,0.4; needs a control group, see the README"""
    quota_from: Literal["first-step", "start"] = "first-step"
    """quotas hold while steps are taken, so that compiling is not slowed down; or from the start on"""
    disturb: Annotated[str | None, _shown("STEP:QUOTAS;...")] = None
    """other quotas from a step of process 0 on, such as '30:0.2,0.8;90:0.8,0.2'"""
    pin: bool = False
    """keep each process on cores of its own, in proportion to the quotas; shared where there are too few"""
    restart: int = 0
    """when a process fails start all again, with --resume, at most so often (3 if no number is given)"""
    elastic: bool = False
    """start again without the process that failed, until none is left"""
    resume_flag: str = "--resume"
    """what is added to the program's arguments when it is started again; empty for nothing"""
    port: Annotated[int | None, _shown("INT")] = None
    """where the processes meet; a free one unless told"""
    bind: str = "127.0.0.1"
    """address that process 0 listens on; loopback can be reached from this machine only"""
    silent_limit: float = 10.0
    """seconds without a sign of life after which a process counts as hung"""
    step_limit: float = 900.0
    """seconds without a step, while steps are taken, after which a process counts as hung"""
    grace: float = 5.0
    """seconds between SIGTERM and SIGKILL when the others have to end"""


def split_program(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """The launcher's own arguments and, after --, the program's; --restart without a number gets one."""
    given = list(arguments)
    cut = given.index("--") if "--" in given else len(given)
    own, program = given[:cut], given[cut + 1 :]
    for place, argument in enumerate(own):
        if argument == "--restart" and (place + 1 == len(own) or own[place + 1].startswith("-")):
            own[place] = f"--restart={RESTARTS}"
    return own, program


def check(options: Options) -> None:
    """Numbers that make no sense are refused."""
    most = max(64, 16 * (os.cpu_count() or 1))
    if not 1 <= options.processes <= most:
        raise ValueError(f"--processes is {options.processes}: expected 1 to {most} on this machine.")
    if options.restart < 0:
        raise ValueError(f"--restart is {options.restart}: expected how often to start again, 0 for never.")
    if options.port is not None and not 0 < options.port < 65536:
        raise ValueError(f"--port is {options.port}: expected 1 to 65535.")
    for flag in ("silent_limit", "step_limit", "grace"):
        if not getattr(options, flag) > 0:
            raise ValueError(f"--{flag.replace('_', '-')} is {getattr(options, flag)}: expected seconds above 0.")
    if options.silent_limit < 2:
        raise ValueError(f"--silent-limit is {options.silent_limit}: signs come twice a second, give at least 2 s.")


def quotas_of(options: Options) -> tuple[float, ...] | None:
    return None if options.quotas is None else _cores("--quotas", options.quotas, options.processes)


def disturbances_of(options: Options) -> tuple[Disturbance, ...]:
    if options.disturb is None:
        return ()
    found = []
    for part in options.disturb.split(";"):
        step, colon, cores = part.partition(":")
        if not colon or not step.strip().isdigit():
            raise ValueError(
                f"--disturb has {part!r}: expected STEP:QUOTAS, such as 30:0.2,0.8, with ; between several."
            )
        found.append(Disturbance(int(step), _cores(f"--disturb at step {step.strip()}", cores, options.processes)))
    steps = [disturbance.step for disturbance in found]
    if steps != sorted(set(steps)):
        raise ValueError(f"--disturb names the steps {steps}: expected each once, in rising order.")
    return tuple(found)


def _cores(flag: str, text: str, processes: int) -> tuple[float, ...]:
    try:
        cores_P = tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"{flag} is {text!r}: expected cores with commas between, such as 0.8,0.4.") from None
    if len(cores_P) != processes:
        raise ValueError(f"{flag} gives {len(cores_P)} quotas for {processes} processes: give one for each.")
    for cores in cores_P:
        check_cores(cores)
        if cores > (here := len(os.sched_getaffinity(0))):
            raise ValueError(f"{flag} gives a process {cores:g} cores, and there are {here} here: give at most {here}.")
    return cores_P


def command_of(program: Sequence[str]) -> list[str]:
    """The command that starts the program: a Python file, -m MODULE, or anything that can be run."""
    if not program:
        raise ValueError(f"There is nothing to run: name the program after --, as in {_EXAMPLE}.")
    first, *rest = program
    if first == "-m":
        return [sys.executable, *program]
    path = Path(first)
    if path.is_file():
        python = path.suffix == ".py" or not os.access(path, os.X_OK)
        return [sys.executable, *program] if python else [str(path.resolve()), *rest]
    if (found := shutil.which(first)) is None:
        raise ValueError(
            f"There is no program {first!r} here: expected a Python file, -m MODULE or a command, as in {_EXAMPLE}."
        )
    return [found, *rest]
