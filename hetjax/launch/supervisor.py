"""Supervises the processes of one attempt: starts them, watches them, and stops all when one of them fails."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from hetjax.launch.events import PASSED_ON, PrefixedOutput, Signals
from hetjax.launch.guard import Guard
from hetjax.launch.heartbeat import HangDetector, Listener, is_stopped
from hetjax.launch.options import Options
from hetjax.launch.quotas import CpuQuota, Throttle, kill_group
from hetjax.launch.restart_costs import RestartCosts

USAGE_ERROR = 2  # exit code of a program for a mistake of its user, which a restart would only repeat
HUNG = 124  # exit code for a hung process, as of timeout(1)
_POLL_INTERVAL = 0.05  # seconds between reads of the heartbeats
_STATE_INTERVAL = 1.0  # seconds between reads of a process's state in /proc
_BLAME_DELAY = 1.0  # seconds to wait for another process's death before the first exit code is blamed
_CHILD = Path(__file__).with_name("child.py")


@dataclass(frozen=True)
class ProcessSpec:
    """What one process is started with."""

    command: Sequence[str]
    environment: Mapping[str, str]
    listener: Listener
    quota: CpuQuota | None = None
    cores: Sequence[int] | None = None


@dataclass(frozen=True)
class AttemptResult:
    """How an attempt ended: its exit code, the processes that caused a failure, whether the launcher got a signal."""

    code: int = 0
    lost: frozenset[int] = frozenset()
    signaled: bool = False
    step: int = 0  # the newest finished one
    seen_at: float = 0.0  # last sign of life of the process that was lost, by the monotonic clock
    noticed_at: float = 0.0


@dataclass
class ChildProcess:
    """A process of the attempt."""

    number: int
    popen: subprocess.Popen[bytes]
    spec: ProcessSpec
    detector: HangDetector
    streams: dict[IO[bytes], PrefixedOutput]
    code: int | None = None
    stopped_by_us: bool = False
    state_read_at: float = 0.0

    @property
    def name(self) -> str:
        return f"process {self.number} (pid {self.popen.pid})"


class Supervisor:
    """Starts the processes and runs until the last one has ended; messages for the user are passed to `log`."""

    def __init__(
        self,
        specs: Sequence[ProcessSpec],
        options: Options,
        signals: Signals,
        guard: Guard,
        throttle: Throttle | None,
        log: Callable[[str], None],
        colored: bool = False,
        costs: RestartCosts | None = None,
    ):
        self._costs, self._seen_at, self._noticed_at = costs, 0.0, 0.0
        self._options, self._signals, self._guard, self._throttle, self._log = options, signals, guard, throttle, log
        self._colored = colored
        self._selector = selectors.DefaultSelector()
        self._selector.register(signals, selectors.EVENT_READ)
        self._code, self._lost = 0, set[int]()
        self._signal_count, self._killed, self._output_closed = 0, False, False
        self._stopping_since: float | None = None
        self._failed, self._failed_since = list[ChildProcess](), 0.0
        self._processes: list[ChildProcess] = []
        try:
            for number, spec in enumerate(specs):
                self._processes.append(self._start(number, spec))
        except BaseException:
            self.close()
            raise

    def run(self) -> AttemptResult:
        """Wait for all processes to end, forwarding output and signals."""
        try:
            while self._running():
                self._read(_POLL_INTERVAL)
                self._forward(self._signals.take())
                self._reap()
                self._check_heartbeats(time.monotonic())
                self._enforce_grace(time.monotonic())
        finally:
            self.close()
        step = max(process.detector.beat.step for process in self._processes)
        signaled = self._signal_count > 0
        return AttemptResult(self._code, frozenset(self._lost), signaled, step, self._seen_at, self._noticed_at)

    def close(self) -> None:
        """Kill the processes that still run."""
        for process in self._processes:
            if process.code is None:
                kill(process)
                process.code = process.popen.wait()
                self._clean_up(process)
        self._selector.close()

    def _start(self, number: int, spec: ProcessSpec) -> ChildProcess:
        group = "-" if spec.quota is None else str(spec.quota.path / "cgroup.procs")
        cores = "-" if spec.cores is None else ",".join(map(str, spec.cores))
        popen = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_CHILD), str(os.getpid()), group, cores, *spec.command],
            env=dict(spec.environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self._guard.send("+group", popen.pid)
        assert popen.stdout is not None
        assert popen.stderr is not None
        streams = {
            popen.stdout: PrefixedOutput(number, sys.stdout.buffer, self._colored),
            popen.stderr: PrefixedOutput(number, sys.stderr.buffer, self._colored),
        }
        detector = HangDetector(self._options.silent_limit, self._options.step_limit)
        process = ChildProcess(number, popen, spec, detector, streams)
        for stream in streams:
            os.set_blocking(stream.fileno(), False)
            self._selector.register(stream, selectors.EVENT_READ, process)
        return process

    def _running(self) -> list[ChildProcess]:
        return [process for process in self._processes if process.code is None]

    def _read(self, timeout: float) -> None:
        for key, _ in self._selector.select(timeout):
            if key.data is not None:
                self._read_from(key.data, key.fileobj)  # type: ignore[arg-type]

    def _read_from(self, process: ChildProcess, stream: IO[bytes]) -> bool:
        """Forward what the stream has; returns whether there was something, end of file included."""
        data = stream.read(1 << 16)
        if data is None:
            return False
        self._write(process.streams[stream], data)
        if not data:
            self._close_stream(stream)
        return True

    def _write(self, output: PrefixedOutput, data: bytes) -> None:
        """Write a process's output; empty data means its end."""
        if self._output_closed:
            return
        try:
            output.feed(data) if data else output.close()
        except BrokenPipeError:  # the reader of our output is gone, and with it the purpose of the run
            self._output_closed = True
            self._fail(128 + signal.SIGPIPE, "the output was closed")

    def _close_stream(self, stream: IO[bytes]) -> None:
        self._selector.unregister(stream)
        stream.close()

    def _forward(self, numbers: Sequence[signal.Signals]) -> None:
        for number in numbers:
            self._signal_count += 1
            if self._signal_count > 2:
                self._log(f"{number.name} is the third signal: killing all processes")
                self._code = self._code or 128 + number
                self._kill_all()
                return
            self._log(f"forwarding {number.name} to all processes")
            for process in self._running():
                process.popen.send_signal(self._as_forwarded(number))

    def _as_forwarded(self, number: signal.Signals) -> signal.Signals:
        """The signal that processes get when the launcher gets this one."""
        return number

    def _reap(self) -> None:
        ended = [process for process in self._running() if process.popen.poll() is not None]
        for process in ended:
            process.code = process.popen.returncode
            self._clean_up(process)
        self._note_ends(ended)

    def _note_ends(self, ended: Sequence[ChildProcess]) -> None:
        """Act on processes that have ended: a failure ends the others."""
        failed = [process for process in ended if process.code and not process.stopped_by_us]
        if failed and not self._failed:
            self._failed_since = time.monotonic()
        self._failed += failed
        self._lost |= {process.number for process in failed if process.code == -signal.SIGKILL}
        if self._failed and not self._code:
            self._blame(min(self._failed, key=_cause_order))

    def _blame(self, process: ChildProcess) -> None:
        """Take a process as the cause of the failure.

        The peers of a killed process may fail, and end, before its own death is visible. So an exit code is not blamed
        at once while other processes run.
        """
        assert process.code is not None
        certain = process.code < 0 and process.code != -signal.SIGABRT
        if not certain and self._running() and time.monotonic() - self._failed_since < _BLAME_DELAY:
            return
        code = exit_code(process.code)
        if self._signal_count and (process.code > 0 or -process.code in PASSED_ON):
            self._code = code
        else:
            self._lost.add(process.number)
            self._fail(code, f"{process.name} {how_it_ended(process.code)}")

    def _clean_up(self, process: ChildProcess) -> None:
        """Forward the rest of an ended process's output, and kill the processes that it left behind."""
        kill(process)
        self._guard.send("-group", process.popen.pid)
        if process.spec.quota is not None:
            kill_group(process.spec.quota.path)
        deadline = time.monotonic() + 1.0
        for stream, output in process.streams.items():
            while not stream.closed and time.monotonic() < deadline:
                if not self._read_from(process, stream):
                    time.sleep(0.002)
            if not stream.closed:  # held open by a descendant outside of the process group
                self._write(output, b"")
                self._close_stream(stream)

    def _check_heartbeats(self, now: float) -> None:
        """Read all heartbeats, update the quotas, and fail if a process hangs."""
        for process in self._processes:
            stopped = process.detector.stopped
            if process.code is None and now - process.state_read_at >= _STATE_INTERVAL:
                process.state_read_at, stopped = now, is_stopped(process.popen.pid)
            process.detector.update(process.spec.listener.read(), now, stopped)
        beats_P = [process.detector.beat for process in self._processes]
        if self._costs is not None and (costs := self._costs.update(beats_P, now)) is not None:
            self._log(costs)
        if self._throttle is not None:
            self._throttle.update(beats_P, [process.code is None for process in self._processes])
        for process, beat in zip(self._processes, beats_P, strict=True):
            process.spec.listener.acknowledge(beat)
        if self._stopping_since is not None:
            return
        for process in self._running():
            hang = process.detector.hang(now)
            if hang is not None:
                process.stopped_by_us = True
                self._lost.add(process.number)
                kill(process)
                self._note_hang(process, hang)
                return

    def _note_hang(self, process: ChildProcess, hang: str) -> None:
        """Act on a process that hung and was killed."""
        self._fail(HUNG, f"{process.name} {hang}")

    def _fail(self, code: int, reason: str) -> None:
        """The run has failed: terminate the other processes, which are killed after the grace period."""
        self._code = code
        others = [process for process in self._running() if not process.stopped_by_us]
        self._log(reason + ("; stopping the others" if others else ""))
        self._stopping_since = self._noticed_at = time.monotonic()
        seen = [process.detector.seen_at for process in self._processes if process.number in self._lost]
        self._seen_at = min((at for at in seen if at is not None), default=self._noticed_at)
        for process in others:
            process.stopped_by_us = True
            process.popen.terminate()

    def _enforce_grace(self, now: float) -> None:
        if self._stopping_since is not None and now - self._stopping_since > self._options.grace and not self._killed:
            self._kill_all()

    def _kill_all(self) -> None:
        self._killed = True
        for process in self._running():
            process.stopped_by_us = True
            kill(process)


def kill(process: ChildProcess) -> None:
    """Kill a process's group: the process, if it still runs, and its descendants."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.popen.pid, signal.SIGKILL)


def _cause_order(process: ChildProcess) -> int:
    """Killed and crashed processes first, then exit codes, then aborts: JAX aborts when it loses a peer."""
    code = process.code or 0
    return 0 if code < 0 and code != -signal.SIGABRT else 1 if code > 0 else 2


def exit_code(code: int) -> int:
    """The exit code for the exit code of a process, as a shell has it."""
    return code if code >= 0 else 128 - code


def how_it_ended(code: int) -> str:
    """A process's exit code in words that follow its name."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
