"""Any optax optimizer works: the loss is passed on, other objects are rejected, integer parameters pass through."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import hetjax
from hetjax.devices.workers import Worker, Workers
from hetjax.reduce.optimizer import update_size
from hetjax.reduce.transports import ReduceOptions, check_options
from hetjax.sync.daso import Daso

RNG = np.random.default_rng(0)
DATA = {"x": RNG.normal(size=(40, 3)).astype(np.float32)}
DATA["y"] = DATA["x"].sum(1)
STEPS = 6


def loss_fn(params, batch, keys):
    return (batch["x"] @ params["w"] - batch["y"]) ** 2


def run(optimizer, params, **options):
    controller = {} if options.get("sync") == "hogbatch" else {"controller": "equal"}
    engine = hetjax.Chunked(rungs=[20])
    options = {"batch_size": 40, "devices": jax.devices()[:2], "engine": engine, **controller, **options}
    with hetjax.Trainer(loss_fn, optimizer, **options) as trainer:
        state, history = trainer.fit(trainer.init(params), DATA, steps=STEPS)
        return state, history.losses, trainer.evaluate(state, DATA)


def plateau(patience=1):
    """SGD whose learning rate of 1e-3 falls to a tenth whenever `patience` steps do not halve the loss."""
    return optax.chain(optax.sgd(1e-3), optax.contrib.reduce_on_plateau(factor=0.1, patience=patience, rtol=0.5))


@pytest.mark.parametrize("optimizer", [plateau(), optax.polyak_sgd(0.1)], ids=["reduce_on_plateau", "polyak"])
def test_an_optimizer_that_takes_the_loss_matches_plain_optax(optimizer):
    params = {"w": jnp.zeros(3)}
    state, losses, _ = run(optimizer, params)
    alone, expected = optimizer.init(params), []
    for _ in range(STEPS):  # one batch holds all samples, so their order does not matter
        loss, grads = jax.value_and_grad(lambda params: loss_fn(params, DATA, None).mean())(params)
        updates, alone = optimizer.update(grads, alone, params, value=loss)
        params = optax.apply_updates(params, updates)
        expected.append(loss)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    np.testing.assert_allclose(state.params["w"], params["w"], rtol=1e-5)


BLOCKING = Daso(warm_up=STEPS, cool_down=0)  # nodes agree in every step


@pytest.mark.parametrize("sync", ["decentralized", BLOCKING, "hogbatch"])
def test_other_syncs_pass_the_same_loss_to_all_workers(sync):
    extra = {"engine": "auto"} if sync == "hogbatch" else {}
    state, _, metrics = run(plateau(patience=2), {"w": jnp.zeros(3)}, sync=sync, **extra)
    scale = np.asarray(state.opt_state[1].scale)
    np.testing.assert_allclose(scale, np.full_like(scale, scale.flat[0]))
    assert scale.max() < 1
    assert np.isfinite(metrics["loss"])


def test_a_node_of_daso_that_steps_alone_is_given_its_own_loss():
    """Between two exchanges no node knows the others' loss."""
    daso = Daso(warm_up=0, cool_down=0, max_skip=4)
    state, losses, _ = run(plateau(patience=2), {"w": jnp.zeros(3)}, sync=daso)
    assert np.all(np.asarray(state.opt_state[1].scale) < 1)
    assert np.isfinite(losses).all()


def test_a_line_search_is_rejected_with_an_alternative():
    with pytest.raises(TypeError, match=r"requires 'grad' and 'value_fn'.*optax\.lbfgs\(0\.1, linesearch=None\)"):
        run(optax.lbfgs(), {"w": jnp.zeros(3)})
    _, losses, _ = run(optax.lbfgs(0.1, linesearch=None), {"w": jnp.zeros(3)})
    assert losses[-1] < losses[0]


