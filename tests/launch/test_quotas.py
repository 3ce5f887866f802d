"""CPU quotas: real ones where groups can be made, the laws of when they hold with made-up ones, both versions."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launching import BEAT, cgroup_home, until

from hetjax.launch import guard, quotas
from hetjax.launch.heartbeat import Beat
from hetjax.launch.quotas import CgroupRoot, CpuQuota, Disturbance, QuotasRefused, Throttle, find_home, remove_stale

allowed = pytest.mark.skipif(cgroup_home() is None, reason="control groups cannot be made here")
BUSY = [sys.executable, "-S", "-c", "while True: pass"]


@pytest.fixture
def busy():
    process = subprocess.Popen(BUSY)
    yield process
    process.kill()
    process.wait()


def cpu_s(pid):
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def cores_used(pid, seconds=1.0):
    before, began = cpu_s(pid), time.monotonic()
    time.sleep(seconds)
    return (cpu_s(pid) - before) / (time.monotonic() - began)


@allowed
def test_a_process_gets_no_more_than_its_quota(busy):
    with CpuQuota("test") as quota:
        quota.add(busy.pid)
        assert quota.pids() == [busy.pid]
        quota.set(0.2)
        assert cores_used(busy.pid) < 0.26
        assert quota.throttled_s() > 0
        quota.set(0.05)  # below what a period of 10 ms can give
        assert cores_used(busy.pid) < 0.09
        quota.set(None)
        held_back = quota.throttled_s()
        time.sleep(0.2)
        assert quota.throttled_s() - held_back < 0.05
    assert not quota.path.exists()
    assert busy.poll() is None  # its group is gone, the process is not


@allowed
def test_groups_of_a_dead_launcher_are_removed_with_what_runs_in_them(busy):
    gone = subprocess.Popen(["true"])
    gone.wait()
    home, mine = cgroup_home(), CpuQuota("mine")
    stale = home.path / f"hetjax-{gone.pid}-0-process0"
    stale.mkdir()
    (stale / "cgroup.procs").write_text(str(busy.pid))
    assert stale.name in remove_stale(home)
    assert not stale.exists()
    assert busy.wait(timeout=10) == -9
    assert mine.path.exists()  # its maker lives
    mine.remove()


WATCH = (
    BEAT
    + """
