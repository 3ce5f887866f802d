"""CPU quotas: with real control groups where they can be created, otherwise with fake files and quotas."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from launching import HEARTBEAT, cgroup_root, until

from hetjax.launch import guard, quotas
from hetjax.launch.heartbeat import Beat
from hetjax.launch.quotas import (
    PERIOD_US,
    CgroupRoot,
    CpuQuota,
    Disturbance,
    QuotasRefused,
    Throttle,
    find_cgroup_root,
    remove_stale,
)

allowed = pytest.mark.skipif(cgroup_root() is None, reason="control groups cannot be created here")
BUSY = [sys.executable, "-S", "-c", "while True: pass"]


@pytest.fixture
def busy():
    process = subprocess.Popen(BUSY)
    yield process
    process.kill()
    process.wait()


def cpu_us(pid):
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e3


def counter(quota, name):
    """A counter of the kernel, such as nr_periods."""
    return int(dict(line.split() for line in (quota.path / "cpu.stat").read_text().splitlines())[name])


@allowed
def test_a_process_gets_no_more_than_its_quota(busy):
    """Measured as CPU time per quota period of the kernel, whatever else the machine does."""
    with CpuQuota("test") as quota:
        quota.add(busy.pid)
        assert quota.pids() == [busy.pid]
        for cores, period_us in ((0.2, PERIOD_US), (0.05, 2 * PERIOD_US)):  # 0.05 needs a longer period
            quota.set(cores)
            first, used = counter(quota, "nr_periods"), cpu_us(busy.pid)
            until(lambda first=first: counter(quota, "nr_periods") >= first + 40, "40 quota periods")
            used = cpu_us(busy.pid) - used
            assert used < 1.3 * cores * period_us * (counter(quota, "nr_periods") - first + 1)
            assert counter(quota, "nr_throttled") > 0
        quota.set(None)
        throttled, used = counter(quota, "nr_throttled"), cpu_us(busy.pid)
        until(lambda: cpu_us(busy.pid) >= used + 100_000, "0.1 s of CPU time")
        assert counter(quota, "nr_throttled") == throttled
    assert not quota.path.exists()
    assert busy.poll() is None  # its group is gone, the process is not


@allowed
def test_groups_of_a_dead_launcher_are_removed_with_their_processes(busy):
    dead = subprocess.Popen(["true"])
    dead.wait()
    root, own = cgroup_root(), CpuQuota("own")
    stale = root.path / f"hetjax-{dead.pid}-0-process0"
    stale.mkdir()
    (stale / "cgroup.procs").write_text(str(busy.pid))
    assert stale.name in remove_stale(root)
    assert not stale.exists()
    assert busy.wait(timeout=10) == -9
    assert own.path.exists()  # its creator is alive
    own.remove()


WATCH = (
    HEARTBEAT
    + """
