"""CPU quotas: a control group per process that gets so many cores' worth of time, changed while it runs.

    with CpuQuota("worker0") as quota:
        quota.add(process.pid)
        quota.set(0.4)      # cores; None for no limit

The period is 10 ms, which throttles smoothly. A group's name carries the process id of who made it, so that those of
a launcher that was killed are found and removed by the next one.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

from hetjax.launch.cgroups import Home, QuotasRefused, find_home

PERIOD_US = 10_000
LEAST_US = 1_000  # the kernel takes no quota below a millisecond
_NAME = re.compile(r"hetjax-(\d+)-")
_numbers = count()


class CpuQuota:
    """One control group. Raises QuotasRefused, with what to do, where groups cannot be made or set."""

    def __init__(self, name: str, home: Home | None = None):
        self.home = home or find_home()
        self.path = self.home.path / f"hetjax-{os.getpid()}-{next(_numbers)}-{name}"
        self.cores: float | None = None
        with _explained(self.path):
            self.path.mkdir()

    def set(self, cores: float | None) -> None:
        """From now on at most so many cores' worth of CPU time; None lifts the limit."""
        check_cores(cores)
        period = PERIOD_US if cores is None else max(PERIOD_US, round(LEAST_US / cores))
        quota = None if cores is None else max(LEAST_US, round(cores * period))
        with _explained(self.path):
            if self.home.version == 2:
                (self.path / "cpu.max").write_text(f"{'max' if quota is None else quota} {period}")
            else:
                if (self.path / "cpu.cfs_period_us").read_text().strip() != str(period):
                    (self.path / "cpu.cfs_quota_us").write_text("-1")  # no limit in between, whatever the order
                    (self.path / "cpu.cfs_period_us").write_text(str(period))
                (self.path / "cpu.cfs_quota_us").write_text(str(-1 if quota is None else quota))
        self.cores = cores

    def add(self, pid: int) -> None:
        """Move a process with all its threads in; its later children are in as well."""
        with _explained(self.path):
            (self.path / "cgroup.procs").write_text(str(pid))

    def pids(self) -> list[int]:
        return [int(line) for line in (self.path / "cgroup.procs").read_text().split()]

    def throttled_s(self) -> float:
        """Seconds its threads were held back so far."""
        stat = dict(line.split() for line in (self.path / "cpu.stat").read_text().splitlines())
        return int(stat["throttled_usec"]) / 1e6 if "throttled_usec" in stat else int(stat["throttled_time"]) / 1e9

    def remove(self) -> None:
        """Take the group away; whoever is still in it goes back to the group above, without a limit."""
        with suppress(FileNotFoundError):
            for pid in self.pids():
                with suppress(OSError):  # it may have ended by now
                    (self.home.path / "cgroup.procs").write_text(str(pid))
            _rmdir(self.path)

    def __enter__(self) -> CpuQuota:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def check_cores(cores: float | None) -> None:
    if cores is not None and not 0.001 <= cores <= 4096:
        raise ValueError(f"A quota is a number of cores from 0.001 up, such as 0.5; got {cores}.")


def remove_stale(home: Home | None = None) -> list[str]:
    """Remove the groups of launchers that are dead, ending what still runs in them; their names."""
    home = home or find_home()
    removed = []
    for path in home.path.glob("hetjax-*"):
        found = _NAME.match(path.name)
        if found is None or _lives(int(found[1])):
            continue
        end_group(path)
        removed.append(path.name)
    return removed


def end_group(path: Path) -> None:
    """Kill every process in a group and remove it."""
    with suppress(FileNotFoundError):
        for pid in (path / "cgroup.procs").read_text().split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        _rmdir(path)


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _rmdir(path: Path, limit: float = 5.0) -> None:
    """A group that was just emptied counts as busy for some milliseconds."""
    deadline = time.monotonic() + limit
    while True:
        try:
            path.rmdir()
        except FileNotFoundError:
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)
        else:
            return


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Turns an error of the control group's files into a sentence."""
    try:
        yield
    except OSError as error:
        raise QuotasRefused(f"The kernel refused a CPU quota in {path}: {error.strerror or error}.") from error
