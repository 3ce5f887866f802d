"""What a kill costs under `hetjax launch --restart`, where all processes start again from a checkpoint."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hetjax import environment

MEMBER = Path(__file__).with_name("fleet_member.py")
_LIMIT = 300.0  # seconds in which the run has to go on
_STEPS = 25  # steps between two kills: at least one checkpoint


def measure(folder: Path, times: int) -> dict[str, Any]:
    """Kill one of three processes several times.

    Args:
        folder: for logs and checkpoints.
        times: number of kills.

    Returns:
        Seconds from each kill to the next new step, and what the launcher says of each restart.
    """
    command = [sys.executable, "-m", "hetjax", "launch", "--processes", "3", "--restart", str(times), "--"]
    with open(folder / "output", "wb") as out:
        launcher = subprocess.Popen([*command, str(MEMBER), str(folder), "1000000"], stdout=out, stderr=out)
        try:
            seconds = [_one(folder, launcher) for _ in range(times)]
        finally:
            launcher.terminate()
            launcher.wait()
    said = re.findall(r"\[launcher\] (restart \d+ took .*)", (folder / "output").read_text())
    return {"seconds": [round(each, 2) for each in seconds], "said": said}


def _one(folder: Path, launcher: subprocess.Popen[bytes]) -> float:
    log = folder / "log-0"
    start = len(_rows(log))
    _wait(lambda: len(_rows(log)) >= start + _STEPS, launcher, folder)
    former, began = _rows(log)[-1]["pid"], time.monotonic()
    os.kill(_process(folder, 1), signal.SIGKILL)

    def new() -> list[float]:
        rows = _rows(log)
        newest = max(row["step"] for row in rows if row["pid"] == former)
        after = rows[max(k for k, row in enumerate(rows) if row["pid"] == former) + 1 :]
        return [row["at"] for row in after if row["step"] > newest]

    _wait(lambda: bool(new()), launcher, folder)
    return new()[0] - began


def _wait(condition: Callable[[], bool], launcher: subprocess.Popen[bytes], folder: Path) -> None:
    deadline = time.monotonic() + _LIMIT
    while not condition():
        if launcher.poll() is not None or time.monotonic() > deadline:
            raise AssertionError(f"the run did not go on: {(folder / 'output').read_text()[-2000:]}")
        time.sleep(0.01)


def _rows(log: Path) -> list[dict[str, Any]]:
    lines = log.read_text().splitlines(True) if log.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def _process(folder: Path, index: int) -> int:
    """The process id of a process of this run."""
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            variables = path.read_bytes().split(b"\0")
            command = path.with_name("cmdline").read_text()
        except OSError:  # it has ended
            continue
        if f"{environment.PROCESS}={index}".encode() in variables and str(folder) in command:
            return int(path.parent.name)
    raise AssertionError(f"the run in {folder} has no process {index}")
