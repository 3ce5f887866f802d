"""CPU quotas: control groups (cgroup v1 or v2) that limit processes to a share of cores, changed while they run.

    with CpuQuota("worker0") as quota:
        quota.add(process.pid)
        quota.set(0.4)      # cores; None removes the limit

A group's name carries the process id of its creator, so that the next launcher finds and removes the groups of one
that was killed.
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

PERIOD_US = 10_000  # short enough to throttle smoothly
MIN_QUOTA_US = 1_000  # the kernel rejects quotas below one millisecond
ADVICE = (
    "Run as root, or in a delegated group: "
    "`systemd-run --user --scope -p Delegate=yes python -m hetjax launch ...` (cgroup v2), in a container with "
    "`--privileged` or /sys/fs/cgroup mounted writable."
)
_NAME = re.compile(r"hetjax-(\d+)-")
_serial = count()


class QuotasRefused(OSError):
    """CPU quotas cannot be set here; the message says why and what to do."""


@dataclass(frozen=True)
class Disturbance:
    """Quotas that apply from a step on."""

    step: int
    cores_P: tuple[float, ...]


class Throttle:
    """Keeps the quota of every process up to date during a run.

    A quota applies while its process takes steps, and changes at the steps of the disturbances, counted by process 0.
    Outside of `fit` (compiling, evaluating) there is no limit, unless `from_start`. Each `fit` of process 0 starts with
    the first quotas again. Changes are passed to `log`.
    """

    def __init__(
        self,
        quotas_P: Sequence[CpuQuota],
        cores_P: Sequence[float | None],
        disturbances: Sequence[Disturbance] = (),
        *,
        from_start: bool = False,
        log: Callable[[str], None] = lambda message: None,
    ):
        self._quotas_P, self._first_P = list(quotas_P), list(cores_P)
        self._disturbances, self._from_start, self._log = list(disturbances), from_start, log
        self._current_P, self._pending, self._begun = list(cores_P), list(disturbances), 0

    def update(self, beats_P: Sequence[Beat], running_P: Sequence[bool]) -> None:
        """Set the quotas that the latest heartbeats call for; processes that have ended are skipped."""
        leader = beats_P[0]
        if leader.begun != self._begun:
            self._begun, self._current_P, self._pending = leader.begun, list(self._first_P), list(self._disturbances)
        while self._pending and leader.stepping and leader.step >= self._pending[0].step:
            disturbance = self._pending.pop(0)
            self._current_P = list(disturbance.cores_P)
            self._log(f"step {leader.step}: quotas are now {', '.join(f'{c:g}' for c in disturbance.cores_P)} cores")
        for quota, cores, beat, running in zip(self._quotas_P, self._current_P, beats_P, running_P, strict=True):
            limit = cores if self._from_start or beat.stepping else None
            if running and quota.cores != limit:
                quota.set(limit)


class CpuQuota:
    """One control group. Raises QuotasRefused, with advice, where groups cannot be created or written."""

    def __init__(self, name: str, root: CgroupRoot | None = None):
        self.root = root or find_cgroup_root()
        self.path = self.root.path / f"hetjax-{os.getpid()}-{next(_serial)}-{name}"
        self.cores: float | None = None
        with _refusals(self.path):
            self.path.mkdir()

    def set(self, cores: float | None) -> None:
        """Limit the group to this many cores' worth of CPU time; None removes the limit."""
        check_cores(cores)
        period = PERIOD_US if cores is None else max(PERIOD_US, round(MIN_QUOTA_US / cores))
        quota = None if cores is None else max(MIN_QUOTA_US, round(cores * period))
        with _refusals(self.path):
            if self.root.version == 2:
                (self.path / "cpu.max").write_text(f"{'max' if quota is None else quota} {period}")
            else:
                if (self.path / "cpu.cfs_period_us").read_text().strip() != str(period):
                    # Without a limit in between, the new period is valid whatever the old quota.
                    (self.path / "cpu.cfs_quota_us").write_text("-1")
                    (self.path / "cpu.cfs_period_us").write_text(str(period))
                (self.path / "cpu.cfs_quota_us").write_text(str(-1 if quota is None else quota))
        self.cores = cores

    def add(self, pid: int) -> None:
        """Move a process with all its threads into the group; its future children start there."""
        with _refusals(self.path):
            (self.path / "cgroup.procs").write_text(str(pid))

    def pids(self) -> list[int]:
        """The processes in the group."""
        return [int(line) for line in (self.path / "cgroup.procs").read_text().split()]

    def remove(self) -> None:
        """Remove the group; its remaining processes move to the parent group, without a limit."""
        with suppress(FileNotFoundError):
            for pid in self.pids():
                with suppress(OSError):  # it may have ended by now
                    (self.root.path / "cgroup.procs").write_text(str(pid))
            _rmdir(self.path)

    def __enter__(self) -> CpuQuota:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def check_cores(cores: float | None) -> None:
    """Raise ValueError unless `cores` is a quota that a group can have."""
    if cores is not None and not 0.001 <= cores <= 4096:
        raise ValueError(f"A quota is a number of cores from 0.001 up, such as 0.5; got {cores}.")


