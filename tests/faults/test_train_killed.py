"""`hetjax train` under the launcher: a process is killed during training, and the run continues."""

import json
import signal
from pathlib import Path

import numpy as np
import pytest
from following import Run, until

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


ELASTIC = ("--elastic", "--transport", "host")
SETTING = [*FLAGS, "--batch-size", "100", "--strategy", "balanced", "--schedule", "constant"]
ALIKE = 50  # steps of the loss curve that are compared: later ones amplify round-off


def losses_are_those_of_one_process(run, folder, steps):
    assert (
        train.main([*SETTING, "--steps", str(steps), "--devices", "1", "--speeds", "real", "--out", str(folder)]) == 0
    )
    alone = read_run(folder)
    assert run.step_S.tolist() == alone.step_S[: run.steps].tolist() == list(range(1, run.steps + 1))
    assert run.samples_S.tolist() == alone.samples_S[: run.steps].tolist()
    np.testing.assert_allclose(run.loss_S[:ALIKE], alone.loss_S[:ALIKE], rtol=1e-4)


def test_another_process_writes_on_when_process_0_of_an_elastic_run_is_killed(sandbox):
    steps, folder = 400, sandbox.folder / "run"
    run = Run(
        sandbox, folder / "metrics.jsonl", "--processes", 3, *ELASTIC, "--",
        TRAIN, *SETTING, "--steps", steps, "--save-steps", 50, "--out", folder,
    )  # fmt: skip
    run.wait_for_rows(10)
    run.send_signal(0, signal.SIGKILL)
    assert run.end() == 0, run.err
    found = read_run(folder)
    assert not found.warnings
    losses_are_those_of_one_process(found, sandbox.folder / "reference", steps)
    ((at, (change,)),) = [(k, changes) for k, changes in enumerate(found.members_S) if changes]
    assert (change.left, change.came) == ((0,), ())
    assert at >= 10
    assert (np.diff(found.seconds_S) >= 0).all()
    assert change.seconds <= found.seconds_S[-1] == json.loads((folder / "summary.json").read_text())["wall_s"]
    assert any("Member 0 was lost" in line for line in run.out)
    assert "generation 2 with members 1, 2" in (folder / "log.txt").read_text()
    assert (folder / "run.png").exists()


def test_a_run_goes_on_while_chaos_kills_its_processes(sandbox):
    folder = sandbox.folder / "run"
    run = Run(
        sandbox, folder / "metrics.jsonl", "--processes", 3, *ELASTIC, "--restart", 1000, "--chaos", 5, "--",
        TRAIN, *SETTING, "--steps", 1_000_000, "--save-steps", 100, "--out", folder,
    )  # fmt: skip
    came = lambda: sum(len(change["came"]) for row in run.rows() for change in row.get("members", ()))
    until(lambda: came() >= 2 or run.launcher.poll() is not None, "two newcomers")
    run.launcher.send_signal(signal.SIGTERM)
    assert run.end() == 130, run.err
    assert run.messages("was killed by SIGKILL; another one is started in its place") >= 2
    found = read_run(folder)
    losses_are_those_of_one_process(found, sandbox.folder / "reference", found.steps)
