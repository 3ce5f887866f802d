"""Frozen and integer parameters: no gradient, no exchange, no optimizer state, the same to the bit under every sync."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import plain_flax
import pytest
from flax import linen, nnx

import hetjax
from hetjax import checkpoint
from hetjax.engines.session import shapes
from hetjax.sync.daso import Daso

RNG = np.random.default_rng(0)
DATA = {"x": RNG.normal(size=(40, 3)).astype(np.float32), "y": RNG.normal(size=40).astype(np.float32)}
BASE = {
    "w": jnp.asarray(RNG.normal(size=(3, 4)), jnp.float32),
    "table": jnp.array([jnp.inf, 1.0, 0.1, -2.5]),  # a constant may be infinite
    "code": jnp.array([2**31 - 1, 7], jnp.int32),
}
HEAD = jnp.full(4, 0.1)


def loss_fn(params, batch, keys):
    base = params["base"]
    hidden = jnp.tanh(batch["x"] @ base["w"]) + jnp.where(jnp.isfinite(base["table"]), base["table"], 0)
    return (hidden @ params["head"] + base["code"][1] - 7 - batch["y"]) ** 2


def head_only(head, batch, keys):
    return loss_fn({"base": BASE, "head": head["head"]}, batch, keys)


def square(model, example):
    return jnp.square(model(example["x"])[0] - example["y"])


def assert_same_bits(got, expected):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert np.asarray(a).dtype == np.asarray(b).dtype
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


SYNCS = {
    "allreduce": {},
    "host": {"transport": "host"},
    "skip": {"on_nonfinite": "skip"},
    "ring": {"sync": "decentralized"},
    "daso": {"sync": Daso(nodes=[1, 2], max_skip=2, warm_up=1, cool_down=1)},
    "hogbatch": {"strategy": "hogbatch", "sync": None, "controller": None},
    "adaptive-sgd": {"strategy": "adaptive-sgd", "controller": None},
}


def fit(loss_fn, params, name):
    engine = {} if "strategy" in SYNCS[name] else {"engine": hetjax.Chunked(rungs=[4])}
    options = {"controller": "fixed:3,2,1", **engine, **SYNCS[name]}
    options = {key: value for key, value in options.items() if value is not None}
    devices = jax.devices()[:3]
    with hetjax.Trainer(loss_fn, optax.adam(0.05), batch_size=12, devices=devices, ema_decay=0.5, **options) as trainer:
        state, _ = trainer.fit(trainer.init(params), DATA, epochs=5)
        return trainer.answer(state)


@pytest.mark.parametrize("name", SYNCS)
def test_frozen_and_integer_parameters_stay_to_the_bit_under_every_sync(name):
    answer = fit(loss_fn, {"base": hetjax.frozen(BASE), "head": HEAD}, name)
    for params in (answer.params, answer.ema):
        assert_same_bits(hetjax.unfrozen(params)["base"], BASE)
    assert not np.array_equal(answer.params["head"], HEAD)
    moments = [x for x in jax.tree.leaves(answer.opt_state) if x.ndim]
    assert [x.shape for x in moments] == [HEAD.shape] * 2
    if name in ("allreduce", "ring", "daso"):  # the run of the head alone, with constants in its loss
        alone = fit(head_only, {"head": HEAD}, name)
        np.testing.assert_allclose(answer.params["head"], alone.params["head"], rtol=1e-5)


@pytest.mark.slow
def test_integers_alone_pass_through_every_sync():
    """Without a mark: the floats beside them are trained."""
    for name in ("ring", "daso"):
        answer = fit(loss_fn, {"base": {**BASE, "table": jnp.ones(4)}, "head": HEAD}, name)
        assert_same_bits(answer.params["base"]["code"], BASE["code"])
        assert not np.array_equal(answer.params["base"]["w"], BASE["w"])


def test_a_frozen_parameter_is_an_argument_and_not_summed():
    large = {"base": hetjax.frozen(jnp.ones((300, 3))), "w": jnp.zeros(300)}
    loss = lambda params, batch, keys: (batch["x"] @ params["base"].T @ params["w"] - batch["y"]) ** 2
    with hetjax.Step(
        loss, optax.sgd(1e-3), batch_size=40, devices=jax.devices()[:2], engine=hetjax.Chunked(rungs=[20])
    ) as step:
        state = step.init(large)
        (params, *_), key = shapes(state, DATA), jax.tree.map(np.asarray, DATA)
        step(state, key)
        program = step.engine.program
        assert sum(program.sizes) == 300 + 3  # the gradient of w; loss, weight and count
        assert program.params == params
        text = str(jax.make_jaxpr(program.row_sums)(large, None, DATA, np.zeros(4, np.uint32)).consts)
        assert "300" not in text


@pytest.mark.parametrize("engine", [hetjax.Masked(), hetjax.Looped(), hetjax.Chunked(rungs=[20])])
def test_every_engine_takes_frozen_parameters(engine):
    params = {"base": hetjax.frozen(BASE), "head": HEAD}
    options = {"batch_size": 40, "devices": jax.devices()[:3], "controller": "fixed:3,2,0", "engine": engine}
    with hetjax.Step(loss_fn, optax.sgd(0.1), **options) as step:
        state, _ = step(step.init(params), DATA)
        grads = jax.grad(lambda head: head_only({"head": head}, DATA, None).mean())(HEAD)
        np.testing.assert_allclose(state.params["head"], HEAD - 0.1 * grads, rtol=1e-5)
        assert_same_bits(state.params["base"].value, BASE)


def test_a_checkpoint_holds_frozen_parameters(tmp_path):
    network = Lora(nnx.Rngs(0))
    model = hetjax.from_nnx(network, square, wrt=nnx.LoRAParam)
    options = {"batch_size": 8, "devices": jax.devices()[:2], "engine": hetjax.Chunked(rungs=[4])}
    with hetjax.Trainer(model, optax.adam(0.1), **options) as trainer:
        with checkpoint.Saver(tmp_path, trainer) as saver:
            state, history = trainer.fit(trainer.init(model.params), DATA, steps=2)
            saver.save(history.records[-1], state)
        restored = checkpoint.restore_latest(tmp_path, trainer.init(model.params), trainer).state
        assert jax.tree.structure(restored.core) == jax.tree.structure(state.core)
        assert_same_bits(restored.core, state.core)
        again, _ = trainer.fit(restored, DATA, steps=1)
        assert again.step == 3


class Lora(nnx.Module):
    def __init__(self, rngs):
        self.base = nnx.Linear(3, 4, rngs=rngs)
        self.lora = nnx.LoRA(3, 2, 4, rngs=rngs)
        self.scale, self.head = nnx.Variable(jnp.full(4, 0.7)), nnx.Linear(4, 1, rngs=rngs)

    def __call__(self, x):
        return self.head(jnp.tanh(self.base(x) + self.lora(x)) * self.scale[...])


@pytest.mark.parametrize("wrt", [nnx.LoRAParam, nnx.Any(nnx.LoRAParam, nnx.PathContains("head"))])
def test_lora_trains_as_in_plain_flax(wrt):
    network = Lora(nnx.Rngs(0))
    state = plain_flax.check_equal(network, square, DATA, optax.adam(1e-2), wrt=wrt)
    merged = hetjax.from_nnx(network, square, wrt=wrt).merge(state.params, None)
    assert_same_bits(nnx.state(merged.base), nnx.state(network.base))
    assert not np.array_equal(merged.lora.lora_b[...], network.lora.lora_b[...])
    assert_same_bits(hetjax.unfrozen(state.params)["scale"], network.scale[...])  # other constants are arguments, too


def test_linen_trains_what_wrt_selects():
    class Net(linen.Module):
        @linen.compact
        def __call__(self, x):
            return linen.Dense(1, name="head")(jnp.tanh(linen.Dense(4, name="base")(x)))[0]

    variables = Net().init(jax.random.key(0), jnp.zeros(3))
    loss = lambda apply, example: (apply(example["x"]) - example["y"]) ** 2
    by_path = hetjax.from_linen(Net(), variables, loss, wrt=lambda path, p: path[0] == "head")
    mask = {"base": {"bias": False, "kernel": False}, "head": {"bias": True, "kernel": True}}
    by_mask = hetjax.from_linen(Net(), variables, loss, wrt=mask)
    assert jax.tree.structure(by_path.params) == jax.tree.structure(by_mask.params)
    optimizer = optax.adam(1e-2)
    state, losses = plain_flax.train_hetjax(by_path, optimizer, DATA)

    apply = lambda head, x: Net().apply({"params": {**variables["params"], "head": head}}, x)
    head, expected = variables["params"]["head"], []
    alone = optimizer.init(head)
    for batch in plain_flax.batches(DATA):
        mean = lambda head, batch=batch: jnp.mean((jax.vmap(apply, (None, 0))(head, batch["x"]) - batch["y"]) ** 2)
        value, grads = jax.value_and_grad(mean)(head)
        updates, alone = optimizer.update(grads, alone, head)
        head = optax.apply_updates(head, updates)
        expected.append(value)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    trained = by_path.merge(state.params, None).variables["params"]
    np.testing.assert_allclose(trained["head"]["kernel"], head["kernel"], rtol=1e-5)
    assert_same_bits(trained["base"], variables["params"]["base"])


def test_filters_that_select_nothing_or_do_not_fit_are_rejected():
    params = {"a": jnp.zeros(2), "b": [jnp.zeros(3), jnp.zeros(())]}
    step = hetjax.Step(lambda *_: None, optax.sgd(0.1), batch_size=4)
    with pytest.raises(ValueError, match="All parameters are frozen"):
        step.init(hetjax.frozen(params, wrt=lambda path, p: False))
    with pytest.raises(ValueError, match="2 booleans, but there are 3 parameters"):
        hetjax.frozen(params, wrt={"a": True, "b": True})
    with pytest.raises(TypeError, match="not all booleans"):
        hetjax.frozen(params, wrt={"a": 1})
    once = hetjax.frozen(params, wrt=lambda path, p: path == ("b", 0))
    assert jax.tree.structure(hetjax.frozen(once, wrt=True)) == jax.tree.structure(once)
    assert jax.tree.structure(hetjax.unfrozen(once)) == jax.tree.structure(params)