paths = [line.strip().rpartition("/")[2] for line in open("/proc/self/cgroup")]
group = os.path.join(os.environ["GROUPS"], next(name for name in paths if name.startswith("hetjax-")))
limit = next(path for path in (f"{group}/cpu.max", f"{group}/cpu.cfs_quota_us") if os.path.exists(path))
quota = lambda: open(limit).read().split()[0]
"""
)


@allowed
def test_the_launcher_sets_them_for_the_steps_and_changes_them_on_the_way(place, monkeypatch):
    monkeypatch.setenv("GROUPS", str(cgroup_home().path))
    program = place.program(
        f"{WATCH}said = [quota()]\nbeat.begin(None); said.append(quota())\n"
        "open(f'begun-{me}', 'w').close()\nwhile not os.path.exists(f'begun-{1 - me}'): time.sleep(0.01)\n"
        "for step in (1, 2, 3): beat(Record(step=step), None)\n"
        "while quota() == said[1]: time.sleep(0.01)\n"
        "said.append(quota())\n"
        "beat.end(None)\nwhile quota() not in ('-1', 'max'): time.sleep(0.01)\nprint(said)"
    )
    code, lines, err = place.run("--quotas", "0.5,0.4", "--disturb", "3:0.3,0.6", "--", program)
    assert code == 0, err
    free = "max" if cgroup_home().version == 2 else "-1"
    assert sorted(lines) == [
        f"[0] {[free, '5000', '3000']}",
        f"[1] {[free, '4000', '6000']}",
    ]
    assert "step 3: quotas are now 0.3, 0.6 cores" in err


@allowed
@pytest.mark.parametrize("whom", ["a process", "the launcher"])
def test_no_group_is_left_after_a_kill(place, whom):
    launcher = place.start(
        "--quotas", "0.5,0.5", "--quota-from", "start", "--", place.program("open(f'r{me}', 'w'); time.sleep(100)")
    )
    place.wait_for("r", 2)
    groups = place.groups()
    assert len(groups) == 2
    assert all((group / "cgroup.procs").read_text() for group in groups)
    os.kill(launcher.pid if whom == "the launcher" else int((groups[0] / "cgroup.procs").read_text()), 9)
    launcher.wait(timeout=30)
    until(lambda: not place.groups(), "the end of all groups")


class FakeQuota:
    cores = None

    def __init__(self):
        self.told = []

    def set(self, cores):
        self.cores = cores
        self.told.append(cores)


def test_quotas_hold_between_begin_and_end_of_each_process():
    quotas = [FakeQuota(), FakeQuota()]
    throttle = Throttle(quotas, [0.8, 0.4], [Disturbance(2, (0.1, 0.2)), Disturbance(4, (0.3, 0.5))])
    away, on = Beat(alive=1), lambda step, begun=1: Beat(alive=1, begun=begun, step=step)
    for beats, due in [
        ((away, away), (None, None)),
        ((away, on(0)), (None, 0.4)),
        ((on(0), on(0)), (0.8, 0.4)),
        ((on(1), on(2)), (0.8, 0.4)),  # process 0 counts
        ((on(2), on(2)), (0.1, 0.2)),
        ((on(7), on(7)), (0.3, 0.5)),
        ((Beat(1, 1, 1, 7), on(7)), (None, 0.5)),
        ((on(7, 2), on(7)), (0.3, 0.5)),  # a resumed fit, beyond all disturbances
    ]:
        throttle.follow(beats, (True, True))
        assert tuple(quota.cores for quota in quotas) == due
    assert quotas[1].told == [0.4, 0.2, 0.5]  # set only when it changes
    throttle.follow((away, away), (True, False))
    assert (quotas[0].cores, quotas[1].cores) == (None, 0.5)  # the group of an ended process is gone


def test_from_the_start_on():
    quota = FakeQuota()
    Throttle([quota], [0.5], from_start=True).follow([Beat()], [True])
    assert quota.cores == 0.5


# -- version 2, with a made-up file system: this machine may have the other one --


class FakeGroups:
    """The files of a cgroup v2 hierarchy, and /proc/self/{mounts,cgroup} that lead there."""

    def __init__(self, folder, own="/user.slice/run.scope", controllers="cpuset cpu io"):
        self.proc, self.root = folder / "proc", folder / "cgroup"
        self.proc.mkdir()
        (self.proc / "mounts").write_text(f"proc /proc proc rw 0 0\ncgroup2 {self.root} cgroup2 rw,nosuid 0 0\n")
        (self.proc / "cgroup").write_text(f"0::{own}\n")
        path = self.root / own.lstrip("/")
        path.mkdir(parents=True)
        for group in (path, *path.parents):
            if group.is_relative_to(self.root):
                (group / "cgroup.controllers").write_text(controllers)
                (group / "cgroup.subtree_control").write_text("cpu memory")
                (group / "cgroup.procs").write_text("")
        self.own = path


def test_version_2_writes_quota_and_period(tmp_path):
    groups = FakeGroups(tmp_path)
    quota = CpuQuota("test", CgroupRoot(groups.own, 2))
    for cores, told in [(0.25, "2500 10000"), (2, "20000 10000"), (0.05, "1000 20000"), (None, "max 10000")]:
        quota.set(cores)
        assert (quota.path / "cpu.max").read_text() == told
    quota.add(4242)
    assert (quota.path / "cgroup.procs").read_text() == "4242"
    (quota.path / "cpu.stat").write_text("usage_usec 5\nnr_throttled 2\nthrottled_usec 1500000\n")
    assert quota.throttled_s() == 1.5


def test_nobody_may_make_groups_without_the_controller(tmp_path):
    groups = FakeGroups(tmp_path, controllers="io memory")
    with pytest.raises(QuotasRefused, match="no cgroup file system with the cpu controller is mounted"):
        find_home(groups.proc)


def test_the_reason_is_told_where_it_is_not_allowed(tmp_path):
    groups = FakeGroups(tmp_path)  # plain folders: a new group has no cpu.max
    with pytest.raises(QuotasRefused, match=r"run.scope/hetjax-\d+-trial/cpu.max is missing.*systemd-run"):
        find_home(groups.proc)
    assert not list(groups.root.rglob("hetjax-*"))


def test_a_group_that_hands_the_controller_on_already_comes_first(tmp_path):
    groups = FakeGroups(tmp_path)
    (groups.own / "cgroup.subtree_control").write_text("memory")
    with pytest.raises(QuotasRefused, match=r"user.slice/hetjax-\d+-trial"):
        find_home(groups.proc)
    assert "+cpu" in (groups.own / "cgroup.subtree_control").read_text()  # tried in the end


@pytest.fixture
def kernel(monkeypatch):
    """New groups have files, a process is in one group, and none is in a group whose children have controllers."""
    mkdir, rmdir, write = Path.mkdir, Path.rmdir, Path.write_text
    words = lambda path: path.read_text().split()

    def made(self, *how, **more):
        mkdir(self, *how, **more)
        for name in ("cpu.max", "cgroup.procs", "cgroup.subtree_control"):
            write(self / name, "")

    def removed(self):
        if words(self / "cgroup.procs"):
            raise OSError(16, "Device or resource busy", str(self))
        for file in self.iterdir():
            file.unlink()
        rmdir(self)

    def written(self, text):
        busy = OSError(16, "Device or resource busy", str(self))
        if self.name == "cgroup.subtree_control":
            if text == "+cpu" and words(self.with_name("cgroup.procs")):
                raise busy
            write(self, " ".join({*words(self), "cpu"} - ({"cpu"} if text == "-cpu" else set())))
        elif self.name == "cgroup.procs":
            if "cpu" in words(self.with_name("cgroup.subtree_control")):
                raise busy
            for near in [self.parent, self.parent.parent, *self.parent.iterdir()]:
                if (near / "cgroup.procs").exists():
                    write(near / "cgroup.procs", " ".join({*words(near / "cgroup.procs")} - {text}))
            write(self, " ".join({*words(self), text}))

    for name, instead in (("mkdir", made), ("rmdir", removed), ("write_text", written)):
        monkeypatch.setattr(Path, name, instead)


def test_a_launcher_alone_in_its_group_steps_aside_and_back(tmp_path, request, monkeypatch):
    groups, me, at_exit = FakeGroups(tmp_path), str(os.getpid()), []
    for control in groups.root.rglob("cgroup.subtree_control"):
        control.write_text("")
    (groups.own / "cgroup.procs").write_text(me)
    request.getfixturevalue("kernel")
    monkeypatch.setattr(quotas.atexit, "register", lambda *call: at_exit.append(call))
    home = find_home(groups.proc)
    assert home == find_home(groups.proc) == CgroupRoot(groups.own, 2)
    inside = quotas.launchers_own(home.path)
    assert (inside / "cgroup.procs").read_text() == me
    assert (groups.own / "cgroup.procs").read_text() == ""
    with CpuQuota("test", home):
        assert len(list(groups.own.glob("hetjax-*"))) == 2
    (what, *given), *others = at_exit
    assert not others
    what(*given)
    assert (groups.own / "cgroup.procs").read_text() == me
    assert (groups.own / "cgroup.subtree_control").read_text() == ""
    assert not list(groups.root.rglob("hetjax-*"))


def test_the_guard_steps_back_for_a_dead_launcher(tmp_path):
    told = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(guard, "step_back", told.append)
        patched.setattr(guard.signal, "signal", lambda *_: None)
        guard.stand([f"+inside {tmp_path}\n", "end \n"])
        assert not told
        guard.stand([f"+inside {tmp_path}\n"])
    assert told == [tmp_path]


def test_no_linux_no_quotas(tmp_path):
    with pytest.raises(QuotasRefused, match="need Linux's control groups"):
        find_home(tmp_path / "nowhere")


@pytest.mark.parametrize("cores", [0, -1, float("nan"), float("inf")])
def test_a_quota_is_a_sensible_number(tmp_path, cores):
    quota = CpuQuota("test", CgroupRoot(FakeGroups(tmp_path).own, 2))
    with pytest.raises(ValueError, match="number of cores"):
        quota.set(cores)
