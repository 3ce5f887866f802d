"""A state comes back from a checkpoint as it was, and not into another model."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fake_trainer import FakeTrainer

from hetjax import checkpoint
from hetjax.reduce.update import State

PARAMS = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.float32(3)}


def state_of(params, step=7):
    ema = jax.tree.map(lambda p: p + 1, params)
    return State(params, {"mean": np.ones(2, np.float32)}, optax.adam(1e-3).init(params), ema, step=step, cursor=70)


def fresh():
    zeros = jax.tree.map(np.zeros_like, PARAMS)
    return State(zeros, {"mean": np.zeros(2, np.float32)}, optax.adam(1e-3).init(zeros), zeros)


def same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)


def test_everything_comes_back(tmp_path):
    path = checkpoint.save(tmp_path, state_of(PARAMS), FakeTrainer({"law": [1, None, "x"]}), {"seconds": 1.5})
    trainer = FakeTrainer()
    found = checkpoint.restore(path, fresh(), trainer)
    same(found.state.core, state_of(PARAMS).core)
    assert (found.state.step, found.state.cursor, found.state.replicas, found.state.more) == (7, 70, 0, None)
    assert found.extra == {"seconds": 1.5}
    assert trainer.recalled == {"law": [1, None, "x"]}


def test_a_state_further_on_in_the_same_step_is_saved_too(tmp_path):
    """Without a barrier a run may be stopped anywhere."""
    with checkpoint.Saver(tmp_path, FakeTrainer()) as saver:
        for cursor in (70, 70, 75):
            saver.save(None, replace(state_of(PARAMS), cursor=cursor))
    assert checkpoint.restore(saver.last, fresh(), FakeTrainer()).state.cursor == 75


def test_stacked_replicas_and_what_a_sync_keeps_come_back(tmp_path):
    stacked = jax.tree.map(lambda x: np.stack([x, x + 1, x + 2]), state_of(PARAMS).core)
    moments = optax.adam(1e-3).init(PARAMS)  # a tree formed like the optimizer's part of the state
    more = {"sent": [stacked[0], (np.int32(4), None)], "age": np.arange(3), "moments": moments, "nothing": {}}
    state = State(*stacked, step=2, cursor=5, replicas=3, more=more)
    found = checkpoint.restore(checkpoint.save(tmp_path, state, FakeTrainer()), fresh(), FakeTrainer()).state
    same(found.core, state.core)
    same(found.more, more)
    assert found.replicas == 3


def test_types_that_numpy_does_not_know_come_back(tmp_path):
    params = {"w": jnp.ones((2, 2), jnp.bfloat16) / 3, "n": np.int8(-3), "empty": np.zeros((0, 4), np.float32)}
    state = State(params, None, {"key": jax.random.key(5), "old": jax.random.PRNGKey(6)}, None)
    like = State(params, None, {"key": jax.random.key(0), "old": jax.random.PRNGKey(0)}, None)
    found = checkpoint.restore(checkpoint.save(tmp_path, state, FakeTrainer()), like, FakeTrainer()).state
    same(found.params, params)
    assert jnp.array_equal(jax.random.uniform(found.opt_state["key"]), jax.random.uniform(jax.random.key(5)))
    same(found.opt_state["old"], jax.random.PRNGKey(6))


def test_the_copy_does_not_change_when_the_buffers_are_used_again(tmp_path, monkeypatch):
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    x = step(jnp.zeros(100_000))
    taken = []
    monkeypatch.setattr(checkpoint.saver, "fill", lambda folder, snapshot: taken.append(snapshot))
    saver = checkpoint.Saver(tmp_path, FakeTrainer())
    saver.save(None, State({"x": x}, None, None, None, step=1))
    for _ in range(5):
        x = step(x)
    saver.close()
    np.testing.assert_array_equal(taken[0].arrays[0], 1.0)


@pytest.mark.parametrize(
    "params",
    [
        {**PARAMS, "c": np.float32(0)},
        {**PARAMS, "a": np.zeros((2, 4), np.float32)},
        {**PARAMS, "a": np.zeros((2, 3), np.int32)},
        {"b": PARAMS["b"]},
    ],
)
def test_another_model_is_refused_before_the_trainer_hears_of_it(tmp_path, params):
    path = checkpoint.save(tmp_path, state_of(PARAMS), FakeTrainer())
    trainer = FakeTrainer()
    with pytest.raises(ValueError, match="belongs to another model"):
        checkpoint.restore(path, state_of(params), trainer)
    assert trainer.recalled is None


def test_another_optimizer_is_refused(tmp_path):
    path = checkpoint.save(tmp_path, state_of(PARAMS), FakeTrainer())
    like = State(PARAMS, {"mean": np.zeros(2, np.float32)}, optax.sgd(0.1, momentum=0.9).init(PARAMS), PARAMS)
    with pytest.raises(ValueError, match=r"another model or optimizer: .* first opt_state"):
        checkpoint.restore(path, like, FakeTrainer())


def test_a_tree_of_unknown_form_is_refused_when_it_is_saved(tmp_path):
    unknown = optax.TraceState(trace=np.zeros(3))
    with pytest.raises(TypeError, match=r"State\.more holds a TraceState, which cannot be saved"):
        checkpoint.save(tmp_path, State(PARAMS, None, (), None, more={"x": unknown}), FakeTrainer())
