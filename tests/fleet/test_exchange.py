"""Exchanges in fewer bits lose nothing and keep replicas identical; delayed updates follow their recursion."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import exchange_program
import numpy as np
import pytest
import quick_compiles
from exchange_program import RATE, SAVED, SIZES

from hetjax.report import read_run

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
TRAIN = HERE.parents[1] / "experiments" / "train.py"


def run(case, folder, processes):
    """The results of every process."""
    paths = os.pathsep.join(map(str, [HERE.parents[1], HERE.parent / "support"]))
    command = ["-m", "hetjax", "launch", "--processes", processes, "--", HERE / "exchange_program.py", case, folder]
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        env={**os.environ, "PYTHONPATH": paths, "XLA_FLAGS": quick_compiles.FLAGS},
        capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr + done.stdout
    return [json.loads((folder / f"{k}.json").read_text()) for k in range(processes)]


def without_cuts(steps, batches=None):
    """The parameters [b, w] after plain steps on the linear loss, in float64."""
    b, w = np.ones(1), np.zeros(exchange_program.WIDTH)
    for batch in (batches or exchange_program.batches())[:steps]:
        b -= RATE * batch["x"][:, 0].astype(np.float64).mean()
        w -= RATE * batch["wide"].astype(np.float64).mean(axis=0)
    return [b, w]


def in_all(state):
    """Parameters as they would be if what was left over had been sent: masters - rate * errors."""
    flat = zip(state["params"], state["differences"], state["sums"], strict=True)
    return [np.add(params, differences) - RATE * np.array(sums) for params, differences, sums in flat]


def test_nothing_is_lost_in_fewer_bits_and_replicas_have_the_same_bits(tmp_path):
    """Steps of unlike sizes, a process that rounds otherwise, and one that has no samples any more."""
    there = run("cut", tmp_path, 3)
    assert there[0] == there[1] == there[2]  # also what was left over
    for wire in ("bfloat16", "int8"):
        for name, steps in (("saved", SAVED), ("end", len(SIZES))):
            state = there[0][wire][name]
            for found, expected in zip(in_all(state), without_cuts(steps), strict=True):
                np.testing.assert_allclose(found, expected, rtol=1e-5, atol=2e-6)
            error = np.abs(np.subtract(state["params"][1], without_cuts(steps)[1])).max()
            assert 1e-6 < error < {"bfloat16": 0.01, "int8": 0.05}[wire] * np.abs(without_cuts(steps)[1]).max()
            assert np.abs(state["sums"][1]).max() > 0
    for found, expected in zip(there[0]["auto"]["end"]["params"], without_cuts(len(SIZES)), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=0.02)  # whatever was the quickest


def test_a_benched_process_gives_away_its_slice_its_masters_and_what_it_has_left_over(tmp_path):
    """In its first step without samples; nothing is lost on the way, and replicas have the same bits."""
    there = run("benched", tmp_path, 2)
    assert there[0]["states"] == there[1]["states"]
    for name, steps in (("saved", SAVED), ("end", len(SIZES))):
        for found, expected in zip(in_all(there[0]["states"][name]), without_cuts(steps), strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=2e-6)
    for process, result in enumerate(there):
        assert [owners for owners, _ in result["owners"]] == [[0], [0, 1], [1], [0, 1]]
        on_the_bench, back = (0, 1) if process else (2, 3)
        assert result["owners"][on_the_bench][1] == 0
        assert result["owners"][back][1] > 0
        away = range(2, 4) if process else range(6, 8)
        assert result["kept"][0] > 0
        assert not any(result["kept"][n] for n in away)
        assert all(result["kept"][8:])


def test_a_step_that_is_not_finite_is_left_out_with_all_that_was_sent_of_it(tmp_path):
    there = run("skipped", tmp_path, 3)
    assert there[0] == there[1] == there[2]
    finite = [batch for n, batch in enumerate(exchange_program.batches()) if n != exchange_program.BAD]
    expected = without_cuts(len(finite), finite)
    for found in (there[0]["float32"]["params"], in_all(there[0]["int8"])):
        for mine, exact in zip(found, expected, strict=True):
            np.testing.assert_allclose(mine, exact, rtol=1e-5, atol=2e-6)


def test_int8_and_delay_go_on_from_a_checkpoint_on_disk(tmp_path):
    """Adam and BatchNorm. What the first two steps read was saved; then the rounding of the cuts is another one."""

    def train(folder, *flags):
        command = ["-m", "hetjax", "launch", "--processes", "2", "--transport", "host", "--", TRAIN, *flags]
        done = subprocess.run(
            [sys.executable, *map(str, command), "--out", str(folder)],
            env={**os.environ, "PYTHONPATH": str(HERE.parents[1]), "XLA_FLAGS": quick_compiles.FLAGS},
            capture_output=True, text=True, timeout=280,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr + done.stdout
        return done.stdout

    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(
        whole, "--model", "resnet", "--width", "4", "--optimizer", "adam", "--learning-rate", "0.001", "--batch-size",
        "32", "--strategy", "equal", "--engine", "looped", "--wire", "int8", "--delay", "1", "--steps", "12",
        "--save-steps", "6",
    )  # fmt: skip
    shutil.copytree(whole, parts)
    shutil.rmtree(parts / "checkpoints" / "step_00000012")
    (parts / "summary.json").unlink()  # of a run that has finished
    assert "resuming after step 6" in train(parts, "--resume")
    found, expected = read_run(parts).loss_S, read_run(whole).loss_S
    assert len(found) == len(expected) == 12
    np.testing.assert_allclose(found[:8], expected[:8], rtol=1e-4)
    np.testing.assert_allclose(found[8:], expected[8:], rtol=0.05)
    assert json.loads((parts / "summary.json").read_text())["wire"] == "int8"


def test_a_saved_run_goes_on_with_what_was_left_over(tmp_path):
    there = run("resumed", tmp_path, 3)
    assert there[0] == there[1] == there[2]
    batches = exchange_program.batches()
    expected = without_cuts(SAVED + 1, [*batches[:SAVED], batches[0]])
    for found, exact in zip(in_all(there[0]["int8"]), expected, strict=True):
        np.testing.assert_allclose(found, exact, rtol=1e-5, atol=2e-6)
    assert there[0]["float32"]["sums"] == []
    assert there[0]["float32"] == there[0]["auto"]  # both go on from the masters
    saved = there[0]["saved"]
    mean = [batches[0]["x"][:, 0].mean(), batches[0]["wide"].mean(axis=0)]
    for found, params, more, gradient in zip(
        there[0]["float32"]["params"], saved["params"], saved["differences"], mean, strict=True
    ):
        np.testing.assert_allclose(found, np.add(params, more) - RATE * gradient, rtol=1e-5, atol=1e-6)


def test_float64_has_nothing_to_cut_and_the_summary_says_what_was_used(tmp_path):
    there = run("double", tmp_path, 2)
    assert there[0] == there[1]
    assert [there[0][wire][:2] for wire in ("auto", "int8")] == [["float32", "float64"], ["int8", "float32"]]


def delayed(rows, saved_after):
    """A plain program for delayed SGD with momentum, in float64: the parameters after `saved_after` and all steps."""
    w, velocity, flying, found, losses = np.zeros(6), np.zeros(6), None, {}, []

    def update(w, velocity, gradient):
        velocity = 0.9 * velocity + gradient
        return w - RATE * velocity, velocity

    read = w
    for n, batch in enumerate(rows):
        if n == saved_after:
            found["saved"], _ = update(w, velocity, flying)
        x, y = batch["x"].astype(np.float64), batch["y"].astype(np.float64)
        losses.append(float(((x @ read - y) ** 2).mean()))
        gradient = 2 * x.T @ (x @ read - y) / len(x)
        if flying is not None:
            w, velocity = update(w, velocity, flying)
        read, flying = w, gradient
    found["end"], _ = update(w, velocity, flying)
    return found, losses


def test_delayed_updates_follow_their_recursion(tmp_path):
    """Looking at the state in between changes nothing, and a run resumed from it takes the same steps."""
    there = run("delay", tmp_path, 2)
    assert there[0] == there[1]
    found, losses = delayed(exchange_program.batches(), SAVED)
    np.testing.assert_allclose(there[0]["losses"], losses, rtol=1e-4)
    for name, w in {**found, "resumed": found["end"]}.items():
        np.testing.assert_allclose(there[0]["params"][name], w, rtol=1e-4, atol=1e-5)


def test_options_that_do_not_go_together_are_refused_in_all_processes(tmp_path):
    there = run("refused", tmp_path, 2)
    assert there[0] == there[1]
    for text, part in zip(
        there[0],
        ["Unknown wire 'float16'", "update='replicated'", "update='replicated'", "delay must be 0", "'decentralized'",
         "'daso'"],
        strict=True,
    ):  # fmt: skip
        assert part in text
