"""The processes of one attempt: started together, watched, and ended together when one of them fails."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from hetjax.launch.guard import Guard
from hetjax.launch.heartbeat import HangDetector, Listener, is_stopped
from hetjax.launch.options import Options
from hetjax.launch.output import PrefixedOutput
from hetjax.launch.quotas import CpuQuota, Throttle, end_group
from hetjax.launch.signals import PASSED_ON, Signals

HUNG = 124  # the exit code for a process that gave no sign of life, as of timeout(1)
_TURN = 0.05  # seconds between looks at the heartbeats
_LOOK_AT_STATE = 1.0
_SECOND_THOUGHTS = 1.0  # seconds between a process that ended in error and the verdict that it was the first
_CHILD = Path(__file__).with_name("child.py")


@dataclass(frozen=True)
class Member:
    """What one process is started with."""

    command: Sequence[str]
    environment: Mapping[str, str]
    listener: Listener
    quota: CpuQuota | None = None
    cores: Sequence[int] | None = None


@dataclass(frozen=True)
class Ending:
    """How an attempt ended: the exit code, why, whose fault it was, and whether somebody asked for the end."""

    code: int = 0
    why: str = ""
    lost: frozenset[int] = frozenset()
    asked: bool = False


@dataclass
class _Process:
    number: int
    popen: subprocess.Popen[bytes]
    member: Member
    pulse: HangDetector
    streams: dict[IO[bytes], PrefixedOutput]
    code: int | None = None
    ours: bool = False  # whether we ended it
    looked: float = field(default=0.0)

    @property
    def name(self) -> str:
        return f"process {self.number} (pid {self.popen.pid})"


class Team:
    """Runs until the last process has ended; `say` is told what a person should know."""

    def __init__(
        self,
        members: Sequence[Member],
        options: Options,
        signals: Signals,
        guard: Guard,
        throttle: Throttle | None,
        say: Callable[[str], None],
        colored: bool = False,
    ):
        self._options, self._signals, self._guard, self._throttle, self._say = options, signals, guard, throttle, say
        self._colored = colored
        self._selector = selectors.DefaultSelector()
        self._selector.register(signals, selectors.EVENT_READ)
        self._code, self._why, self._lost = 0, "", set[int]()
        self._asked, self._killed, self._deaf = 0, False, False
        self._ending_since: float | None = None
        self._failed, self._failed_since = list[_Process](), 0.0
        self._processes: list[_Process] = []
        try:
            for number, member in enumerate(members):
                self._processes.append(self._start(number, member))
        except BaseException:
            self.close()
            raise

    def _start(self, number: int, member: Member) -> _Process:
        group = "-" if member.quota is None else str(member.quota.path / "cgroup.procs")
        cores = "-" if member.cores is None else ",".join(map(str, member.cores))
        popen = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_CHILD), str(os.getpid()), group, cores, *member.command],
            env=dict(member.environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self._guard.tell("+group", popen.pid)
        assert popen.stdout is not None
        assert popen.stderr is not None
        streams = {
            popen.stdout: PrefixedOutput(number, sys.stdout.buffer, self._colored),
            popen.stderr: PrefixedOutput(number, sys.stderr.buffer, self._colored),
        }
        pulse = HangDetector(self._options.silent_limit, self._options.step_limit)
        process = _Process(number, popen, member, pulse, streams)
        for stream in streams:
            os.set_blocking(stream.fileno(), False)
            self._selector.register(stream, selectors.EVENT_READ, process)
        return process

    def run(self) -> Ending:
        """Wait for the end, passing output and signals on."""
        try:
            while self._running():
                self._read(_TURN)
                self._pass_on(self._signals.taken())
                self._reap()
                self._look(time.monotonic())
                self._press(time.monotonic())
        finally:
            self.close()
        return Ending(self._code, self._why, frozenset(self._lost), self._asked > 0)

    def close(self) -> None:
        """Whatever still runs is killed."""
        for process in self._processes:
            if process.code is None:
                _kill(process)
                process.code = process.popen.wait()
                self._bury(process)
        self._selector.close()

    def _running(self) -> list[_Process]:
        return [process for process in self._processes if process.code is None]

    def _read(self, timeout: float) -> None:
        for key, _ in self._selector.select(timeout):
            if key.data is not None:
                self._read_from(key.data, key.fileobj)  # type: ignore[arg-type]

    def _read_from(self, process: _Process, stream: IO[bytes]) -> bool:
        """Whether there was something, the end included."""
        data = stream.read(1 << 16)
        if data is None:
            return False
        self._pass(process.streams[stream], data)
        if not data:
            self._forget(stream)
        return True

    def _pass(self, lines: PrefixedOutput, data: bytes) -> None:
        """Output on its way; no data means its end."""
        if self._deaf:
            return
        try:
            lines.feed(data) if data else lines.close()
        except BrokenPipeError:  # whoever read our output has gone: nobody is left to work for
            self._deaf = True
            self._fail(128 + signal.SIGPIPE, "the output was closed")

    def _forget(self, stream: IO[bytes]) -> None:
        self._selector.unregister(stream)
        stream.close()

    def _pass_on(self, numbers: Sequence[signal.Signals]) -> None:
        for number in numbers:
            self._asked += 1
            if self._asked > 2:
                self._say(f"{number.name} for the third time: all processes are killed")
                self._code = self._code or 128 + number
                self._kill_all()
                return
            self._say(f"{number.name} is passed on to all processes")
            for process in self._running():
                process.popen.send_signal(number)

    def _reap(self) -> None:
        died = [process for process in self._running() if process.popen.poll() is not None]
        for process in died:
            process.code = process.popen.returncode
            self._bury(process)
        failed = [process for process in died if process.code and not process.ours]
        if failed and not self._failed:
            self._failed_since = time.monotonic()
        self._failed += failed
        self._lost |= {process.number for process in failed if process.code == -signal.SIGKILL}
        if self._failed and not self._code:
            self._judge(min(self._failed, key=_causes_first))

    def _judge(self, process: _Process) -> None:
        """Whose fault it was. A killed process's neighbors may lose it, and end, before it can be seen to be dead:
        so nobody is blamed for an error at once, as long as others run."""
        assert process.code is not None
        decided = process.code < 0 and process.code != -signal.SIGABRT
        if not decided and self._running() and time.monotonic() - self._failed_since < _SECOND_THOUGHTS:
            return
        code, why = _exit_code(process.code), f"{process.name} {_how(process.code)}"
        if self._asked and (process.code > 0 or -process.code in PASSED_ON):
            self._code, self._why = code, why
        else:
            self._lost.add(process.number)
            self._fail(code, why)

    def _bury(self, process: _Process) -> None:
        """A dead process's last words are passed on, and what it started and left behind is ended."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.popen.pid, signal.SIGKILL)
        self._guard.tell("-group", process.popen.pid)
        if process.member.quota is not None:
            end_group(process.member.quota.path)
        deadline = time.monotonic() + 1.0
        for stream, lines in process.streams.items():
            while not stream.closed and time.monotonic() < deadline:
                if not self._read_from(process, stream):
                    time.sleep(0.002)
            if not stream.closed:  # held open by a process that had left the group
                self._pass(lines, b"")
                self._forget(stream)

    def _look(self, now: float) -> None:
        """Hear all heartbeats; set quotas; find who is hung."""
        for process in self._processes:
            stopped = process.pulse.stopped
            if process.code is None and now - process.looked >= _LOOK_AT_STATE:
                process.looked, stopped = now, is_stopped(process.popen.pid)
            process.pulse.hear(process.member.listener.read(), now, stopped)
        beats_P = [process.pulse.beat for process in self._processes]
        if self._throttle is not None:
            self._throttle.follow(beats_P, [process.code is None for process in self._processes])
        for process, beat in zip(self._processes, beats_P, strict=True):
            process.member.listener.answer(beat)
        if self._ending_since is not None:
            return
        for process in self._running():
            complaint = process.pulse.complaint(now)
            if complaint is not None:
                process.ours = True
                self._lost.add(process.number)
                _kill(process)
                self._fail(HUNG, f"{process.name} {complaint}")
                return

    def _fail(self, code: int, why: str) -> None:
        """The run has failed: everybody else is asked to end, and will be made to."""
        self._code, self._why = code, why
        others = [process for process in self._running() if not process.ours]
        self._say(why + ("; the others are ended" if others else ""))
        self._ending_since = time.monotonic()
        for process in others:
            process.ours = True
            process.popen.terminate()

    def _press(self, now: float) -> None:
        if self._ending_since is not None and now - self._ending_since > self._options.grace and not self._killed:
            self._kill_all()

    def _kill_all(self) -> None:
        self._killed = True
        for process in self._running():
            process.ours = True
            _kill(process)


def _kill(process: _Process) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.popen.pid, signal.SIGKILL)


def _causes_first(process: _Process) -> int:
    """The killed and crashed before those that only lost them."""
    code = process.code or 0
    return 0 if code < 0 and code != -signal.SIGABRT else 1 if code > 0 else 2


def _exit_code(code: int) -> int:
    return code if code > 0 else 128 - code


def _how(code: int) -> str:
    if code > 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
