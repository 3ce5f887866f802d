"""Runs the launcher on tiny programs in a process of its own, and finds what it may have left behind."""

import os
import signal
import subprocess
import sys
import time
import uuid
from contextlib import contextmanager
from pathlib import Path

import quick_compiles

from hetjax.launch.quotas import QuotasRefused, find_home

ROOT = Path(__file__).parents[2]
MARK = "HETJAX_TEST_MARK"
LIMIT = 60
BEAT = """
sys.path.insert(0, os.environ["PYTHONPATH"])
from types import SimpleNamespace as Record
from hetjax.launch.heartbeat import from_environment
beat = from_environment()
"""


def cgroup_home():
    """Where groups can be made here; None where that is not allowed."""
    try:
        return find_home()
    except QuotasRefused:
        return None


class Place:
    """A folder for a test: programs, the launcher's temporary files, a mark on every process that comes from here."""

    def __init__(self, folder):
        self.folder, self.mark, self.temporary = folder, uuid.uuid4().hex, folder / "temporary"
        self.temporary.mkdir()
        self.launchers = []

    def program(self, code):
        path = self.folder / "program.py"
        path.write_text(f"import os, signal, sys, time\nme = int(os.environ['HETJAX_PROCESS'])\n{code}\n")
        return str(path)

    def start(self, *arguments, **options):
        environment = {**os.environ, MARK: self.mark, "TMPDIR": str(self.temporary), "PYTHONPATH": str(ROOT)}
        environment["XLA_FLAGS"] = quick_compiles.FLAGS  # without the tests' own eight devices
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True} | options
        command = [sys.executable, "-m", "hetjax", "launch", *map(str, arguments)]
        launcher = subprocess.Popen(command, env=environment, cwd=self.folder, **pipes)
        self.launchers.append(launcher)
        return launcher

    def run(self, *arguments):
        """Exit code, lines on stdout, stderr."""
        launcher = self.start(*arguments)
        out, err = launcher.communicate(timeout=LIMIT)
        return launcher.returncode, out.splitlines(), err

    def wait_for(self, name, count=1):
        """Wait until programs have made so many files of a name."""
        until(lambda: len(list(self.folder.glob(f"{name}*"))) >= count, f"{count} files {name}*")

    def processes(self):
        """The living processes that come from here."""
        wanted = f"{MARK}={self.mark}".encode()
        return [int(path.parent.name) for path in Path("/proc").glob("[0-9]*/environ") if wanted in _bytes(path)]

    def groups(self):
        home = cgroup_home()
        pids = [launcher.pid for launcher in self.launchers]
        return [] if home is None else [g for pid in pids for g in home.path.glob(f"hetjax-{pid}-*")]


@contextmanager
def nothing_left(folder):
    """A place, of which no process, control group or temporary file is left at the end."""
    place = Place(folder)
    try:
        yield place
        for launcher in place.launchers:
            assert launcher.poll() is not None, "the launcher itself still runs"
        until(lambda: not place.processes(), "the end of all processes")
        until(lambda: not place.groups(), "the end of all control groups")
        until(lambda: not list(place.temporary.iterdir()), "the end of temporary files")
    finally:
        for pid in place.processes():
            os.kill(pid, signal.SIGKILL)
        for launcher in place.launchers:
            launcher.communicate()


def until(condition, what, limit=20.0):
    deadline = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < deadline, f"waited {limit:.0f} s for {what}"
        time.sleep(0.01)


def _bytes(path):
    try:
        return path.read_bytes()
    except OSError:  # it ended, or is somebody else's
        return b""
