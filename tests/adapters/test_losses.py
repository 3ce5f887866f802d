"""What a Flax loss may ask for: a train flag, a block of rows with its mask; and the modes of the given model."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import plain_flax
import pytest
from flax import linen, nnx
from problems import RandomPlans

import hetjax

RNG = np.random.default_rng(0)
DATA = {"x": RNG.normal(size=(40, 3)).astype(np.float32), "y": RNG.normal(size=40).astype(np.float32)}


def square(model, example):
    return jnp.square(model(example["x"])[0] - example["y"])


class Flagged(nnx.Module):
    """Twice as large in training."""

    def __init__(self, rngs):
        self.head = nnx.Linear(3, 1, rngs=rngs)

    def __call__(self, x, *, train):
        return self.head(x) * (2.0 if train else 1.0)


class LinenFlagged(linen.Module):
    @linen.compact
    def __call__(self, x, deterministic):
        return linen.Dense(1)(x)[0] * (1.0 if deterministic else 2.0)


def losses_of(model):
    """The loss of a step, and of an evaluation of the same rows."""
    with hetjax.Step(model, optax.sgd(0.0), batch_size=40, devices=jax.devices()[:2], controller="fixed:3,1") as step:
        state, _ = step(step.init(model.params, model.model_state), DATA)
        return step.flush().loss, step.evaluate(state, [DATA])["loss"]


def test_the_train_flag_is_passed_to_functions_that_name_it():
    network = Flagged(nnx.Rngs(0))

    def with_rngs(model, example, rngs, train):
        assert (rngs is not None) == train
        return jnp.square(model(example["x"], train=train)[0] - example["y"])

    def without_rngs(model, example, *, train):
        return jnp.square(model(example["x"], train=train)[0] - example["y"])

    value = network.head(DATA["x"])[:, 0]
    expected = [np.mean((factor * value - DATA["y"]) ** 2) for factor in (2, 1)]
    for loss in (with_rngs, without_rngs):
        np.testing.assert_allclose(losses_of(hetjax.from_nnx(network, loss)), expected, rtol=1e-5)


def test_the_train_flag_of_linen():
    variables = LinenFlagged().init(jax.random.key(0), jnp.zeros(3), True)

    def loss(apply, example, train):
        return (apply(example["x"], deterministic=not train) - example["y"]) ** 2

    value = jax.vmap(lambda x: LinenFlagged().apply(variables, x, True))(DATA["x"])
    expected = [np.mean((factor * value - DATA["y"]) ** 2) for factor in (2, 1)]
    np.testing.assert_allclose(losses_of(hetjax.from_linen(LinenFlagged(), variables, loss)), expected, rtol=1e-5)


class Contrast(nnx.Module):
    """Compares rows of a block with each other, so it needs more than one."""

    def __init__(self, rngs):
        self.head, self.dropout = nnx.Linear(3, 4, rngs=rngs), nnx.Dropout(0.2, rngs=rngs)

    def __call__(self, x_bxd):
        return self.dropout(jnp.tanh(self.head(x_bxd)))


def contrast(model, batch, keys, mask):
    """The distance of each row from the mean of its block, over valid rows only."""
    h = model(batch["x"])
    center = jnp.sum(jnp.where(mask[:, None], h, 0), 0) / mask.sum()
    return jnp.sum((h - center) ** 2, -1) * batch["y"]


def by_hand(network, batch, group):
    """The same on groups of consecutive rows, the last one short, without dropout."""
    cuts = range(0, len(batch["y"]), group)
    parts = [jax.tree.map(lambda x, k=k: x[k : k + group], batch) for k in cuts]
    return jnp.concatenate([contrast(network, p, None, jnp.ones(len(p["y"]), bool)) for p in parts])


def without_dropout(rngs):
    network = Contrast(rngs)
    network.dropout.eval()
    return network


def test_batch_loss_on_fixed_groups_matches_plain_flax():
    network, optimizer = without_dropout(nnx.Rngs(0)), optax.sgd(0.1, 0.9)
    model = hetjax.from_nnx(network, batch_loss=contrast, group=8)
    assert model.quantum == 8
    state, losses = plain_flax.train_hetjax(model, optimizer, DATA, controller="fixed:2,1", devices=jax.devices()[:2],
                                            engine=hetjax.Chunked(rungs=[8, 16]))  # fmt: skip
    plain = nnx.clone(network)
    holder = nnx.Optimizer(plain, optimizer, wrt=nnx.Param)
    expected = []
    for batch in plain_flax.batches(DATA):  # 20 rows: groups of 8, 8 and 4
        value, grads = nnx.value_and_grad(lambda m, batch=batch: by_hand(m, batch, 8).mean())(plain)
        holder.update(plain, grads)
        expected.append(value)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    plain_flax.assert_same_model(model.merge(state.params, None), plain)


@pytest.mark.slow
def test_batch_loss_with_dropout_does_not_depend_on_the_split():
    model = hetjax.from_nnx(Contrast(nnx.Rngs(0)), batch_loss=contrast, group=4)
    engines = hetjax.Chunked(rungs=[4, 8, 20]), hetjax.Masked(), hetjax.Looped()
    losses, *others = (
        plain_flax.train_hetjax(model, optax.sgd(0.1), DATA, controller=RandomPlans(seed), engine=engine)[1]
        for seed, engine in enumerate(engines)
    )
    for other in others:
        np.testing.assert_allclose(losses, other, rtol=1e-5)
    with hetjax.Step(model, optax.sgd(0.1), batch_size=40, devices=jax.devices()[:2]) as step:
        state = step.init(model.params, model.model_state)
        evaluated = step.evaluate(state, [jax.tree.map(lambda x: x[:38], DATA)])["loss"]  # a short last group
    short = jax.tree.map(lambda x: x[:38], DATA)
    assert evaluated == pytest.approx(float(by_hand(without_dropout(nnx.Rngs(0)), short, 4).mean()), rel=1e-5)


def test_batch_loss_of_linen_without_mask():
    module = linen.Dense(1)
    variables = module.init(jax.random.key(0), jnp.zeros((1, 3)))

    def batch_loss(apply, batch, keys, train):
        assert batch["x"].shape == (5, 3)
        assert (keys is not None) == train
        return (apply(batch["x"])[:, 0] - batch["y"]) ** 2

    model = hetjax.from_linen(module, variables, batch_loss=batch_loss, group=5)
    expected = np.mean((module.apply(variables, DATA["x"])[:, 0] - DATA["y"]) ** 2)
    np.testing.assert_allclose(losses_of(model), [expected] * 2, rtol=1e-5)


def test_wrong_losses_are_rejected():
    network = Contrast(nnx.Rngs(0))
    with pytest.raises(TypeError, match="exactly one of example_loss"):
        hetjax.from_nnx(network)
    with pytest.raises(TypeError, match="exactly one of example_loss"):
        hetjax.from_nnx(network, square, batch_loss=contrast)
    normalized = nnx.Sequential(nnx.Linear(3, 4, rngs=nnx.Rngs(0)), hetjax.BatchNorm(4, group=4))
    with pytest.raises(ValueError, match="batch_loss does not go together with BatchNorm"):
        hetjax.from_nnx(normalized, batch_loss=contrast)
    model = hetjax.from_nnx(network, batch_loss=contrast, group=4)
    with hetjax.Step(model.loss_fn, optax.sgd(0.1), batch_size=40, quantum=4) as step:
        state = step.init(model.params)
        with pytest.raises(TypeError, match="takes a mask"):
            step(state, DATA)


class Normalized(nnx.Module):
    def __init__(self, norm, rngs):
        self.layer, self.norm, self.head = nnx.Linear(3, 4, rngs=rngs), norm(4, rngs=rngs), nnx.Linear(4, 1, rngs=rngs)
        self.norm.mean[...], self.norm.var[...] = jnp.arange(4.0), jnp.full(4, 2.0)

    def __call__(self, x):
        return self.head(jnp.tanh(self.norm(self.layer(x))))


@pytest.mark.parametrize("norm", [nnx.BatchNorm, hetjax.BatchNorm])
def test_a_batch_norm_in_evaluation_mode_stays_frozen_in_training(norm):
    network = Normalized(norm, nnx.Rngs(0))
    network.norm.eval()
    plain_flax.check_equal(network, square, DATA)
    assert hetjax.from_nnx(network, square).model_state is None


def test_a_dropout_in_evaluation_mode_stays_off_in_training():
    network = nnx.Sequential(nnx.Linear(3, 4, rngs=nnx.Rngs(0)), nnx.Dropout(0.5, rngs=nnx.Rngs(1)))
    network.eval()
    plain_flax.check_equal(network, square, DATA)
