"""Runs the launcher on tiny programs as a process of its own, and checks that nothing is left behind."""

import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest
import quick_compiles

from hetjax.launch.quotas import QuotasRefused, find_cgroup_root

ROOT = Path(__file__).parents[2]
MARK = "HETJAX_TEST_MARK"
LIMIT = 250.0  # seconds, on a busy machine: more than the programs wait for each other
HEARTBEAT = """
sys.path.insert(0, os.environ["PYTHONPATH"])
from types import SimpleNamespace as Record
from hetjax.launch.heartbeat import from_environment
heartbeat = from_environment()
"""


def cgroup_root():
    """Where control groups can be created; None where that is not allowed."""
    try:
        return find_cgroup_root()
    except QuotasRefused:
        return None


class Sandbox:
    """A folder for a test's programs and the launcher's temporary files, and a mark on every process started here."""

    def __init__(self, folder):
        self.folder, self.mark, self.temporary = folder, uuid.uuid4().hex, folder / "temporary"
        self.temporary.mkdir()
        self.launchers = []

    def program(self, code):
        path = self.folder / "program.py"
        path.write_text(f"import os, signal, sys, time\nrank = int(os.environ['HETJAX_PROCESS'])\n{code}\n")
        return str(path)

    def start(self, *arguments, **options):
        environment = {**os.environ, MARK: self.mark, "TMPDIR": str(self.temporary), "PYTHONPATH": str(ROOT)}
        environment["XLA_FLAGS"] = quick_compiles.FLAGS  # without the eight devices of the tests
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True} | options
        command = [sys.executable, "-m", "hetjax", "launch", *map(str, arguments)]
        launcher = subprocess.Popen(command, env=environment, cwd=self.folder, **pipes)
        self.launchers.append(launcher)
        return launcher

    def run(self, *arguments):
        """Returns the exit code, the lines on stdout, and stderr."""
        launcher = self.start(*arguments)
        out, err = launcher.communicate(timeout=LIMIT)
        return launcher.returncode, out.splitlines(), err

    def wait_for_files(self, prefix, count):
        """Wait until programs have created `count` files with this prefix."""
        until(lambda: len(list(self.folder.glob(f"{prefix}*"))) >= count, f"{count} files {prefix}*")

    def processes(self):
        """The running processes that were started here, directly or indirectly."""
        mark = f"{MARK}={self.mark}".encode()
        return [int(path.parent.name) for path in Path("/proc").glob("[0-9]*/environ") if mark in _bytes(path)]

    def groups(self):
        """The launchers' control groups."""
        root = cgroup_root()
        pids = [launcher.pid for launcher in self.launchers]
        return [] if root is None else [g for pid in pids for g in root.path.glob(f"hetjax-{pid}-*")]

    def check_clean(self):
        for launcher in self.launchers:
            assert launcher.poll() is not None, "the launcher is still running"
        until(lambda: not self.processes(), "the end of all processes")
        until(lambda: not self.groups(), "the removal of all control groups")
        until(lambda: not list(self.temporary.iterdir()), "the removal of temporary files")


@pytest.fixture
def sandbox(tmp_path):
    """A sandbox in which no process, control group or temporary file may be left at the end."""
    sandbox = Sandbox(tmp_path)
    try:
        yield sandbox
        sandbox.check_clean()
    finally:
        for pid in sandbox.processes():
            os.kill(pid, signal.SIGKILL)
        for launcher in sandbox.launchers:
            launcher.communicate()


def until(condition, what, limit=60.0):
    deadline = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < deadline, f"waited {limit:.0f} s for {what}"
        time.sleep(0.01)


def _bytes(path):
    try:
        return path.read_bytes()
    except OSError:  # the process has ended, or belongs to another user
        return b""
