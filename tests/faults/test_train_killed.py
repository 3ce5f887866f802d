"""The main job under the launcher: process 0 is killed while it trains, and the run ends as if nothing had happened."""

import json
import signal
from pathlib import Path

import numpy as np
import pytest
import train
from following import DETECTED, Run, until

from hetjax.report import read_run

pytestmark = pytest.mark.slow

TRAIN = Path(train.__file__)


def test_train_goes_on_after_a_kill(place):
    seed = 21
    rng = np.random.default_rng(seed)
    print(f"seed {seed}")
    flags = ["--model", "mlp", "--width", "8", "--optimizer", "sgd", "--learning-rate", "0.02", "--batch-size", "100"]
    flags += ["--strategy", "balanced", "--engine", "looped", "--epochs", "14"]
    whole, folder = place.folder / "whole", place.folder / "run"
    run = Run(
        place, folder / "metrics.jsonl",
        "--processes", 2, "--restart", "--grace", 1, "--",
        TRAIN, *flags, "--save-steps", 9, "--out", folder,
    )  # fmt: skip
    run.wait_for_rows(int(rng.integers(30, 90)))
    assert run.strike(0, signal.SIGKILL) < DETECTED
    until(lambda: run.heard("starts again") == 1, "a new start")
    assert train.main([*flags, "--devices", "1", "--speeds", "real", "--out", str(whole)]) == 0
    assert run.end() == 0, run.said
    found = read_run(folder)
    np.testing.assert_allclose(found.loss_S, read_run(whole).loss_S, rtol=1e-4)
    assert found.samples_S[-1] == 14 * 1438
    assert json.loads((folder / "summary.json").read_text())["steps"] == 14 * 15
    assert any("goes on after step" in line for _, line in run.out)


def test_the_node_that_is_left_goes_on_after_a_kill(place):
    """A node is killed among exchanges; the run of the other ends about where it would have ended."""
    seed, epochs = 31, 20
    rng = np.random.default_rng(seed)
    print(f"seed {seed}")
    flags = ["--model", "mlp", "--width", "8", "--optimizer", "sgd", "--learning-rate", "0.02", "--batch-size", "100"]
    flags += ["--sync", "daso", "--controller", "equal", "--epochs", str(epochs)]
    whole, folder = place.folder / "whole", place.folder / "run"
    run = Run(
        place, folder / "metrics.jsonl",
        "--processes", 2, "--elastic", "--grace", 1, "--", TRAIN, *flags, "--save-steps", 7, "--out", folder,
    )  # fmt: skip
    run.wait_for_rows(int(rng.integers(5 * 15, 8 * 15)))  # past the epochs in which all agree in every step
    assert run.strike(1, signal.SIGKILL) < DETECTED
    until(lambda: run.heard("starts again") == 1, "a new start")
    assert train.main([*flags, "--devices", "2", "--speeds", "real", "--out", str(whole)]) == 0
    assert run.end() == 0, run.said
    assert any("goes on after step" in line for _, line in run.out)
    there, here = (json.loads((each / "summary.json").read_text()) for each in (folder, whole))
    assert (there["steps"], there["samples"], there["workers"]) == (epochs * 15, epochs * 1438, 1)
    assert there["test_loss"] == pytest.approx(here["test_loss"], rel=0.15)
    assert abs(there["test_accuracy"] - here["test_accuracy"]) < 0.05


def test_survivors_of_an_elastic_run_keep_their_entries_of_per_worker_lists(place):
    """Worker 1 of 3 is killed: speeds 1 and 0.7 are left, and capacities 100 and 70, which just hold the batch."""
    flags = ["--model", "mlp", "--width", "8", "--batch-size", "170", "--strategy", "balanced", "--steps", "60"]
    flags += ["--speeds", "1,0.5,0.7", "--row-time", "0.2", "--capacity", "100,50,70"]
    folder = place.folder / "run"
    run = Run(
        place, folder / "metrics.jsonl",
        "--processes", 3, "--elastic", "--grace", 1, "--", TRAIN, *flags, "--save-steps", 5, "--out", folder,
    )  # fmt: skip
    run.wait_for_rows(8)
    assert run.strike(1, signal.SIGKILL) < DETECTED
    assert run.end() == 0, run.said
    assert run.rows()[-1]["counts"] == [100, 70]
    found = json.loads((folder / "summary.json").read_text())
    assert (found["workers"], found["steps"]) == (2, 60)
    assert found["ideal_samples_per_s"] == pytest.approx(1.7 / 0.2e-3)
