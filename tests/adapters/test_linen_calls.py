"""Linen modules as they are: random streams of any name, `rngs` and `mutable`, and frozen BatchNorm layers."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen

import hetjax

RNG = np.random.default_rng(0)
DATA = {"x": RNG.normal(1.0, 2.0, (24, 5)).astype(np.float32), "y": RNG.normal(size=24).astype(np.float32)}
KEYS = jax.random.split(jax.random.key(7), 24)


def square(apply, example):
    return (apply(example["x"])[0] - example["y"]) ** 2


class Noisy(linen.Module):
    """Noise from a stream of its own name, and dropout from another."""

    rate: float = 0.5

    @linen.compact
    def __call__(self, x):
        x = x + jax.random.normal(self.make_rng("noise"), x.shape)
        x = linen.Dropout(self.rate, rng_collection="depth", deterministic=False)(x)
        return linen.Dense(1)(x)


class Dropped(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.Dense(1)(linen.Dropout(0.5, deterministic=False)(x))


def losses(model):
    return np.asarray(model.loss_fn(model.params, DATA, KEYS).loss_b)


def test_every_name_of_a_random_stream_is_served_and_each_example_has_its_own():
    variables = Noisy().init(jax.random.key(0), DATA["x"][0])
    model = hetjax.from_linen(Noisy(0.0), variables, square)
    noise_b = (losses(model) - losses(hetjax.from_linen(linen.Dense(1), _dense(variables), square))).round(5)
    assert len(set(noise_b.tolist())) == len(noise_b)
    np.testing.assert_array_equal(losses(model), losses(model))  # by the key alone
    runs = []
    for workers in (1, 3):
        model = hetjax.from_linen(Noisy(), variables, square)
        with hetjax.Step(model, optax.sgd(0.1), batch_size=24, devices=jax.devices()[:workers]) as step:
            step(step.init(model.params), DATA)
            runs.append(step.flush().loss)
    assert runs[0] == pytest.approx(runs[1], rel=1e-6)


def _dense(variables):
    return {"params": variables["params"]["Dense_0"]}


def test_dropout_is_that_of_its_key():
    """The bits of a plain call with this key under 'dropout', whatever other streams there are."""
    variables = Dropped().init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, DATA["x"][0])
    one = lambda x, y, key: (Dropped().apply(variables, x, rngs={"dropout": key})[0] - y) ** 2
    expected = jax.vmap(one)(DATA["x"], DATA["y"], KEYS)
    np.testing.assert_array_equal(losses(hetjax.from_linen(Dropped(), variables, square)), expected)


def test_rngs_and_mutable_of_a_call_mean_what_they_do_in_linen():
    class Sown(linen.Module):
        @linen.compact
        def __call__(self, x):
            x = linen.Dropout(0.5, deterministic=False)(linen.Dense(4)(x))
            self.sow("intermediates", "size", jnp.sum(x**2))
            return linen.BatchNorm(use_running_average=True)(x)

    fixed = {"dropout": jax.random.key(5)}
    variables = Sown().init({"params": jax.random.key(0), **fixed}, DATA["x"][0])
    variables = {name: variables[name] for name in ("params", "batch_stats")}

    def loss(apply, example):
        out, changed = apply(example["x"], rngs=fixed, mutable=["intermediates"])
        assert set(changed) == {"intermediates"}
        return jnp.sum(out) + changed["intermediates"]["size"][0]

    plain = lambda x, **options: Sown().apply(variables, x, **options)
    expected = [loss(plain, {"x": x}) for x in DATA["x"][:8]]
    batch = {"x": DATA["x"][:8]}
    model = hetjax.from_linen(Sown(), variables, loss, group=1)
    found, _ = model.loss_fn(model.params, model.model_state, batch, KEYS[:8], np.ones(8, bool))
    np.testing.assert_allclose(found.loss_b, expected, rtol=1e-5)
    evaluated, _ = model.eval_fn(model.params, model.model_state, batch, KEYS[:8], np.ones(8, bool))
    np.testing.assert_allclose(evaluated.loss_b, expected, rtol=1e-5)


class Backbone(linen.Module):
    """A pretrained part with frozen statistics, behind remat, and a head that may have a BatchNorm of its own."""

    head_norm: bool = False

    @linen.compact
    def __call__(self, x):
        x = linen.remat(linen.BatchNorm)(use_running_average=True, name="remat")(linen.Dense(4)(x))
        x = linen.BatchNorm(use_running_average=True, name="frozen")(x)
        if self.head_norm:
            x = hetjax.LinenBatchNorm(use_running_average=False, group=8, momentum=0.9, name="live")(x)
        return linen.Dense(1)(x)


def pretrained(head_norm):
    variables = Backbone(head_norm).init(jax.random.key(0), DATA["x"][0])
    rng = np.random.default_rng(3)
    drawn = lambda x: jnp.asarray(rng.uniform(0.5, 1.5, x.shape), x.dtype)
    return {"params": variables["params"], "batch_stats": jax.tree.map(drawn, variables["batch_stats"])}


@pytest.mark.parametrize("advance", [None, hetjax.running_average(0.7)])
@pytest.mark.parametrize("head_norm", [False, True])
def test_frozen_statistics_stay_equal_to_the_bit(head_norm, advance):
    variables = pretrained(head_norm)
    model = hetjax.from_linen(Backbone(head_norm), variables, square, group=8 if head_norm else 1)
    assert model.quantum == (8 if head_norm else 1)
    data = jax.tree.map(lambda x: x[:23], DATA)  # sums over 23 rows / 23 are not exact
    with hetjax.Trainer(model, optax.sgd(0.01), batch_size=23, devices=jax.devices()[:2], advance=advance) as trainer:
        state, _ = trainer.fit(trainer.init(model.params), data, steps=4)
    for name in ("remat", "frozen"):
        chex.assert_trees_all_equal(state.model_state[name], variables["batch_stats"][name])
    if head_norm:
        assert not np.array_equal(state.model_state["live"]["mean"], variables["batch_stats"]["live"]["mean"])


def test_batch_loss_takes_a_module_with_frozen_statistics():
    variables = pretrained(False)
    batch_loss = lambda apply, batch, keys: (apply(batch["x"])[:, 0] - batch["y"]) ** 2
    model = hetjax.from_linen(Backbone(), variables, batch_loss=batch_loss, group=4)
    expected = np.mean((Backbone().apply(variables, DATA["x"])[:, 0] - DATA["y"]) ** 2)
    with hetjax.Step(model, optax.sgd(0.0), batch_size=24, devices=jax.devices()[:2]) as step:
        state, _ = step(step.init(model.params), DATA)
        assert step.flush().loss == pytest.approx(expected, rel=1e-5)
        assert step.evaluate(state, [DATA])["loss"] == pytest.approx(expected, rel=1e-5)
    chex.assert_trees_all_equal(model.merge(model.params, None).variables["batch_stats"], variables["batch_stats"])


class Own(linen.Module):
    """Statistics that are no BatchNorm's."""

    @linen.compact
    def __call__(self, x):
        mean = self.variable("batch_stats", "mean", jnp.zeros, (5,))
        if not self.is_initializing():
            mean.value = x.mean(0)
        return linen.Dense(1)(x - mean.value)


@pytest.mark.parametrize("module", [Backbone(True), Own()])
def test_batch_loss_refuses_statistics_that_change(module):
    variables = module.init(jax.random.key(0), DATA["x"][0])
    batch_loss = lambda apply, batch, keys: (apply(batch["x"])[:, 0] - batch["y"]) ** 2
    model = hetjax.from_linen(module, variables, batch_loss=batch_loss, group=4)
    with pytest.raises(ValueError, match="batch_loss does not go together with BatchNorm layers in training mode"):
        model.loss_fn(model.params, DATA, KEYS)
