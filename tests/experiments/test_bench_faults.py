"""Forty random faults of an elastic fleet: it goes on after each, and in the end everything is as if nothing happened.

The program itself compares samples and losses with an undisturbed run, and looks for what is left behind.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_a_fleet_goes_on_after_forty_random_faults(tmp_path):
    program = [sys.executable, ROOT / "experiments" / "bench_faults.py", "--events", "40", "--seed", "3"]
    found = subprocess.run(
        [*program, "--no-restart", "--json", tmp_path / "result.json"], cwd=tmp_path, capture_output=True, text=True,
        timeout=450,
    )  # fmt: skip
    assert found.returncode == 0, found.stdout[-2000:] + found.stderr[-4000:]
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["events"] == 40
    assert result["deviation_50"] <= 1e-5
    assert {"kill", "crash", "leave", "hang", "wake", "rendezvous", "join"} <= result["seconds"].keys()
