"""States survive a round trip through a checkpoint; other models and optimizers are refused."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fake_trainer import FakeTrainer
from saved_states import assert_trees_equal

from hetjax import checkpoint
from hetjax.state import State

PARAMS = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.float32(3)}


def state_of(params, step=7):
    ema = jax.tree.map(lambda p: p + 1, params)
    return State(params, {"mean": np.ones(2, np.float32)}, optax.adam(1e-3).init(params), ema, step=step, cursor=70)


def fresh():
    zeros = jax.tree.map(np.zeros_like, PARAMS)
    return State(zeros, {"mean": np.zeros(2, np.float32)}, optax.adam(1e-3).init(zeros), zeros)


def test_round_trip(tmp_path):
    path = checkpoint.save(tmp_path, state_of(PARAMS), FakeTrainer({"memory": [1, None, "x"]}), {"seconds": 1.5})
    trainer = FakeTrainer()
    found = checkpoint.restore(path, fresh(), trainer)
    assert_trees_equal(found.state.core, state_of(PARAMS).core)
    assert (found.state.step, found.state.cursor, found.state.replicas, found.state.more) == (7, 70, 0, None)
    assert found.extra == {"seconds": 1.5}
    assert trainer.recalled == {"memory": [1, None, "x"]}


def test_a_later_state_of_the_same_step_is_saved_too(tmp_path):
    """A sync without a barrier may be stopped within a step."""
    with checkpoint.Saver(tmp_path, FakeTrainer()) as saver:
        for cursor in (70, 70, 75):
            saver.save(None, replace(state_of(PARAMS), cursor=cursor))
    assert checkpoint.restore(saver.last, fresh(), FakeTrainer()).state.cursor == 75


def test_round_trip_of_stacked_replicas_and_the_state_of_a_sync(tmp_path):
    stacked = jax.tree.map(lambda x: np.stack([x, x + 1, x + 2]), state_of(PARAMS).core)
    moments = optax.adam(1e-3).init(PARAMS)  # the structure of opt_state
    more = {"sent": [stacked[0], (np.int32(4), None)], "age": np.arange(3), "moments": moments, "nothing": {}}
    state = State(*stacked, step=2, cursor=5, replicas=3, more=more)
    found = checkpoint.restore(checkpoint.save(tmp_path, state, FakeTrainer()), fresh(), FakeTrainer()).state
    assert_trees_equal(found.core, state.core)
    assert_trees_equal(found.more, more)
    assert found.replicas == 3


def test_round_trip_of_types_that_numpy_lacks(tmp_path):
    params = {"w": jnp.ones((2, 2), jnp.bfloat16) / 3, "n": np.int8(-3), "empty": np.zeros((0, 4), np.float32)}
    state = State(params, None, {"key": jax.random.key(5), "old": jax.random.PRNGKey(6)}, None)
    like = State(params, None, {"key": jax.random.key(0), "old": jax.random.PRNGKey(0)}, None)
    found = checkpoint.restore(checkpoint.save(tmp_path, state, FakeTrainer()), like, FakeTrainer()).state
    assert_trees_equal(found.params, params)
    assert jnp.array_equal(jax.random.uniform(found.opt_state["key"]), jax.random.uniform(jax.random.key(5)))
    assert_trees_equal(found.opt_state["old"], jax.random.PRNGKey(6))


def test_the_copy_is_independent_of_donated_buffers(tmp_path, monkeypatch):
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    x = step(jnp.zeros(100_000))
    snapshots = []
    monkeypatch.setattr(checkpoint.saver, "write_snapshot", lambda folder, snapshot: snapshots.append(snapshot))
    saver = checkpoint.Saver(tmp_path, FakeTrainer())
    saver.save(None, State({"x": x}, None, None, None, step=1))
    for _ in range(5):
        x = step(x)
    saver.close()
    np.testing.assert_array_equal(snapshots[0].arrays[0], 1.0)


@pytest.mark.parametrize(
    "params",
    [
        {**PARAMS, "c": np.float32(0)},
        {**PARAMS, "a": np.zeros((2, 4), np.float32)},
        {**PARAMS, "a": np.zeros((2, 3), np.int32)},
        {"b": PARAMS["b"]},
    ],
)
def test_another_model_is_refused_before_the_trainer_loads_its_state(tmp_path, params):
    path = checkpoint.save(tmp_path, state_of(PARAMS), FakeTrainer())
    trainer = FakeTrainer()
    with pytest.raises(ValueError, match="belongs to another model"):
        checkpoint.restore(path, state_of(params), trainer)
    assert trainer.recalled is None


def test_another_optimizer_is_refused(tmp_path):
    path = checkpoint.save(tmp_path, state_of(PARAMS), FakeTrainer())
    like = State(PARAMS, {"mean": np.zeros(2, np.float32)}, optax.sgd(0.1, momentum=0.9).init(PARAMS), PARAMS)
    with pytest.raises(ValueError, match=r"another model or optimizer: .* the first is opt_state"):
        checkpoint.restore(path, like, FakeTrainer())


def test_a_tree_of_unknown_structure_cannot_be_saved(tmp_path):
    unknown = optax.TraceState(trace=np.zeros(3))
    with pytest.raises(TypeError, match=r"State\.more holds a TraceState, which cannot be saved"):
        checkpoint.save(tmp_path, State(PARAMS, None, (), None, more={"x": unknown}), FakeTrainer())
