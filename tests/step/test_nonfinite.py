"""NaN and infinity in losses, gradients and updates are found, reported, and kept out of the parameters."""

import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from hetjax import Chunked, NonFiniteError, Trainer
from hetjax.reduce.finite import LARGE, NONFINITE, _by_squares, _in_one_pass, all_finite
from hetjax.sampling.order import Sampler
from hetjax.sync import AdaptiveSgd, Asynchronous, Daso, Decentralized, Hogbatch

SAMPLES, BATCH = 48, 16  # three steps an epoch


def squares(params, batch, keys):
    return 0.5 * (batch["x"] @ params["w"] - batch["y"]) ** 2


def linear(params, batch, keys):
    return -batch["y"] * (batch["x"] @ params["w"])


def data(poison=None):
    """Samples, one of which, in the second step, has the target `poison`."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(SAMPLES, 3)).astype(np.float32)
    y = x.sum(1)
    if poison is not None:
        y[Sampler(SAMPLES, BATCH, 0).indices(0, 0, SAMPLES)[20]] = poison
    return {"x": x, "y": y}


def fragile():
    """SGD with rate 0.1, whose update and state are NaN for a large gradient."""

    def update(grads, state, params=None):
        state = jax.tree.map(lambda g: jnp.where(jnp.abs(g) > 1e3, jnp.nan, g), grads)
        return jax.tree.map(lambda g: -0.1 * g, state), state

    return optax.GradientTransformation(lambda params: jax.tree.map(jnp.zeros_like, params), update)


def trainer_for(optimizer=None, loss_fn=squares, **options):
    stepped = getattr(options.get("sync"), "stepped", True)
    controller = {"controller": "equal"} if stepped else {}
    options = {
        "batch_size": BATCH,
        "devices": jax.devices()[:2],
        "engine": Chunked(rungs=[16]),
        **controller,
        **options,
    }
    return Trainer(loss_fn, fragile() if optimizer is None else optimizer, **options)


def fit(rows, optimizer=None, *, epochs=None, steps=None, **options):
    with trainer_for(optimizer, **options) as trainer:
        state = trainer.init({"w": jnp.zeros(3)})
        state, history = trainer.fit(state, rows, **({"steps": steps} if steps else {"epochs": epochs or 1}))
        return jax.tree.map(np.asarray, trainer.answer(state)), history


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize(("value", "finite"), [(1, True), (np.nan, False), (np.inf, False), (-np.inf, False)])
def test_all_finite(dtype, value, finite):
    tree = {"large": jnp.ones((40, 50), dtype).at[7, 9].set(value), "count": jnp.int32(3), "none": jnp.zeros((0, 2))}
    assert bool(jax.jit(all_finite)(tree)) is finite
    assert bool(all_finite(jnp.full(3, jnp.finfo(dtype).max)))  # though its squares are infinite
    assert not all_finite([jnp.full(3, jnp.finfo(dtype).max), jnp.full((), value, dtype) * jnp.inf])
    assert all_finite({"key": jax.random.key(0), "count": jnp.int32(3)})


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize(
    ("value", "level"), [(1, 0), (jnp.finfo, LARGE), (np.nan, NONFINITE), (np.inf, NONFINITE), (-np.inf, NONFINITE)]
)
def test_the_test_for_accelerators_finds_what_that_for_cpus_finds(dtype, value, level):
    value = float(jnp.finfo(dtype).max) if value is jnp.finfo else value
    few, many = jnp.ones(7, dtype).at[3].set(value), jnp.ones(2**14, dtype).at[-1].set(value)
    level = 0 if dtype == jnp.float16 and level == LARGE else level  # their squares are finite in float32
    ones = jnp.ones(5, dtype)
    for arrays in ([few], [ones, few], [many, ones], [ones, few, many]):
        assert _in_one_pass(arrays) == level == _by_squares(arrays)


@pytest.mark.parametrize("transport", ["mesh", "host"])
def test_a_large_gradient_is_not_nan(transport):
    """Its norm squared is infinite in float32."""
    rows = data(poison=1e24)
    plain, history = fit(rows, optax.sgd(1e-24), loss_fn=linear, transport=transport)
    assert not any(record.nonfinite for record in history.records)
    index = Sampler(SAMPLES, BATCH, 0).indices(0, 0, SAMPLES)[20]
    np.testing.assert_allclose(plain.params["w"], rows["x"][index] / BATCH, rtol=1e-5)


SYNCS = {
    "mesh": {},
    "host": {"transport": "host"},
    "decentralized": {"sync": Decentralized("complete")},
    "daso, all at once": {"sync": Daso(nodes=2, warm_up=1)},
    "daso": {"sync": Daso(nodes=2, warm_up=0, cool_down=0)},
    "hogbatch": {"sync": Hogbatch(batches=4)},  # the sample may come in any step
    "adaptive sgd": {"sync": AdaptiveSgd(batches=4)},
}


@pytest.mark.parametrize("sync", SYNCS)
def test_a_bad_update_of_good_gradients_is_named_and_can_be_skipped(sync, caplog):
    what = "the loss and the gradient were finite, but the optimizer's update of worker"
    step = r"\d" if isinstance(SYNCS[sync].get("sync"), Asynchronous) else "2"
    with pytest.raises(NonFiniteError, match=rf"Step {step}: {what} [01, ]* was NaN or infinite\. Check the optimizer"):
        fit(data(poison=1e9), **SYNCS[sync])
    state, history = fit(data(poison=1e9), on_nonfinite="skip", **SYNCS[sync])
    assert sum(record.bad_update for record in history.records) == 1
    assert re.search(rf"Step {step}: {what}", caplog.text)
    chex.assert_tree_all_finite(state.core)
    assert 0.05 < np.abs(state.params["w"] - 1).max() < 0.95


@pytest.mark.parametrize("transport", ["mesh", "host"])
def test_a_skipped_step_changes_nothing(transport):
    """Neither parameters nor momenta, averages or counters."""
    options = {"on_nonfinite": "skip", "ema_decay": 0.9, "transport": transport}
    optimizer = optax.chain(optax.sgd(0.1, momentum=0.9), fragile())
    one, _ = fit(data(), optimizer, steps=1, **options)
    two, history = fit(data(poison=1e9), optimizer, steps=2, **options)
    assert history.records[1].left_out
    chex.assert_trees_all_equal(two.core, one.core)


def test_a_state_that_overflows_is_a_bad_update():
    """Adam squares the gradient: with an infinite state the parameter would never move again."""
    with pytest.raises(NonFiniteError, match=r"Step 2: .* the optimizer's update"):
        fit(data(poison=1e22), optax.adam(0.1), loss_fn=linear)
    state, _ = fit(data(poison=1e22), optax.adam(0.1), loss_fn=linear, on_nonfinite="skip")
    assert np.isfinite(state.opt_state[0].nu["w"]).all()


@pytest.mark.parametrize("policy", ["stop", "skip"])
def test_scalars_of_the_optimizer_state_may_be_infinite(policy):
    """Such as the best loss before the first step."""
    best = optax.GradientTransformation(lambda params: jnp.float32(jnp.inf), lambda g, state, params=None: (g, state))
    _, history = fit(data(), optax.chain(optax.sgd(0.1), best), on_nonfinite=policy)
    assert [record.left_out for record in history.records] == [False] * 3


@pytest.mark.parametrize("sync", ["mesh", "hogbatch"])
def test_a_run_of_nothing_but_nan_ends(sync):
    rows = data()
    rows["y"][:] = np.nan
    with pytest.raises(NonFiniteError, match=r"Step 4: the loss or gradient of .* 4 steps in a row have been skipped"):
        fit(rows, epochs=9, on_nonfinite="skip", max_skips=4, **SYNCS[sync])
    with pytest.raises(NonFiniteError, match="10 steps in a row"):
        fit(rows, epochs=9, on_nonfinite="skip", **SYNCS[sync])


def test_only_skips_in_a_row_count():
    _, history = fit(data(poison=np.nan), epochs=4, on_nonfinite="skip", max_skips=2)
    assert sum(record.left_out for record in history.records) == 4


@pytest.mark.parametrize("max_skips", [0, -1, 1.5, True, None])
def test_a_bad_limit_of_skips_is_refused(max_skips):
    with pytest.raises((ValueError, TypeError), match=r"max_skips is .*: expected a whole number of at least 1"):
        trainer_for(on_nonfinite="skip", max_skips=max_skips)
