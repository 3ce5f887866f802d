"""CPU quotas: control groups that limit a process to a share of cores, changed while it runs.

Where this process may make control groups that limit CPU time: cgroup v1 or v2, found from the mounts.

CPU quotas: a control group per process that gets so many cores' worth of time, changed while it runs.

    with CpuQuota("worker0") as quota:
        quota.add(process.pid)
        quota.set(0.4)      # cores; None for no limit

The period is 10 ms, which throttles smoothly. A group's name carries the process id of who made it, so that those of
a launcher that was killed are found and removed by the next one.

The CPU quotas of a run: each holds while its process takes steps, and changes at the steps that were named.
"""

from __future__ import annotations

import atexit
import os
import re
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from hetjax.launch.heartbeat import Beat

HOW = (
    "Run as root, or in a group that is yours to divide: "
    "`systemd-run --user --scope -p Delegate=yes python -m hetjax launch ...` (cgroup v2), in a container with "
    "`--privileged` or /sys/fs/cgroup mounted writable."
)


class QuotasRefused(OSError):
    """CPU quotas cannot be set here; the message says why and what to do."""


@dataclass(frozen=True)
class CgroupRoot:
    """A group that new ones can be made in, and the version of its interface."""

    path: Path
    version: int


def find_home(proc: Path = Path("/proc/self")) -> CgroupRoot:
    """The group to make groups in: this process's own under v1; under v2 the nearest that hands `cpu` on.

    Where none does, the nearest that can be made to. Version 2 allows no process in a group whose children have
    controllers, so a process alone in its group makes itself a child first, and steps back at its end; one that is not
    alone looks further up.
    """
    try:
        mounts, groups = (proc / "mounts").read_text(), (proc / "cgroup").read_text()
    except OSError as error:
        raise QuotasRefused(f"CPU quotas need Linux's control groups, and there are none here ({error}).") from error
    reasons = []
    for home in _candidates(mounts, groups):
        try:
            _try(home)
        except OSError as error:
            reasons.append(str(error))
            continue
        return home
    why = reasons[0] if reasons else "no cgroup file system with the cpu controller is mounted"
    raise QuotasRefused(f"CPU quotas cannot be set here: {why}. {HOW}")


def _candidates(mounts: str, groups: str) -> Iterator[CgroupRoot]:
    own: dict[str, str] = {}
    for line in groups.splitlines():
        _, controllers, group = line.split(":", 2)
        own |= dict.fromkeys(controllers.split(","), group)
    for line in mounts.splitlines():
        _, where, kind, options = line.split(" ")[:4]
        where = where.replace("\\040", " ")
        if kind == "cgroup" and "cpu" in options.split(",") and "cpu" in own:
            path = Path(where) / own["cpu"].lstrip("/")
            yield CgroupRoot(path if path.is_dir() else Path(where), 1)  # a container may see only its own part
        elif kind == "cgroup2" and "" in own:
            root, here = Path(where), Path(where) / own[""].lstrip("/")
            here = here if here.is_dir() else root
            above = [path for path in (here, *here.parents) if path.is_relative_to(root)]
            able = [path for path in above if "cpu" in _words(path / "cgroup.controllers")]
            able.sort(key=lambda path: "cpu" not in _words(path / "cgroup.subtree_control"))  # as they are, if possible
            yield from (CgroupRoot(path, 2) for path in able)


def _words(path: Path) -> list[str]:
    return path.read_text().split()


def _try(home: CgroupRoot) -> None:
    """Make a group there and take it away; raises OSError where that is not allowed."""
    if home.version == 2:
        _hand_cpu_on(home.path)
    trial = home.path / f"hetjax-{os.getpid()}-trial"
    trial.mkdir()
    try:
        limit = trial / ("cpu.max" if home.version == 2 else "cpu.cfs_quota_us")
        if not limit.exists():
            raise FileNotFoundError(f"{limit} is missing")
    finally:
        trial.rmdir()


def launchers_own(home: Path) -> Path:
    """The child that a process alone in its group makes for itself."""
    return home / f"hetjax-{os.getpid()}-launcher"


def step_back(inside: Path) -> None:
    """Undo that: the group above hands `cpu` on no longer, takes back whoever is in the child, and the child goes."""
    above = inside.parent
    with suppress(OSError):  # somebody else's groups may still need the controller: then all stays as it is
        (above / "cgroup.subtree_control").write_text("-cpu")
        for pid in _words(inside / "cgroup.procs"):
            (above / "cgroup.procs").write_text(pid)
        inside.rmdir()


def _hand_cpu_on(path: Path) -> None:
    """Give the children of a v2 group the cpu controller, if they lack it."""
    control = path / "cgroup.subtree_control"
    if "cpu" in _words(control):
        return
    if _words(path / "cgroup.procs") != [str(os.getpid())]:
        control.write_text("+cpu")
        return
    inside = launchers_own(path)
    inside.mkdir(exist_ok=True)
    (inside / "cgroup.procs").write_text(str(os.getpid()))
    try:
        control.write_text("+cpu")
    except OSError:
        (path / "cgroup.procs").write_text(str(os.getpid()))
        inside.rmdir()
        raise
    atexit.register(step_back, inside)


PERIOD_US = 10_000
LEAST_US = 1_000  # the kernel takes no quota below a millisecond
_NAME = re.compile(r"hetjax-(\d+)-")
_numbers = count()


class CpuQuota:
    """One control group. Raises QuotasRefused, with what to do, where groups cannot be made or set."""

    def __init__(self, name: str, home: CgroupRoot | None = None):
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


def remove_stale(home: CgroupRoot | None = None) -> list[str]:
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


@dataclass(frozen=True)
class Disturbance:
    """Quotas that hold from a step on."""

    step: int
    cores_P: tuple[float, ...]


class Throttle:
    """Keeps every process's group at the quota that is due.

    Between `fit`s (compiling, testing) there is no limit, unless `from_start`. A further `fit` of process 0 begins with
    the first quotas again. `say` is told what changes.
    """

    def __init__(
        self,
        quotas_P: Sequence[CpuQuota],
        cores_P: Sequence[float | None],
        disturbances: Sequence[Disturbance] = (),
        *,
        from_start: bool = False,
        say: Callable[[str], None] = lambda told: None,
    ):
        self._quotas_P, self._first_P = list(quotas_P), list(cores_P)
        self._disturbances, self._from_start, self._say = list(disturbances), from_start, say
        self._due_P, self._left, self._begun = list(cores_P), list(disturbances), 0

    def follow(self, beats_P: Sequence[Beat], running_P: Sequence[bool]) -> None:
        """Set what is due by the processes' beats; those that have ended are left alone."""
        leader = beats_P[0]
        if leader.begun != self._begun:
            self._begun, self._due_P, self._left = leader.begun, list(self._first_P), list(self._disturbances)
        while self._left and leader.stepping and leader.step >= self._left[0].step:
            disturbance = self._left.pop(0)
            self._due_P = list(disturbance.cores_P)
            self._say(f"step {leader.step}: quotas are now {', '.join(f'{c:g}' for c in disturbance.cores_P)} cores")
        for quota, cores, beat, running in zip(self._quotas_P, self._due_P, beats_P, running_P, strict=True):
            due = cores if self._from_start or beat.stepping else None
            if running and quota.cores != due:
                quota.set(due)