paths = [line.strip().rpartition("/")[2] for line in open("/proc/self/cgroup")]
group = os.path.join(os.environ["GROUPS"], next(name for name in paths if name.startswith("hetjax-")))
limit = next(path for path in (f"{group}/cpu.max", f"{group}/cpu.cfs_quota_us") if os.path.exists(path))
quota = lambda: open(limit).read().split()[0]
"""
)


@allowed
def test_the_launcher_applies_quotas_during_steps_and_changes_them(sandbox, monkeypatch):
    monkeypatch.setenv("GROUPS", str(cgroup_root().path))
    program = sandbox.program(
        f"{WATCH}from hetjax.launch import heartbeat as module\nmodule._ACKNOWLEDGE_LIMIT = 60  # a busy machine\n"
        "seen = [quota()]\nheartbeat.begin(None); seen.append(quota())\n"
        "open(f'begun-{rank}', 'w').close()\nwhile not os.path.exists(f'begun-{1 - rank}'): time.sleep(0.01)\n"
        "for step in (1, 2, 3): heartbeat(Record(step=step), None)\n"
        "while quota() == seen[1]: time.sleep(0.01)\n"
        "seen.append(quota())\n"
        "heartbeat.end(None)\nwhile quota() not in ('-1', 'max'): time.sleep(0.01)\nprint(seen)"
    )
    code, lines, err = sandbox.run("--quotas", "0.5,0.4", "--disturb", "3:0.3,0.6", "--", program)
    assert code == 0, err
    unlimited = "max" if cgroup_root().version == 2 else "-1"
    assert sorted(lines) == [
        f"[0] {[unlimited, '5000', '3000']}",
        f"[1] {[unlimited, '4000', '6000']}",
    ]
    assert "step 3: quotas are now 0.3, 0.6 cores" in err


@allowed
@pytest.mark.parametrize("victim", ["process", "launcher"])
def test_no_group_is_left_after_a_kill(sandbox, victim):
    launcher = sandbox.start(
        "--quotas",
        "0.5,0.5",
        "--quota-from",
        "start",
        "--",
        sandbox.program("open(f'ready{rank}', 'w'); time.sleep(100)"),
    )
    sandbox.wait_for_files("ready", 2)
    groups = sandbox.groups()
    assert len(groups) == 2
    assert all((group / "cgroup.procs").read_text() for group in groups)
    os.kill(launcher.pid if victim == "launcher" else int((groups[0] / "cgroup.procs").read_text()), 9)
    launcher.wait(timeout=120)
    until(lambda: not sandbox.groups(), "the removal of all groups")


class FakeQuota:
    cores = None

    def __init__(self):
        self.history = []

    def set(self, cores):
        self.cores = cores
        self.history.append(cores)


def test_quotas_apply_between_begin_and_end_of_each_process():
    quotas = [FakeQuota(), FakeQuota()]
    throttle = Throttle(quotas, [0.8, 0.4], [Disturbance(2, (0.1, 0.2)), Disturbance(4, (0.3, 0.5))])
    idle, at = Beat(alive=1), lambda step, begun=1: Beat(alive=1, begun=begun, step=step)
    for beats, expected in [
        ((idle, idle), (None, None)),
        ((idle, at(0)), (None, 0.4)),
        ((at(0), at(0)), (0.8, 0.4)),
        ((at(1), at(2)), (0.8, 0.4)),  # the steps of process 0 count
        ((at(2), at(2)), (0.1, 0.2)),
        ((at(7), at(7)), (0.3, 0.5)),
        ((Beat(1, 1, 1, 7), at(7)), (None, 0.5)),
        ((at(7, 2), at(7)), (0.3, 0.5)),  # a resumed fit, beyond all disturbances
    ]:
        throttle.update(beats, (True, True))
        assert tuple(quota.cores for quota in quotas) == expected
    assert quotas[1].history == [0.4, 0.2, 0.5]  # set only when it changes
    throttle.update((idle, idle), (True, False))
    assert (quotas[0].cores, quotas[1].cores) == (None, 0.5)  # the group of an ended process is gone


def test_quotas_can_apply_from_the_start():
    quota = FakeQuota()
    Throttle([quota], [0.5], from_start=True).update([Beat()], [True])
    assert quota.cores == 0.5


# -- cgroup v2, with fake files: this machine may have v1 --


class FakeCgroups:
    """The files of a cgroup v2 hierarchy, and /proc/self/{mounts,cgroup} that point there."""

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


def test_v2_writes_quota_and_period(tmp_path):
    groups = FakeCgroups(tmp_path)
    quota = CpuQuota("test", CgroupRoot(groups.own, 2))
    for cores, text in [(0.25, "2500 10000"), (2, "20000 10000"), (0.05, "1000 20000"), (None, "max 10000")]:
        quota.set(cores)
        assert (quota.path / "cpu.max").read_text() == text
    quota.add(4242)
    assert (quota.path / "cgroup.procs").read_text() == "4242"


def test_groups_need_the_cpu_controller(tmp_path):
    groups = FakeCgroups(tmp_path, controllers="io memory")
    with pytest.raises(QuotasRefused, match="no cgroup file system with the cpu controller is mounted"):
        find_cgroup_root(groups.proc)


def test_a_refusal_states_the_reason(tmp_path):
    groups = FakeCgroups(tmp_path)  # plain folders: a new group has no cpu.max
    with pytest.raises(QuotasRefused, match=r"run.scope/hetjax-\d+-trial/cpu.max is missing.*systemd-run"):
        find_cgroup_root(groups.proc)
    assert not list(groups.root.rglob("hetjax-*"))


def test_a_group_that_delegates_cpu_already_is_tried_first(tmp_path):
    groups = FakeCgroups(tmp_path)
    (groups.own / "cgroup.subtree_control").write_text("memory")
    with pytest.raises(QuotasRefused, match=r"user.slice/hetjax-\d+-trial"):
        find_cgroup_root(groups.proc)
    assert "+cpu" in (groups.own / "cgroup.subtree_control").read_text()  # tried last


@pytest.fixture
def kernel(monkeypatch):
    """Kernel rules: new groups have files, a process is in one group, none where children have controllers."""
    mkdir, rmdir, write = Path.mkdir, Path.rmdir, Path.write_text
    words = lambda path: path.read_text().split()

    def create(self, *args, **options):
        mkdir(self, *args, **options)
        for name in ("cpu.max", "cgroup.procs", "cgroup.subtree_control"):
            write(self / name, "")

    def remove(self):
        if words(self / "cgroup.procs"):
            raise OSError(16, "Device or resource busy", str(self))
        for file in self.iterdir():
            file.unlink()
        rmdir(self)

    def write_control(self, text):
        busy = OSError(16, "Device or resource busy", str(self))
        if self.name == "cgroup.subtree_control":
            if text == "+cpu" and words(self.with_name("cgroup.procs")):
                raise busy
            write(self, " ".join({*words(self), "cpu"} - ({"cpu"} if text == "-cpu" else set())))
        elif self.name == "cgroup.procs":
            if "cpu" in words(self.with_name("cgroup.subtree_control")):
                raise busy
            for group in [self.parent, self.parent.parent, *self.parent.iterdir()]:
                if (group / "cgroup.procs").exists():
                    write(group / "cgroup.procs", " ".join({*words(group / "cgroup.procs")} - {text}))
            write(self, " ".join({*words(self), text}))

    for name, replacement in (("mkdir", create), ("rmdir", remove), ("write_text", write_control)):
        monkeypatch.setattr(Path, name, replacement)


def test_a_launcher_alone_in_its_group_moves_to_a_child_and_back(tmp_path, request, monkeypatch):
    groups, pid, at_exit = FakeCgroups(tmp_path), str(os.getpid()), []
    for control in groups.root.rglob("cgroup.subtree_control"):
        control.write_text("")
    (groups.own / "cgroup.procs").write_text(pid)
    request.getfixturevalue("kernel")
    monkeypatch.setattr(quotas.atexit, "register", lambda *call: at_exit.append(call))
    root = find_cgroup_root(groups.proc)
    assert root == find_cgroup_root(groups.proc) == CgroupRoot(groups.own, 2)
    child = quotas.launcher_group(root.path)
    assert (child / "cgroup.procs").read_text() == pid
    assert (groups.own / "cgroup.procs").read_text() == ""
    with CpuQuota("test", root):
        assert len(list(groups.own.glob("hetjax-*"))) == 2
    ((callback, *arguments),) = at_exit
    callback(*arguments)
    assert (groups.own / "cgroup.procs").read_text() == pid
    assert (groups.own / "cgroup.subtree_control").read_text() == ""
    assert not list(groups.root.rglob("hetjax-*"))


def test_the_guard_restores_the_group_of_a_dead_launcher(tmp_path):
    left = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(guard, "leave_launcher_group", left.append)
        patched.setattr(guard.signal, "signal", lambda *_: None)
        guard.watch([f"+inside {tmp_path}\n", "end \n"])
        assert not left
        guard.watch([f"+inside {tmp_path}\n"])
    assert left == [tmp_path]


def test_quotas_need_linux(tmp_path):
    with pytest.raises(QuotasRefused, match="need Linux's control groups"):
        find_cgroup_root(tmp_path / "nowhere")


@pytest.mark.parametrize("cores", [0, -1, float("nan"), float("inf")])
def test_an_invalid_quota_is_refused(tmp_path, cores):
    quota = CpuQuota("test", CgroupRoot(FakeCgroups(tmp_path).own, 2))
    with pytest.raises(ValueError, match="number of cores"):
        quota.set(cores)
