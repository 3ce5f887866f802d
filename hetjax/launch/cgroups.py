"""Where this process may make control groups that limit CPU time: cgroup v1 or v2, found from the mounts."""

from __future__ import annotations

import atexit
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

HOW = (
    "Run as root, or in a group that is yours to divide: "
    "`systemd-run --user --scope -p Delegate=yes python -m hetjax launch ...` (cgroup v2), in a container with "
    "`--privileged` or /sys/fs/cgroup mounted writable."
)


class QuotasRefused(OSError):
    """CPU quotas cannot be set here; the message says why and what to do."""


@dataclass(frozen=True)
class Home:
    """A group that new ones can be made in, and the version of its interface."""

    path: Path
    version: int


def find_home(proc: Path = Path("/proc/self")) -> Home:
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


def _candidates(mounts: str, groups: str) -> Iterator[Home]:
    own: dict[str, str] = {}
    for line in groups.splitlines():
        _, controllers, group = line.split(":", 2)
        own |= dict.fromkeys(controllers.split(","), group)
    for line in mounts.splitlines():
        _, where, kind, options = line.split(" ")[:4]
        where = where.replace("\\040", " ")
        if kind == "cgroup" and "cpu" in options.split(",") and "cpu" in own:
            path = Path(where) / own["cpu"].lstrip("/")
            yield Home(path if path.is_dir() else Path(where), 1)  # a container may see only its own part
        elif kind == "cgroup2" and "" in own:
            root, here = Path(where), Path(where) / own[""].lstrip("/")
            here = here if here.is_dir() else root
            above = [path for path in (here, *here.parents) if path.is_relative_to(root)]
            able = [path for path in above if "cpu" in _words(path / "cgroup.controllers")]
            able.sort(key=lambda path: "cpu" not in _words(path / "cgroup.subtree_control"))  # as they are, if possible
            yield from (Home(path, 2) for path in able)


def _words(path: Path) -> list[str]:
    return path.read_text().split()


def _try(home: Home) -> None:
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
