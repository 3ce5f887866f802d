"""Checkpoints give back what was saved, and nothing that was damaged or belongs to another model."""

import jax
import numpy as np
import optax
import pytest

from hetjax import checkpoint
from hetjax.plan.controllers import make
from hetjax.run.update import State

PARAMS = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.float32(3)}


def state_of(params, step=7):
    ema = jax.tree.map(lambda p: p + 1, params)
    return State(params, {"mean": np.ones(2, np.float32)}, optax.adam(1e-3).init(params), ema, step=step, cursor=70)


def fresh():
    zeros = jax.tree.map(np.zeros_like, PARAMS)
    return State(zeros, {"mean": np.zeros(2, np.float32)}, optax.adam(1e-3).init(zeros), zeros)


def test_everything_comes_back(tmp_path):
    path = checkpoint.save(tmp_path, state_of(PARAMS), make("balanced"), {"seconds": 1.5})
    state, extra = checkpoint.restore(path, fresh(), make("balanced"))
    jax.tree.map(np.testing.assert_array_equal, state.core, state_of(PARAMS).core)
    assert (state.step, state.cursor, extra) == (7, 70, {"seconds": 1.5})


def test_the_last_two_are_kept_and_the_newest_is_found(tmp_path):
    assert checkpoint.latest(tmp_path) is None
    for step in (3, 20, 100):
        checkpoint.save(tmp_path, state_of(PARAMS, step), make("equal"), {})
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["step_00000020", "step_00000100"]
    assert checkpoint.latest(tmp_path).name == "step_00000100"


def test_damage_is_found_before_anything_is_used(tmp_path):
    path = checkpoint.save(tmp_path, state_of(PARAMS), make("equal"), {})
    victim = max((p for p in path.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    content = bytearray(victim.read_bytes())
    content[len(content) // 2] ^= 1
    victim.write_bytes(content)
    with pytest.raises(ValueError, match=f"{victim.name} has changed since it was written"):
        checkpoint.restore(path, fresh(), make("equal"))
    victim.unlink()
    with pytest.raises(ValueError, match=f"{victim.name} is missing"):
        checkpoint.restore(path, fresh(), make("equal"))
    (path / "manifest.json").unlink()
    with pytest.raises(ValueError, match="no whole checkpoint"):
        checkpoint.restore(path, fresh(), make("equal"))


def test_another_model_is_refused(tmp_path):
    path = checkpoint.save(tmp_path, state_of(PARAMS), make("equal"), {})
    for params in ({**PARAMS, "c": np.float32(0)}, {**PARAMS, "a": np.zeros((2, 4), np.float32)}):
        with pytest.raises(ValueError, match="belongs to another model"):
            checkpoint.restore(path, state_of(params), make("equal"))
