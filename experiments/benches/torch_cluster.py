"""PyTorch beside hetjax on the cluster of bench_cluster.py: its processes live in the same control groups, in turn.

While one of the two trains, the processes of the other wait for input. So both see the same quotas and, turn by turn,
the same machine.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from hetjax.fleet.rendezvous import free_port
from hetjax.launch import child

WORKER = Path(__file__).with_name("torch_worker.py")
MODES = ("ddp", "hand", "hand-ddp", "dbs@5")
SKIP = 5  # first steps of a turn
MOST = 25  # steps of a turn: counts settle at once, or after 5


class TorchMissing(RuntimeError):
    """There is no PyTorch to compare with, or it has ended."""


def check_torch(python: str) -> None:
    """Raise TorchMissing if this interpreter cannot import torch."""
    try:
        tried = subprocess.run([python, "-c", "import torch"], capture_output=True, text=True)
        said = (tried.stderr.strip().splitlines() or [f"exit code {tried.returncode}"])[-1]
    except OSError as error:
        tried, said = None, str(error)
    if tried is None or tried.returncode:
        raise TorchMissing(
            f"--with-torch needs PyTorch, which {python} cannot import ({said}). Install it with `pip install -e "
            '".[bench]"`, or name an interpreter that has it with --torch-python.'
        )


class TorchCluster:
    """The processes; a context manager.

    Args:
        python: an interpreter that has torch.
        settings: those of the bench.
        groups: the control group of each process.

    Raises:
        TorchMissing: if they do not start.
    """

    def __init__(self, python: str, settings: dict[str, Any], groups: Sequence[Path]):
        self.settings = settings | {"modes": MODES}
        self.steps = min(max(SKIP + 3, settings["steps"] // settings["rounds"]), MOST)
        self._stack, self._python, self._groups = ExitStack(), python, groups

    def __enter__(self) -> TorchCluster:
        address = f"127.0.0.1:{free_port('127.0.0.1')}"
        start = [sys.executable, "-I", "-S", child.__file__, str(os.getpid())]
        self._processes = []
        for rank, group in enumerate(self._groups):
            process = subprocess.Popen(
                [*start, str(group / "cgroup.procs"), "-", self._python, str(WORKER), json.dumps(self.settings)],
                env={**os.environ, "TORCH_COORDINATOR": address, "TORCH_RANK": str(rank), "OMP_NUM_THREADS": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                text=True,
            )
            self._stack.callback(process.kill)
            self._processes.append(process)
        try:
            self.version = self._answer()["ready"]
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def turn(self) -> list[dict[str, Any]]:
        """Run every mode once; each with solo rates before and after."""
        answers = [self._ask({"mode": mode, "steps": self.steps}) for mode in MODES]
        last = self._ask({"solo": True})
        for answer, after in zip(answers, [*answers[1:], last], strict=True):
            answer["solo_after"] = after["solo"]
        return answers

    def _ask(self, order: dict[str, Any]) -> dict[str, Any]:
        first = self._processes[0]
        assert first.stdin is not None
        first.stdin.write(json.dumps(order) + "\n")
        first.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        first = self._processes[0]
        assert first.stdout is not None
        for line in first.stdout:
            if line.startswith("{"):
                return json.loads(line)
        raise TorchMissing(f"PyTorch under {self._python} ended early; what it said stands above.")


def figures_of_torch(turns: Sequence[Sequence[dict[str, Any]]], batch: int) -> dict[str, dict[str, Any]]:
    """Samples/s, efficiency by turn, and milliseconds outside the slowest local phase, of each mode."""
    found = {}
    for j, mode in enumerate(MODES):
        answers = [turn[j] for turn in turns]
        steps = [np.array(answer["step_times"])[SKIP:] for answer in answers]
        slowest = [np.array(answer["times"], float)[SKIP:].max(axis=1) for answer in answers]
        outside = np.concatenate(steps) - np.concatenate(slowest)
        ideal = [(sum(answer["solo"]) + sum(answer["solo_after"])) / 2 for answer in answers]
        rates = [batch * len(of) / of.sum() for of in steps]
        found[mode] = {
            "samples_per_s": float(batch * sum(map(len, steps)) / sum(of.sum() for of in steps)),
            "ideal": float(np.mean(ideal)),
            "efficiency_by_round": [float(rate / most) for rate, most in zip(rates, ideal, strict=True)],
            "overhead_ms": None if np.isnan(outside).all() else 1e3 * float(np.nanmedian(outside)),
        }
    return found
