"""Unlike devices train together: in one process and over several, replicas agree, and slices change no result."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
import quick_compiles
import unlike_program
from unlike_program import OPTIMIZERS, SHARES

from hetjax import presets

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent


def environment(**more):
    paths = [HERE.parents[1], HERE.parent / "support"]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), "XLA_FLAGS": quick_compiles.FLAGS, **more}


def run(case, folder, processes, program=HERE / "unlike_program.py", **more):
    """The results of every process."""
    command = ["-m", "hetjax", "launch", "--processes", processes, "--", program, case, folder]
    done = subprocess.run(
        [sys.executable, *map(str, command)], env=environment(**more), capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr + done.stdout
    return [json.loads((folder / f"{k}.json").read_text()) for k in range(processes)]


def close(found, expected, tolerance=1e-5):
    for mine, theirs in zip(found, expected, strict=True):
        scale = max(1e-3, np.abs(theirs).max(initial=0.0))
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=tolerance * scale)


def test_two_clients_in_one_process_equal_one_device_under_every_controller(tmp_path):
    command = [sys.executable, str(HERE / "unlike_program.py"), "controllers", str(tmp_path)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "0.json").read_text())
    assert set(results) == set(presets.CONTROLLERS)
    for result in results.values():
        assert result["transport"] == "host"
        np.testing.assert_allclose(result["losses"], result["alone"], rtol=1e-5)
        close(result["params"], result["params_alone"])


def test_three_processes_of_unlike_devices_equal_one_device(tmp_path):
    """With two clients, two devices and one device; dropout, BatchNorm and a moving average; 50 steps."""
    there = run("mixed", tmp_path, 3)
    model, data = unlike_program.normalized()
    state, history = unlike_program.train(
        model, optax.sgd(0.05, momentum=0.9), data, model.params, 50, model.model_state,
        devices=jax.devices()[:1], ema_decay=0.9,
    )  # fmt: skip
    for result in there:
        assert result["transport"] == "host"
        np.testing.assert_allclose(result["losses"], history.losses, rtol=2e-4)
        for name in ("params", "model_state", "ema", "opt_state"):
            close(result[name], unlike_program.plain(getattr(state, name)), 1e-4)
    assert len({result["bits"] for result in there}) == 1


def test_a_run_goes_on_in_any_fleet(tmp_path):
    """From one device to slices in three processes, and to copies in two over XLA's collectives."""
    fleets = [None, (3, "host", "sharded"), (2, "mesh", "replicated")]
    losses = []
    for fleet in fleets:
        if fleet is None:
            results = [unlike_program.go_on(tmp_path / "checkpoints", devices=jax.devices()[:1])]
        else:
            processes, transport, update = fleet
            results = run("moved", tmp_path, processes, HETJAX_TRANSPORT=transport, MOVED_UPDATE=update)
            assert {result["transport"] for result in results} == {transport}
        losses += results[0]["losses"]
    steps = [unlike_program.go_on(tmp_path / "alone", devices=jax.devices()[:1]) for _ in fleets]
    np.testing.assert_allclose(losses, [loss for step in steps for loss in step["losses"]], rtol=2e-4)
    for result in results:
        for name in ("params", "model_state", "ema", "opt_state"):
            for found, expected in zip(result[name], steps[-1][name], strict=True):
                np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-5)


def test_replicas_have_the_same_bits_although_one_process_rounds_otherwise(tmp_path):
    """Process 1 has no AVX2 and no fused multiply-add. Replicated updates drift apart, sharded ones cannot.

    All three own slices, so each result comes from both kinds of instructions; BatchNorm's averages have one owner.
    """
    program = tmp_path / "program.py"
    program.write_text(
        "import os, runpy, sys\n"
        "if os.environ['HETJAX_PROCESS'] == '1':\n"
        "    os.environ['XLA_FLAGS'] += ' --xla_cpu_max_isa=AVX'\n"
        "    os.environ.pop('HETJAX_COMPILATION_CACHE_DIR', None)\n"
        f"sys.path.insert(0, {str(HERE)!r})\n"
        f"runpy.run_path({str(HERE / 'unlike_program.py')!r}, run_name='__main__')\n"
    )
    there = run("bits", tmp_path, 3, program, XLA_FLAGS="")  # unoptimized programs round alike everywhere
    assert len({result["sharded"] for result in there}) == 1
    assert any(min(pieces) > 0 and sum(pieces) > 3 for pieces in there[0]["owned"])
    assert len({result["replicated"] for result in there}) > 1


@pytest.mark.parametrize("names", [OPTIMIZERS[start::3] for start in range(3)], ids="-".join)
def test_sharded_updates_equal_replicated_ones_for_every_optimizer(names, tmp_path):
    """With slices 5:3:1:1, and with one process that has nothing to update; the state of the optimizer included."""
    there = run("optimizers", tmp_path, 4, TESTED_OPTIMIZERS="|".join(names))
    for result in there:
        for name in names:
            for shares in SHARES.keys() & result[name].keys():
                close(result[name][shares]["params"], result[name]["replicated"], 1e-6)
                close(result[name][shares]["state"], result[name]["state"], 1e-5)


def test_the_optimizer_state_of_a_process_is_its_share(tmp_path):
    """Adam on four equal processes: a quarter, and up to 5% more."""
    there = run("bytes", tmp_path, 4)
    whole = there[0]["whole"]
    assert sum(result["own"] for result in there) >= 0.99 * whole
    assert max(result["own"] for result in there) <= 1.05 * whole / 4


def test_a_process_on_the_bench_owns_nothing(tmp_path):
    """It gives up its slice with the state of the optimizer, and gets parameters and a slice when it is back."""
    there = run("benched", tmp_path, 2)
    loss_fn, params, data = unlike_program.mlp()
    optimizer, _ = unlike_program.optimizer_of("momentum")
    state, history = unlike_program.train(loss_fn, optimizer, data, params, 20, devices=jax.devices()[:1])
    for process, result in enumerate(there):
        assert [owners for owners, _ in result["owners"]] == [[0], [0, 1], [1], [0, 1]]
        assert result["owners"][0 if process else 2][1] == 0
        np.testing.assert_allclose(result["losses"], history.losses, rtol=1e-5)
        close(result["params"], unlike_program.plain(state.params))
        close(result["state"], unlike_program.plain(state.opt_state))


def test_owners_may_change_while_processes_sit_out(tmp_path):
    """A process without samples that becomes an owner gets the current parameters first."""
    there = run("owners", tmp_path, 2)
    loss_fn, params, data = unlike_program.mlp()
    optimizer, _ = unlike_program.optimizer_of("momentum")
    state, history = unlike_program.train(loss_fn, optimizer, data, params, 24, devices=jax.devices()[:1])
    for result in there:
        np.testing.assert_allclose(result["losses"], history.losses, rtol=1e-5)
        close(result["params"], unlike_program.plain(state.params))
        close(result["state"], unlike_program.plain(state.opt_state))
