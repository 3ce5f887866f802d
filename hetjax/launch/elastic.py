"""Supervises the processes of an elastic run: one that ends is reported to the rendezvous, and the others go on."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable, Sequence

from hetjax.environment import CHILD, JOIN
from hetjax.fleet.registration import Agent
from hetjax.launch.supervisor import (
    HUNG,
    USAGE_ERROR,
    ChildProcess,
    ProcessSpec,
    Supervisor,
    exit_code,
    how_it_ended,
    kill,
)

STOP = signal.SIGUSR1  # ends the whole run with a checkpoint; SIGTERM and SIGINT let one member leave


class ElasticSupervisor(Supervisor):
    """Runs until the last process has ended; the exit code is that of the last one that was a member.

    Args:
        agent: reports to the rendezvous.
        replace: what to start in place of a lost process; None: nothing.
        others: arguments of `Supervisor`.
    """

    def __init__(self, agent: Agent, replace: Callable[[int], ProcessSpec | None], *others: object):
        self._agent, self._replace = agent, replace
        self._hangs: dict[int, str] = {}  # by process id
        self._chaos_at: float | None = None
        super().__init__(*others)  # type: ignore[arg-type]

    def _as_forwarded(self, number: signal.Signals) -> signal.Signals:
        return STOP

    def _note_ends(self, ended: Sequence[ChildProcess]) -> None:
        for process in ended:
            assert process.code is not None
            environment, clean = process.spec.environment, process.code == 0
            how = self._hangs.get(process.popen.pid) or how_it_ended(process.code)
            self._agent.ended(environment[CHILD], how, JOIN in environment, clean)
            outside = JOIN in environment and not clean and not process.detector.beat.begun
            if self._stopping_since is None and not self._killed and not outside:
                self._code = HUNG if process.popen.pid in self._hangs else exit_code(process.code)
            if clean or self._stopping_since is not None or self._signal_count:
                continue
            useless = process.code == USAGE_ERROR or self._agent.over
            new = None if useless else self._replace(process.number)
            self._log(f"{process.name} {how}" + ("; another one is started in its place" if new else ""))
            if new is not None:
                self._processes[process.number] = self._start(process.number, new)

    def _note_hang(self, process: ChildProcess, hang: str) -> None:
        self._hangs[process.popen.pid] = hang

    def _check_heartbeats(self, now: float) -> None:
        super()._check_heartbeats(now)
        fenced = self._agent.kill
        for process in self._running():
            if process.spec.environment[CHILD] in fenced and process.popen.pid not in self._hangs:
                process.stopped_by_us = True
                self._hangs[process.popen.pid] = "hung and was killed"
                kill(process)
        self._wreak_chaos(now)

    def _wreak_chaos(self, now: float) -> None:
        """Kill a process that takes steps, if the user wants that and it is time."""
        every, stepping = self._options.chaos, [p for p in self._running() if p.detector.beat.stepping]
        if every is None or self._signal_count or len(stepping) < 2:
            return
        if self._chaos_at is None:
            self._chaos_at = now + random.expovariate(1 / every)
        elif now >= self._chaos_at:
            self._chaos_at = None
            kill(random.choice(stepping))
