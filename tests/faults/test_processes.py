"""Processes are killed and stopped at random moments: detected, reported, restarted; the run stays the same run."""

import signal
import time
from itertools import groupby, pairwise
from pathlib import Path

import jax
import numpy as np
import pytest
from following import Run, until
from sample_log import check_samples
from tiny_problem import SAMPLES, trainer_for

from hetjax.checkpoint import latest

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).with_name("program.py")


def launch(sandbox, *arguments):
    (sandbox.folder / "run").mkdir(exist_ok=True)
    return Run(sandbox, sandbox.folder / "run" / "steps.jsonl", *arguments)


def uninterrupted_losses(steps, workers=1, **options):
    """The losses of the same run without faults, in this process."""
    trainer, source, state = trainer_for(jax.devices()[:workers], **options)
    with trainer:
        return np.array(trainer.fit(state, source, steps=steps)[1].losses)


def check_same_run(run, losses):
    for row in run.rows():  # repeated steps too
        np.testing.assert_allclose(row["loss"], losses[row["step"] - 1], rtol=1e-4)
    assert len(run.final_rows()) == len(losses)
    assert check_samples([row["samples"] for row in run.final_rows()], SAMPLES) == len(losses) // 10


def test_repeated_kills_and_restarts(sandbox):
    seed, steps, save_steps = 11, 420, 7
    rng = np.random.default_rng(seed)
    kills = [(int(rng.integers(10, 25)), victim, float(rng.uniform(0, 0.05))) for victim in (1, 0, 1)]
    print(f"seed {seed}: (steps into an attempt, process, delay in seconds) {kills}")
    run = launch(
        sandbox, "--processes", 2, "--restart", 4, "--grace", 1, "--",
        PROGRAM, sandbox.folder / "run", steps, "--save-steps", save_steps,
    )  # fmt: skip
    for number, (rows, victim, delay) in enumerate(kills, 1):
        run.wait_for_rows(len(run.rows()) + rows)
        time.sleep(delay)
        run.send_signal(victim, signal.SIGKILL)
        run.wait_for_restart(number)
    assert run.end() == 0, run.err
    check_same_run(run, uninterrupted_losses(steps))
    attempts = [[row["step"] for row in rows] for _, rows in groupby(run.rows(), lambda row: row["attempt"])]
    assert len(attempts) == 1 + len(kills)
    assert all(made == list(range(made[0], made[-1] + 1)) for made in attempts)
    ends = set()  # a process that does not need the lost one goes on until the launcher stops it, and then saves
    for lost, resumed in pairwise(attempts):  # from the last checkpoint; the one in progress may be lost
        saved = resumed[0] - 1
        ends.add(lost[-1])
        assert saved % save_steps == 0 or saved in ends
        assert lost[-1] - saved < 2 * save_steps + 2


def test_elastic_survivors_of_a_killed_and_a_stopped_process(sandbox):
    seed, steps = 5, 400
    rng = np.random.default_rng(seed)
    print(f"seed {seed}")
    run = launch(
        sandbox, "--processes", 3, "--elastic", "--silent-limit", 8, "--grace", 1, "--",
        PROGRAM, sandbox.folder / "run", steps, "--save-seconds", 0.05,
    )  # fmt: skip
    folder = sandbox.folder / "run" / "checkpoints"
    run.wait_for_rows(int(rng.integers(5, 40)))
    until(lambda: latest(folder) is not None, "a checkpoint of three workers")
    run.send_signal(0, signal.SIGKILL)
    until(lambda: run.messages("restarting with 2 processes") == 1, "a restart")
    before = latest(folder)
    run.wait_for_rows(len(run.rows()) + int(rng.integers(5, 40)))
    until(lambda: latest(folder) != before, "a checkpoint of two workers")
    run.send_signal(1, signal.SIGSTOP)
    assert run.end() == 0, run.err
    assert run.messages("has been stopped (SIGSTOP or a debugger)") + run.messages("gave no sign of life") == 1
    check_same_run(run, uninterrupted_losses(steps))
    workers = [row["workers"] for row in run.final_rows()]
    assert workers == sorted(workers, reverse=True)
    assert set(workers) == {3, 2, 1}


def test_a_state_distributed_over_processes_is_saved_and_restored(sandbox):
    """Decentralized workers have parameters of their own: all processes take part in a checkpoint."""
    steps, options = 150, ("--sync", "decentralized", "--controller", "equal", "--save-seconds", 0.2)
    losses = uninterrupted_losses(steps, workers=2, sync="decentralized")
    flags = ["--processes", 2, "--", PROGRAM, sandbox.folder / "run", steps, *options]
    run = launch(sandbox, *flags)
    run.wait_for_rows(15)
    run.launcher.send_signal(signal.SIGTERM)
    assert run.end() == 130, run.err
    last = run.final_rows()[-1]["step"]
    assert 15 <= last < steps
    resumed = launch(sandbox, *flags, "--resume")
    assert resumed.end() == 0, resumed.err
    assert [row["step"] for row in resumed.rows()] == list(range(1, steps + 1))  # no step was repeated
    check_same_run(resumed, losses)