def remove_stale(root: CgroupRoot | None = None) -> list[str]:
    """Remove the groups of dead launchers, with the processes in them; returns the groups' names."""
    root = root or find_cgroup_root()
    removed = []
    for path in root.path.glob("hetjax-*"):
        match = _NAME.match(path.name)
        if match is None or _is_alive(int(match[1])):
            continue
        kill_group(path)
        removed.append(path.name)
    return removed


def kill_group(path: Path) -> None:
    """Kill every process in a control group and remove the group."""
    with suppress(FileNotFoundError):
        for pid in _words(path / "cgroup.procs"):
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        _rmdir(path)


@dataclass(frozen=True)
class CgroupRoot:
    """A control group in which this process may create others, and its cgroup version."""

    path: Path
    version: int


def find_cgroup_root(proc: Path = Path("/proc/self")) -> CgroupRoot:
    """The group to create groups in: under v1 this process's own, under v2 the nearest that delegates `cpu`.

    If none delegates it, the nearest that can be made to. cgroup v2 allows no process in a group whose children have
    controllers: a process alone in its group first moves itself into a child group, and back at exit; one that is not
    alone searches further up.
    """
    try:
        mounts, groups = (proc / "mounts").read_text(), (proc / "cgroup").read_text()
    except OSError as error:
        raise QuotasRefused(f"CPU quotas need Linux's control groups, and there are none here ({error}).") from error
    reasons = []
    for root in _candidates(mounts, groups):
        try:
            _try(root)
        except OSError as error:
            reasons.append(str(error))
            continue
        return root
    reason = reasons[0] if reasons else "no cgroup file system with the cpu controller is mounted"
    raise QuotasRefused(f"CPU quotas cannot be set here: {reason}. {ADVICE}")


def launcher_group(root: Path) -> Path:
    """The child group for a launcher that was alone in `root`; see `find_cgroup_root`."""
    return root / f"hetjax-{os.getpid()}-launcher"


def leave_launcher_group(group: Path) -> None:
    """Move the processes of a launcher's group back to its parent, which stops delegating `cpu`; remove the group."""
    parent = group.parent
    with suppress(OSError):  # groups of other programs may still need the controller: then nothing is undone
        (parent / "cgroup.subtree_control").write_text("-cpu")
        for pid in _words(group / "cgroup.procs"):
            (parent / "cgroup.procs").write_text(pid)
        group.rmdir()


def _candidates(mounts: str, groups: str) -> Iterator[CgroupRoot]:
    own: dict[str, str] = {}
    for line in groups.splitlines():
        _, controllers, group = line.split(":", 2)
        own |= dict.fromkeys(controllers.split(","), group)
    for line in mounts.splitlines():
        _, mount_point, kind, options = line.split(" ")[:4]
        mount = Path(mount_point.replace("\\040", " "))
        if kind == "cgroup" and "cpu" in options.split(",") and "cpu" in own:
            path = mount / own["cpu"].lstrip("/")
            yield CgroupRoot(path if path.is_dir() else mount, 1)  # a container may see only its own subtree
        elif kind == "cgroup2" and "" in own:
            path = mount / own[""].lstrip("/")
            path = path if path.is_dir() else mount
            ancestors = [group for group in (path, *path.parents) if group.is_relative_to(mount)]
            able = [group for group in ancestors if "cpu" in _words(group / "cgroup.controllers")]
            # Groups that delegate already come first: nothing has to be changed there.
            able.sort(key=lambda group: "cpu" not in _words(group / "cgroup.subtree_control"))
            yield from (CgroupRoot(group, 2) for group in able)


def _try(root: CgroupRoot) -> None:
    """Create and remove a group there; raises OSError where that is not allowed."""
    if root.version == 2:
        _delegate_cpu(root.path)
    trial = root.path / f"hetjax-{os.getpid()}-trial"
    trial.mkdir()
    try:
        limit = trial / ("cpu.max" if root.version == 2 else "cpu.cfs_quota_us")
        if not limit.exists():
            raise FileNotFoundError(f"{limit} is missing")
    finally:
        trial.rmdir()


def _delegate_cpu(path: Path) -> None:
    """Enable the cpu controller for the children of a v2 group."""
    control = path / "cgroup.subtree_control"
    if "cpu" in _words(control):
        return
    if _words(path / "cgroup.procs") != [str(os.getpid())]:
        control.write_text("+cpu")
        return
    group = launcher_group(path)
    group.mkdir(exist_ok=True)
    (group / "cgroup.procs").write_text(str(os.getpid()))
    try:
        control.write_text("+cpu")
    except OSError:
        (path / "cgroup.procs").write_text(str(os.getpid()))
        group.rmdir()
        raise
    atexit.register(leave_launcher_group, group)


def _words(path: Path) -> list[str]:
    return path.read_text().split()


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _rmdir(path: Path, limit: float = 5.0) -> None:
    """Remove a group, retrying: one that was just emptied is busy for some milliseconds."""
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
def _refusals(path: Path) -> Iterator[None]:
    """Turns errors of a control group's files into QuotasRefused."""
    try:
        yield
    except OSError as error:
        raise QuotasRefused(f"The kernel refused a CPU quota in {path}: {error.strerror or error}.") from error