def test_other_objects_are_rejected_with_a_hint():
    for given, sentence in [(optax.adam, "Call it"), (None, "NoneType")]:
        with pytest.raises(TypeError, match=sentence):
            hetjax.Trainer(loss_fn, given, batch_size=8)


def fixed(params):
    """With parameters that have no gradient."""
    return {"bits": jnp.array([7, 2**31 - 1], jnp.int32), "on": jnp.array(True), **params}


def test_integers_and_booleans_among_the_parameters_pass_through():
    params = {"w": jnp.zeros(3)}
    optimizer = optax.adamw(0.1, weight_decay=0.1)
    state, losses, metrics = run(optimizer, fixed(params), ema_decay=0.9)
    plain, expected, expected_metrics = run(optimizer, params, ema_decay=0.9)
    assert losses == expected
    assert metrics == expected_metrics
    np.testing.assert_array_equal(state.params["w"], plain.params["w"])
    for values in (state.params, state.ema):
        for name, value in fixed({}).items():
            np.testing.assert_array_equal(values[name], value)
            assert values[name].dtype == value.dtype


def test_integers_in_a_flax_model_pass_through():
    class Net(nnx.Module):
        def __init__(self):
            self.linear, self.code = nnx.Linear(3, 1, rngs=nnx.Rngs(0)), nnx.Param(jnp.arange(3, dtype=jnp.int8))

        def __call__(self, x):
            return self.linear(x * self.code[...])[0]

    model = hetjax.from_nnx(Net(), lambda model, example, rngs: (model(example["x"]) - example["y"]) ** 2)
    with hetjax.Trainer(model, optax.adam(0.1), batch_size=8, devices=jax.devices()[:2]) as trainer:
        state, _ = trainer.fit(trainer.init(model.params), DATA, steps=2)
    merged = model.merge(state.params, None)
    np.testing.assert_array_equal(merged.code[...], np.arange(3, dtype=np.int8))
    assert not np.array_equal(merged.linear.kernel[...], model.params["linear"]["kernel"][...])


def test_integers_alone_are_rejected():
    with pytest.raises(ValueError, match="nothing to train"):
        run(optax.sgd(0.1), fixed({}))


def test_processes_can_tell_learning_rates_apart():
    """The states of these optimizers are alike."""
    params = {"w": jnp.zeros((3, 2)), "b": jnp.zeros(2)}
    warm_up = lambda peak: optax.linear_schedule(0.0, peak, 10)
    for make in (optax.sgd, optax.adam, optax.lion, optax.contrib.muon, lambda rate: optax.adamw(warm_up(rate))):
        sizes = [update_size(make(rate), params) for rate in (0.1, 0.1, 0.2)]
        assert sizes[0] == sizes[1] != sizes[2]
    failing = optax.GradientTransformation(lambda params: None, lambda *_: 1 / 0)
    assert update_size(failing, params) == "unknown"


@pytest.mark.parametrize("options", [{}, {"transport": "host"}, {"transport": "mesh"}])
def test_options_of_the_sharded_update_are_refused_where_nothing_is_sharded(options):
    given = {"batch_size": 8, "devices": jax.devices()[:2], **options}
    with pytest.raises(ValueError, match="update='sharded' divides the update between processes joined by"):
        hetjax.Step(loss_fn, optax.sgd(0.1), update="sharded", **given)
    with pytest.raises(ValueError, match="update_on='host' is about the slices of the sharded update"):
        hetjax.Step(loss_fn, optax.sgd(0.1), update_on="host", **given)


def test_replicated_updates_between_processes_have_no_place():
    members = tuple(Worker(p, "cpu", "cpu:cpu", "cpu:0") for p in range(2))
    workers = Workers(members, (jax.devices()[0],))
    check_options(ReduceOptions(update_on="host"), workers)
    check_options(ReduceOptions(update="sharded", update_on="host"), workers)
    with pytest.raises(ValueError, match="update_on='host' is about the slices"):
        check_options(ReduceOptions(update="replicated", update_on="host"), workers)
