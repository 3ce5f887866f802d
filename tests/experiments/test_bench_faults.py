"""Forty random faults of an elastic fleet: it goes on after each, and in the end everything is as if nothing happened.

The program itself compares samples and losses with an undisturbed run, and looks for what is left behind.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "experiments"))

from benches.restarts import measure

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_a_fleet_goes_on_after_forty_random_faults(tmp_path):
    program = [sys.executable, ROOT / "experiments" / "bench_faults.py", "--events", "40", "--seed", "3"]
    found = subprocess.run(
        [*program, "--restarts", "0", "--json", tmp_path / "result.json"], cwd=tmp_path, capture_output=True, text=True,
        timeout=450,
    )  # fmt: skip
    assert found.returncode == 0, found.stdout[-2000:] + found.stderr[-4000:]
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["events"] >= 40
    assert result["deviation_50"] <= 1e-5
    assert max(result["deviation"], result["deviation_of_evaluations"]) <= 1e-4
    assert set(result["seconds"]) == {"kill", "crash", "leave", "hang", "wake", "rendezvous", "newcomer", "two", "both",
                                      "mixed", "join"}  # fmt: skip


@pytest.mark.slow
def test_a_restart_is_measured_and_its_parts_add_up(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("XLA_FLAGS", "")
    found = measure(tmp_path, 1)
    (said,) = found["said"]
    total, *parts = map(float, re.findall(r"([\d.]+) s\b", said))
    assert len(parts) == 6
    assert sum(parts) == pytest.approx(total, abs=0.4)  # each is rounded
    assert min(total, *found["seconds"]) > 0
    assert re.search(r"for \d+ steps done again and a new one", said)
