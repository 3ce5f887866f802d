"""Decentralized SGD over two processes equals the run of one process, with a checkpoint half way."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import quick_compiles
from decentralized_program import RUNS, results

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """The runs of one process."""
    return results(tmp_path_factory.mktemp("alone"))


@pytest.mark.parametrize("transport", ["host", "mesh"])
def test_two_processes_equal_one_process(tmp_path, here, transport):
    path = tmp_path / "results.json"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path), "HETJAX_TRANSPORT": transport}
    environment["XLA_FLAGS"] = quick_compiles.FLAGS  # without the eight devices of the tests
    program = [str(ROOT / "tests/sync/decentralized_program.py"), str(path)]
    run = subprocess.run(
        [sys.executable, "-m", "hetjax", "launch", "--processes", "2", "--", *program],
        env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=150,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    there = json.loads(path.read_text())
    for name in RUNS:
        (loss, losses, held_WxP), (loss_here, losses_here, held_here_WxP) = there[name], here[name]
        np.testing.assert_allclose(held_WxP, held_here_WxP, rtol=1e-5, atol=1e-6, err_msg=name)
        np.testing.assert_allclose(losses, losses_here, rtol=1e-5, err_msg=name)
        np.testing.assert_allclose(loss, loss_here, rtol=1e-5, err_msg=name)
        assert np.ptp(held_WxP, axis=0).max() > 0.01  # the workers differ
