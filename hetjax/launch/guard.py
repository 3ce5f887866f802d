"""A process that outlives a killed launcher by a moment: it kills what was started and removes what was made.

The launcher tells it over a pipe, one line each: "+group PID", "-group PID", "+cgroup PATH", "+folder PATH", "+inside
PATH" for the control group that launcher and guard are in themselves, and "end" when it has cleaned up itself. A pipe
that closes without "end" means that the launcher is dead.
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

from hetjax.launch.quotas import end_group, step_back


class Guard:
    """The launcher's side."""

    def __init__(self) -> None:
        package = str(Path(__file__).parents[2])
        code = f"import sys; sys.path.insert(0, {package!r}); from hetjax.launch.guard import stand; stand(sys.stdin)"
        self._process = subprocess.Popen(
            [sys.executable, "-S", "-c", code], stdin=subprocess.PIPE, start_new_session=True, text=True, bufsize=1
        )

    def tell(self, what: str, which: int | str | Path) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # somebody killed the guard; the run itself needs it not
            self._process.stdin.write(f"{what} {which}\n")

    def dismiss(self) -> None:
        self.tell("end", "")
        with suppress(BrokenPipeError):
            self._process.communicate()


def stand(orders: Iterable[str]) -> None:
    """Wait for the launcher's end; then clean up what it did not."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    groups, cgroups, folders, inside = set[int](), list[Path](), list[Path](), list[Path]()
    for order in orders:
        what, _, which = order.rstrip("\n").partition(" ")
        if what == "end":
            return
        if what == "+group":
            groups.add(int(which))
        elif what == "-group":
            groups.discard(int(which))
        elif what == "+cgroup":
            cgroups.append(Path(which))
        elif what == "+folder":
            folders.append(Path(which))
        elif what == "+inside":
            inside.append(Path(which))
    for group in groups:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)
    for path in cgroups:
        with suppress(OSError):
            end_group(path)
    for path in inside:
        step_back(path)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
