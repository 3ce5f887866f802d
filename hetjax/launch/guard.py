"""A process that cleans up after a killed launcher: kills its processes, removes its control groups and folders.

The launcher sends commands over a pipe, one per line: "+group PID", "-group PID", "+cgroup PATH", "+folder PATH",
"+inside PATH" for the control group of launcher and guard themselves, and "end" after it has cleaned up itself. If
the pipe closes without "end", the launcher is dead.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from hetjax.launch.quotas import kill_group, leave_launcher_group


class Guard:
    """The launcher's side: starts the guard process and sends it commands."""

    def __init__(self) -> None:
        package = str(Path(__file__).parents[2])
        code = f"import sys; sys.path.insert(0, {package!r}); from hetjax.launch.guard import watch; watch(sys.stdin)"
        self._process = subprocess.Popen(
            [sys.executable, "-S", "-c", code], stdin=subprocess.PIPE, start_new_session=True, text=True, bufsize=1
        )

    def send(self, command: str, argument: int | str | Path) -> None:
        """Send one command."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # the guard was killed; the run does not need it
            self._process.stdin.write(f"{command} {argument}\n")

    def close(self) -> None:
        """End the guard process without cleaning up."""
        self.send("end", "")
        with suppress(BrokenPipeError):
            self._process.communicate()


def watch(commands: Iterable[str]) -> None:
    """Wait for the launcher's end; if it died, clean up."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    groups, cgroups, folders, launcher_groups = set[int](), list[Path](), list[Path](), list[Path]()
    for line in commands:
        command, _, argument = line.rstrip("\n").partition(" ")
        if command == "end":
            return
        if command == "+group":
            groups.add(int(argument))
        elif command == "-group":
            groups.discard(int(argument))
        elif command == "+cgroup":
            cgroups.append(Path(argument))
        elif command == "+folder":
            folders.append(Path(argument))
        elif command == "+inside":
            launcher_groups.append(Path(argument))
    for group in groups:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)
    for path in cgroups:
        with suppress(OSError):
            kill_group(path)
    for path in launcher_groups:
        leave_launcher_group(path)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
