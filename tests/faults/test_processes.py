"""Processes are killed and stopped at random moments: found, named, started again; the run stays the same run."""

import signal
import time
from itertools import pairwise
from pathlib import Path

import jax
import numpy as np
import pytest
from following import DETECTED, Run, until
from sample_log import check_samples
from tiny_problem import SAMPLES, trainer_for

from hetjax.checkpoint import latest

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).with_name("program.py")


def launch(place, *arguments):
    (place.folder / "run").mkdir(exist_ok=True)
    return Run(place, place.folder / "run" / "steps.jsonl", *arguments)


def losses_of_one_worker(steps, **options):
    """The run as it is when nothing happens, in this process."""
    trainer, source, state = trainer_for(jax.devices()[: options.pop("workers", 1)], **options)
    with trainer:
        return np.array(trainer.fit(state, source, steps=steps)[1].losses)


def check_the_same(run, whole):
    for row in run.rows():  # those that were done again too
        np.testing.assert_allclose(row["loss"], whole[row["step"] - 1], rtol=1e-4)
    assert len(run.kept()) == len(whole)
    assert check_samples([row["samples"] for row in run.kept()], SAMPLES) == len(whole) // 10


def test_killed_again_and_again_and_started_again(place):
    seed, steps, every = 11, 420, 7
    rng = np.random.default_rng(seed)
    strikes = [(int(rng.integers(10, 25)), victim, float(rng.uniform(0, 0.05))) for victim in (1, 0, 1)]
    print(f"seed {seed}: (steps into an attempt, process, seconds later) {strikes}")
    run = launch(
        place, "--processes", 2, "--restart", 4, "--grace", 1, "--",
        PROGRAM, place.folder / "run", steps, "--save-steps", every,
    )  # fmt: skip
    for number, (into, victim, later) in enumerate(strikes, 1):
        run.wait_for_rows(len(run.rows()) + into)
        time.sleep(later)
        assert run.strike(victim, signal.SIGKILL) < DETECTED
        until(lambda number=number: run.heard("starts again") == number, "a new start")
    assert run.end() == 0, run.said
    check_the_same(run, losses_of_one_worker(steps))
    jumps = [(a, b) for a, b in pairwise(row["step"] for row in run.rows()) if b != a + 1]
    assert len(jumps) <= len(strikes)
    for last, again in jumps:  # from the last checkpoint; the one that was being written may be lost
        assert (again - 1) % every == 0
        assert last - (again - 1) < 2 * every + 2


def test_elastic_on_the_survivors_of_a_killed_and_a_stopped_process(place):
    seed, steps = 5, 400
    rng = np.random.default_rng(seed)
    print(f"seed {seed}")
    run = launch(
        place, "--processes", 3, "--elastic", "--silent-limit", 4, "--grace", 1, "--",
        PROGRAM, place.folder / "run", steps, "--save-seconds", 0.05,
    )  # fmt: skip
    folder = place.folder / "run" / "checkpoints"
    run.wait_for_rows(int(rng.integers(5, 40)))
    until(lambda: latest(folder) is not None, "a checkpoint of three workers")
    assert run.strike(0, signal.SIGKILL) < DETECTED
    until(lambda: run.heard("starts again with 2 processes") == 1, "a new start")
    before = latest(folder)
    run.wait_for_rows(len(run.rows()) + int(rng.integers(5, 40)))
    until(lambda: latest(folder) != before, "a checkpoint of two workers")
    assert run.strike(1, signal.SIGSTOP) < DETECTED
    assert run.end() == 0, run.said
    assert run.heard("has been stopped (SIGSTOP or a debugger)") + run.heard("gave no sign of life") == 1
    check_the_same(run, losses_of_one_worker(steps))
    workers = [row["workers"] for row in run.kept()]
    assert workers == sorted(workers, reverse=True)
    assert set(workers) == {3, 2, 1}


def test_a_state_spread_over_processes_is_saved_and_restored(place):
    """Decentralized workers each hold parameters of their own: all processes take part in a checkpoint."""
    steps, options = 150, ("--sync", "decentralized", "--controller", "equal", "--save-seconds", 0.2)
    whole = losses_of_one_worker(steps, workers=2, sync="decentralized")
    flags = ["--processes", 2, "--", PROGRAM, place.folder / "run", steps, *options]
    run = launch(place, *flags)
    run.wait_for_rows(15)
    run.launcher.send_signal(signal.SIGTERM)
    assert run.end() == 130, run.said
    stopped = run.kept()[-1]["step"]
    assert 15 <= stopped < steps
    again = launch(place, *flags, "--resume")
    assert again.end() == 0, again.said
    assert [row["step"] for row in again.rows()] == list(range(1, steps + 1))  # nothing was done twice
    check_the_same(again, whole)
