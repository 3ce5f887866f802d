"""The fleet that bench_faults breaks: its processes, what they have logged, and the part of a launcher."""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import secrets
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from hetjax import environment
from hetjax.fleet.registration import Agent
from hetjax.fleet.registry import Patience
from hetjax.fleet.rendezvous import free_port
from hetjax.fleet.service import serve
from hetjax.launch.child import PR_SET_PDEATHSIG

PAUSE = 0.02  # seconds added to every step
PATIENCE = 120.0  # seconds in which the run has to go on


class Row(NamedTuple):
    """A step that a member has logged."""

    step: int
    at: float  # seconds of the system's monotonic clock
    numbers: frozenset[int]  # of the members that made it


@dataclass
class Member:
    """A process of the fleet, and what it has logged."""

    name: str
    process: Any
    log: Path
    output: Path
    joins: bool
    started: float
    number: int = -1  # given by the rendezvous; -1: not yet known
    rows: list[Row] = field(default_factory=list)
    stopped: bool = False  # by SIGSTOP or SIGKILL
    spared: bool = False  # not killed when it hangs
    silent: bool = False  # its end is not reported
    leaving: bool = False
    greeted: bool = False  # its join was counted
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
            self.number = found["number"]
            self.rows.append(Row(found["step"], found["at"], frozenset(found["members"])))

    def since(self, began: float) -> Iterator[Row]:
        """The rows of steps that were finished after a moment, newest first, and the one before."""
        for row in reversed(self.rows):
            yield row
            if row.at < began:
                return

    def send(self, number: int) -> None:
        """Send the process a signal, if it is still there."""
        with suppress(ProcessLookupError):
            os.kill(self.process.pid, number)

    @property
    def alive(self) -> bool:
        return self.process.exitcode is None and not (self.stopped or self.leaving)

    @property
    def training(self) -> bool:
        return self.alive and bool(self.rows)

    @property
    def starting(self) -> bool:
        return self.alive and not self.rows


class Fleet:
    """The processes, and the part of a launcher.

    Args:
        folder: of their logs, outputs, checkpoints and compiled programs.
        silent_limit: seconds after which a silent member is lost.
        size: number of processes with which the run starts.
    """

    def __init__(self, folder: Path, silent_limit: float, size: int):
        self.folder, self.silent_limit, self.size = folder, silent_limit, size
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(["benches.fleet_member"])
        self.port = free_port("127.0.0.1")
        self.address = f"127.0.0.1:{self.port}"
        self.members: list[Member] = []  # all that ever were
        self.running: list[Member] = []  # those whose end was not noted
        self.rendezvous = self.serve()
        self.agent = Agent(self.address, None)
        for _ in range(size):
            self.start(joins=False)

    def serve(self) -> Any:
        """Start the rendezvous."""
        arguments = (self.address, self.size, self.folder / "state", self.folder / "rendezvous", self.silent_limit)
        process = self.context.Process(target=_serve, args=arguments)
        process.start()
        return process

    def restart_rendezvous(self) -> None:
        """Kill the rendezvous with SIGKILL, and start it again."""
        self.rendezvous.kill()
        self.rendezvous.join()
        self.rendezvous = self.serve()

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
        options = {"steps": 10**7, "pause": PAUSE, "end": self.folder / "end", "folder": self.folder / "checkpoints"}
        process = self.context.Process(target=run_member, args=(variables, log, output), kwargs=options)
        process.start()
        member = Member(name, process, log, output, joins, time.monotonic())
        self.members.append(member)
        self.running.append(member)
        return member

    def look(self) -> None:
        """Do what a launcher does, and read the logs."""
        for member in list(self.running):
            code = member.process.exitcode  # before the log, which is then complete
            member.look()
            if code is not None:
                self.running.remove(member)
                if not member.silent:
                    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
                    self.agent.ended(member.name, how, member.joins, code == 0)
                if code > 0 and not member.spared:
                    raise AssertionError(f"a member failed, see {member.output}: {member.output.read_text()[-2000:]}")
            elif member.name in self.agent.kill and not member.spared:
                member.send(signal.SIGKILL)

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        """Wait until something holds, doing what a launcher does."""
        deadline = time.monotonic() + PATIENCE
        while True:
            self.look()
            if condition():
                return
            if time.monotonic() > deadline:
                for member in self.running:
                    member.send(signal.SIGUSR2)  # it writes where it is
                time.sleep(1.0)
                raise AssertionError(f"waited {PATIENCE:g} s for {what}; see {self.folder}")
            if not self.running and not (self.folder / "end").exists():
                raise AssertionError(f"no member is left, while waiting for {what}; see {self.folder}")
            time.sleep(0.003)

    @property
    def training(self) -> list[Member]:
        return [member for member in self.running if member.training]

    @property
    def starting(self) -> list[Member]:
        return [member for member in self.running if member.starting]

    @property
    def newest(self) -> int:
        """The newest step that a running member has logged."""
        return max((member.rows[-1].step for member in self.running if member.rows), default=0)

    def end(self) -> None:
        """Let all members finish after the same step, and the rendezvous with them; kill who has not joined yet."""
        for member in self.starting:
            member.stopped = True
            member.send(signal.SIGKILL)
        (self.folder / "end").touch()
        self.wait(lambda: not self.running, "the end of all members")
        self.wait(lambda: self.rendezvous.exitcode is not None, "the end of the rendezvous")

    def close(self) -> None:
        """Kill what is left."""
        self.agent.close()
        for process in [*(member.process for member in self.members), self.rendezvous]:
            if process.exitcode is None:
                process.kill()
            process.join()


def _serve(address: str, processes: int, state: Path, output: Path, silent: float) -> None:
    _die_with_parent()
    with open(output, "a") as file:
        say = lambda message: print(f"{time.monotonic():.3f} {message}", file=file, flush=True)
        patience = Patience(silent=silent, answer=silent / 2)
        deadline = time.monotonic() + 10.0
        while True:
            try:
                sys.exit(serve(address, processes, None, state, limits=patience, log=say))
            except OSError:  # the port is not free yet
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.02)


def _die_with_parent() -> None:
    """If this program is killed, the process that forks members ends, and they with it; nothing else disturbs them."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.setsid()  # else the end of the shell that started this program wakes up who is stopped


def run_member(*arguments: Any, **options: Any) -> None:
    """What the process of a member does; it has imported all modules already."""
    from benches.fleet_member import member

    _die_with_parent()
    member(*arguments, **options)
