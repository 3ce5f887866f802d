"""`hetjax train` under the launcher: a process is killed during training, and the run continues."""

import json
import signal
from pathlib import Path

import numpy as np
import pytest
from following import Run

from hetjax.cli import train
from hetjax.report import read_run

pytestmark = pytest.mark.slow

TRAIN = Path(__file__).parents[2] / "experiments" / "train.py"


FLAGS = ["--model", "mlp", "--width", "8", "--optimizer", "sgd", "--learning-rate", "0.02"]


def test_looped_train_is_restarted_with_all_processes_after_a_kill_of_process_0(sandbox):
    seed, epochs = 21, 4
    rng = np.random.default_rng(seed)
    print(f"seed {seed}")
    flags = [*FLAGS, "--batch-size", "100", "--strategy", "balanced", "--engine", "looped", "--epochs", str(epochs)]
    reference, folder = sandbox.folder / "reference", sandbox.folder / "run"
    run = Run(
        sandbox, folder / "metrics.jsonl", "--processes", 2, "--restart", "--grace", 1, "--",
        TRAIN, *flags, "--save-steps", 5, "--out", folder,
    )  # fmt: skip
    run.wait_for_rows(int(rng.integers(8, 40)))
    run.send_signal(0, signal.SIGKILL)
    run.wait_for_restart()
    assert train.main([*flags, "--devices", "1", "--speeds", "real", "--out", str(reference)]) == 0
    assert run.end() == 0, run.err
    assert any("resuming after step" in line for line in run.out)
    resumed = read_run(folder)
    np.testing.assert_allclose(resumed.loss_S, read_run(reference).loss_S, rtol=1e-4)
    assert resumed.samples_S[-1] == epochs * 1438
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["workers"], summary["steps"]) == (2, epochs * 15)


def test_elastic_train_continues_after_a_kill_of_process_0(sandbox):
    """The losses are those of an uninterrupted run, and survivors keep their entries of per-worker lists.

    Worker 0 of 3 is killed: speeds 1 and 0.7 and capacities 100 and 70 remain, which just hold the batch.
    """
    seed, steps = 21, 60
    rng = np.random.default_rng(seed)
    print(f"seed {seed}")
    flags = [*FLAGS, "--batch-size", "170", "--strategy", "balanced", "--steps", str(steps)]
    workers = ["--speeds", "0.5,1,0.7", "--row-time", "0.2", "--capacity", "50,100,70"]
    reference, folder = sandbox.folder / "reference", sandbox.folder / "run"
    run = Run(
        sandbox, folder / "metrics.jsonl", "--processes", 3, "--elastic", "--grace", 1, "--",
        TRAIN, *flags, *workers, "--save-steps", 5, "--out", folder,
    )  # fmt: skip
    run.wait_for_rows(int(rng.integers(8, 40)))
    run.send_signal(0, signal.SIGKILL)
    run.wait_for_restart()
    assert train.main([*flags, "--devices", "1", "--speeds", "real", "--out", str(reference)]) == 0
    assert run.end() == 0, run.err
    assert any("resuming after step" in line for line in run.out)
    resumed, uninterrupted = read_run(folder), read_run(reference)
    np.testing.assert_allclose(resumed.loss_S, uninterrupted.loss_S, rtol=1e-4)
    assert resumed.samples_S[-1] == uninterrupted.samples_S[-1] == 6 * 1438 + 6 * 170
    assert run.rows()[-1]["counts"] == [100, 70]
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["workers"], summary["steps"]) == (2, steps)
    assert summary["ideal_samples_per_s"] == pytest.approx(1.7 / 0.2e-3)


def test_the_remaining_daso_node_continues_after_a_kill(sandbox):
    """A node is killed between exchanges; the other one ends with about the same loss as an uninterrupted run."""
    seed, epochs = 31, 20
    rng = np.random.default_rng(seed)
    print(f"seed {seed}")
    flags = [*FLAGS, "--batch-size", "100", "--sync", "daso", "--controller", "equal", "--epochs", str(epochs)]
    reference, folder = sandbox.folder / "reference", sandbox.folder / "run"
    run = Run(
        sandbox, folder / "metrics.jsonl",
        "--processes", 2, "--elastic", "--grace", 1, "--", TRAIN, *flags, "--save-steps", 7, "--out", folder,
    )  # fmt: skip
    run.wait_for_rows(int(rng.integers(5 * 15, 8 * 15)))  # past the warm-up, in which nodes synchronize in every step
    run.send_signal(1, signal.SIGKILL)
    run.wait_for_restart()
    assert train.main([*flags, "--devices", "2", "--speeds", "real", "--out", str(reference)]) == 0
    assert run.end() == 0, run.err
    assert any("resuming after step" in line for line in run.out)
    resumed, uninterrupted = (json.loads((each / "summary.json").read_text()) for each in (folder, reference))
    assert (resumed["steps"], resumed["samples"], resumed["workers"]) == (epochs * 15, epochs * 1438, 1)
    assert resumed["test_loss"] == pytest.approx(uninterrupted["test_loss"], rel=0.15)
    assert abs(resumed["test_accuracy"] - uninterrupted["test_accuracy"]) < 0.05
