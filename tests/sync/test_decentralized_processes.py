"""Decentralized SGD over several processes equals the run of one process, with a checkpoint half way."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import quick_compiles
from decentralized_program import RUNS, WORKERS, results

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """The runs of one process."""
    return results(tmp_path_factory.mktemp("alone"), jax.devices()[:WORKERS])


@pytest.mark.parametrize(
    ("processes", "transport", "devices"),
    [(2, "host", []), (4, "host", []), (2, "mesh", []), (2, "host", ["unlike"])],
)
def test_several_processes_equal_one_process(tmp_path, here, processes, transport, devices):
    path = tmp_path / "results.json"
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests/support")])
    environment = {**os.environ, "PYTHONPATH": paths, "TMPDIR": str(tmp_path), "HETJAX_TRANSPORT": transport}
    environment["XLA_FLAGS"] = quick_compiles.FLAGS  # without the eight devices of the tests
    program = [str(ROOT / "tests/sync/decentralized_program.py"), str(path), *devices]
    run = subprocess.run(
        [sys.executable, "-m", "hetjax", "launch", "--processes", str(processes), "--", *program],
        env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    there = json.loads(path.read_text())
    for name in RUNS:
        (loss, losses, held), (loss_here, losses_here, held_here) = there[name], here[name]
        for leaf in ("x", "large"):
            np.testing.assert_allclose(held[leaf], held_here[leaf], rtol=1e-5, atol=1e-5, err_msg=f"{name} {leaf}")
            assert np.ptp(held[leaf], axis=0).max() > 0.01  # the workers differ
        np.testing.assert_allclose(losses, losses_here, rtol=1e-5, err_msg=name)
        np.testing.assert_allclose(loss, loss_here, rtol=1e-5, err_msg=name)
