"""Flax models with transformed layers and mutated variables train and evaluate as the module itself does."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import hetjax

RNG = np.random.default_rng(0)
DATA = {
    "x": RNG.normal(size=(40, 5)).astype(np.float32),
    "y": RNG.integers(0, 3, 40).astype(np.int32),
}
LAYERS = 3


def example_loss(model, example, rngs):
    return optax.softmax_cross_entropy_with_integer_labels(model(example["x"]), example["y"])


class Stack(nnx.Module):
    """Layers stacked along a leading axis, applied by scan or vmap."""

    def __init__(self, how, rngs):
        self.how = how
        make = nnx.split_rngs(splits=LAYERS)(nnx.vmap(lambda rngs: nnx.Linear(5, 5, rngs=rngs)))
        self.layers, self.head = make(rngs), nnx.Linear(5, 3, rngs=rngs)

    def __call__(self, x):
        one = lambda layer, x: jax.nn.relu(layer(x))
        if self.how == "scan":
            return self.head(nnx.scan(one, in_axes=(0, nnx.Carry), out_axes=nnx.Carry)(self.layers, x))
        return self.head(nnx.vmap(one, in_axes=(0, None))(self.layers, x).mean(0))


class Rematerialized(nnx.Module):
    def __init__(self, rngs):
        self.head = nnx.Linear(5, 3, rngs=rngs)

    def __call__(self, x):
        return nnx.remat(lambda head, x: head(x))(self.head, x)


class Counting(nnx.Module):
    """Depends on how often it was called: every example must see the count of the given model."""

    def __init__(self, rngs):
        self.head, self.calls = nnx.Linear(5, 3, rngs=rngs), nnx.Variable(jnp.zeros(()))

    def __call__(self, x):
        self.calls[...] += 1
        return self.head(x) * self.calls[...]


MODELS = {
    "scan": lambda rngs: Stack("scan", rngs),
    "vmap": lambda rngs: Stack("vmap", rngs),
    "remat": Rematerialized,
    "mutated": Counting,
}


@pytest.mark.parametrize("name", MODELS)
def test_transformed_layers_and_mutated_variables_are_trained_and_evaluated(name):
    network = MODELS[name](nnx.Rngs(0))
    model = hetjax.from_nnx(network, example_loss)
    with hetjax.Trainer(
        model, optax.sgd(0.1), batch_size=16, devices=jax.devices()[:2], engine=hetjax.Chunked(rungs=[8])
    ) as trainer:
        state = trainer.init(model.params)
        first = trainer.evaluate(state, DATA)["loss"]
        state, _ = trainer.fit(state, DATA, steps=3)
        last = trainer.evaluate(state, DATA)["loss"]

    @jax.jit
    def loss(params, x, y):
        return example_loss(model.merge(params, None), {"x": x, "y": y}, None)

    mean_loss = lambda params: np.mean([loss(params, x, y) for x, y in zip(DATA["x"], DATA["y"], strict=True)])
    assert first == pytest.approx(mean_loss(model.params), rel=1e-5)
    assert last == pytest.approx(mean_loss(state.params), rel=1e-5)
    assert last != first


class Constants(nnx.Module):
    """Constants inside `jit` and `remat`, which replace the values of all variables, and one that is written."""

    def __init__(self, rngs, writes):
        self.head, self.table, self.seen = nnx.Linear(5, 3, rngs=rngs), nnx.Variable(jnp.ones(5)), nnx.Variable(0.0)
        self.writes = writes

    def __call__(self, x):
        return nnx.remat(lambda model, x: nnx.jit(Constants.inner)(model, x))(self, x)

    def inner(self, x):
        if self.writes:
            self.seen[...] = self.seen[...] + x.sum()
        self.size = nnx.Intermediate(x.sum())  # a new one
        return self.head(x * self.table[...])


@pytest.mark.parametrize(("make", "written"), [
    (lambda rngs: Constants(rngs, writes=True), "seen"), (Counting, "calls"),
    *((make, None) for make in (MODELS["scan"], MODELS["remat"], lambda rngs: Constants(rngs, writes=False))),
])  # fmt: skip
def test_a_warning_names_what_a_model_writes_in_vain_once(make, written, caplog):
    model = hetjax.from_nnx(make(nnx.Rngs(0)), example_loss)
    keys = jax.random.split(jax.random.key(0), len(DATA["y"]))
    for _ in range(2):
        jax.grad(lambda params: model.loss_fn(params, DATA, keys).loss_b.mean())(model.params)
    found = [record.getMessage() for record in caplog.records if "new values are lost" in record.getMessage()]
    assert [message.split(" when ")[0] for message in found] == [f"The model writes to {written}"] * bool(written)


def test_changing_a_merged_model_changes_nothing_else():
    model = hetjax.from_nnx(Counting(nnx.Rngs(0)), example_loss)
    one, other = model.merge(model.params, None), model.merge(model.params, None)
    before = np.asarray(other(DATA["x"][0]))
    one.head.kernel[...] = one.head.kernel[...] + 1
    one(DATA["x"][0])
    np.testing.assert_array_equal(model.merge(model.params, None)(DATA["x"][0]), before)
