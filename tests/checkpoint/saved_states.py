"""Small states, saved as checkpoints without training."""

import jax
import numpy as np
from fake_trainer import FakeTrainer

from hetjax import checkpoint
from hetjax.history import Record
from hetjax.state import State


def state_at(step, size=3):
    return State({"w": np.full(size, step, np.float32)}, None, {"m": np.zeros(2, np.float32)}, None, step, step * 10)


def record_of(step, save=False):
    zeros = np.zeros(1)
    return Record(step, 0, 0.0, {}, zeros, zeros, zeros, 0.1, 0.1, 1, False, "", save=save)


def save_steps(folder, *steps, keep=3):
    return [checkpoint.save(folder, state_at(step), FakeTrainer(), {"step": step}, keep) for step in steps]


def newest_step(folder):
    return checkpoint.restore_latest(folder, state_at(0), FakeTrainer()).state.step


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def assert_trees_equal(a, b):
    """Same structure, dtypes and values."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)
