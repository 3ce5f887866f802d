"""Models as people write them, trained on workers of unequal counts, equal to a plain Flax loop."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import plain_flax
import pytest
from flax import nnx

import hetjax

RNG = np.random.default_rng(0)
WORDS, LENGTH, WIDTH, LAYERS = 11, 6, 8, 3
TEXT = {"tokens": RNG.integers(1, WORDS, (33, LENGTH)).astype(np.int32)}
TEXT["length"] = RNG.integers(2, LENGTH + 1, 33).astype(np.int32)
POINTS = {"x": RNG.normal(size=(33, 5)).astype(np.float32), "y": RNG.normal(size=33).astype(np.float32)}


def next_token(model, example):
    """Mean cross entropy of the tokens within the example's length."""
    logits = model(example["tokens"], example["length"])
    loss = optax.softmax_cross_entropy_with_integer_labels(logits[:-1], example["tokens"][1:])
    inside = jnp.arange(1, LENGTH) < example["length"]
    return jnp.sum(loss * inside) / inside.sum()


def square(model, example):
    return jnp.square(model(example["x"])[0] - example["y"])


class Tied(nnx.Module):
    """The embedding is the output layer, too."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(WORDS, WIDTH, rngs=rngs)
        self.mix = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, tokens, length):
        return self.embed.attend(jnp.tanh(self.mix(self.embed(tokens))))


class Shared(nnx.Module):
    """One nnx.Param in two layers."""

    def __init__(self, rngs):
        self.first, self.second = nnx.Linear(5, 5, rngs=rngs), nnx.Linear(5, 5, rngs=rngs)
        self.second.kernel = self.first.kernel
        self.head = nnx.Linear(5, 1, rngs=rngs)

    def __call__(self, x):
        return self.head(jnp.tanh(self.second(jnp.tanh(self.first(x)))))


class Attention(nnx.Module):
    """Causal attention that does not see padding."""

    def __init__(self, rngs):
        self.embed, self.head = nnx.Embed(WORDS, WIDTH, rngs=rngs), nnx.Linear(WIDTH, WORDS, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, WIDTH, decode=False, rngs=rngs)

    def __call__(self, tokens, length):
        inside = jnp.arange(LENGTH) < length
        mask = nnx.combine_masks(nnx.make_causal_mask(tokens), nnx.make_attention_mask(inside, inside))
        x = self.embed(tokens)
        return self.head(x + self.attention(x, mask=mask))


class Remat(nnx.Module):
    def __init__(self, rngs):
        self.layer, self.head = nnx.Linear(5, 5, rngs=rngs), nnx.Linear(5, 1, rngs=rngs)

    def __call__(self, x):
        return self.head(nnx.remat(lambda layer, x: jnp.tanh(layer(x)))(self.layer, x))


class Scanned(nnx.Module):
    """Layers stacked along a leading axis."""

    def __init__(self, rngs):
        self.layers = nnx.split_rngs(splits=LAYERS)(nnx.vmap(lambda rngs: nnx.Linear(5, 5, rngs=rngs)))(rngs)
        self.head = nnx.Linear(5, 1, rngs=rngs)

    def __call__(self, x):
        layers = nnx.scan(lambda layer, x: jnp.tanh(layer(x)), in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        return self.head(layers(self.layers, x))


class Mlp(nnx.Module):
    def __init__(self, rngs, **dtypes):
        self.layer = nnx.Linear(5, 8, rngs=rngs, **dtypes)
        self.head = nnx.Linear(8, 1, rngs=rngs, **dtypes)

    def __call__(self, x):
        return self.head(jnp.tanh(self.layer(x)))


@pytest.mark.parametrize(
    ("kind", "loss", "data"),
    [
        (Tied, next_token, TEXT),
        (Attention, next_token, TEXT),
        (Shared, square, POINTS),
        (Remat, square, POINTS),
        (Scanned, square, POINTS),
    ],
)
def test_a_model_trains_as_in_plain_flax(kind, loss, data):
    plain_flax.check_equal(kind(nnx.Rngs(0)), loss, data)


def test_a_shared_parameter_stays_shared():
    network = Shared(nnx.Rngs(0))
    model = hetjax.from_nnx(network, square)
    merged = model.merge(model.params, None)
    assert merged.first.kernel is merged.second.kernel
    assert len(jax.tree.leaves(model.params)) == 5


def labels(params):
    return jax.tree.map_with_path(lambda path, _: "fixed" if "layer" in jax.tree_util.keystr(path) else "sgd", params)


OPTIMIZERS = {
    "MultiSteps": optax.MultiSteps(optax.adam(1e-2), 2).gradient_transformation(),
    "schedule_free": optax.contrib.schedule_free_adamw(1e-2, warmup_steps=2),
    "muon": optax.contrib.muon(1e-2),
    "multi_transform": optax.multi_transform({"sgd": optax.sgd(0.1, 0.9), "fixed": optax.set_to_zero()}, labels),
    "reduce_on_plateau": optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau(0.5, patience=1, rtol=0.5)),
}


SLOW = {"reduce_on_plateau"}  # tests/reduce/test_optimizers.py has it with plain optax
MASKED = {"muon", "multi_transform"}  # their states have gaps, which the nnx.Optimizer of Flax 0.11 does not take


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in OPTIMIZERS]
)
def test_an_optimizer_trains_as_in_plain_flax(name):
    if name in MASKED and not hasattr(nnx, "List"):
        pytest.skip("plain Flax of this version cannot do it")
    network = Mlp(nnx.Rngs(0))
    state = plain_flax.check_equal(network, square, POINTS, OPTIMIZERS[name])
    frozen = np.array_equal(state.params["layer"]["kernel"][...], network.layer.kernel[...])
    assert frozen == (name == "multi_transform")


def test_bfloat16_compute_trains_as_in_plain_flax():
    network = Mlp(nnx.Rngs(0), dtype=jnp.bfloat16)
    plain_flax.check_equal_in_microbatches(network, square, POINTS)


def test_bfloat16_parameters_train_as_in_plain_flax_and_stay_bfloat16():
    network = nnx.Linear(5, 1, rngs=nnx.Rngs(0), param_dtype=jnp.bfloat16, dtype=jnp.float32)
    state = plain_flax.check_equal_in_microbatches(network, square, POINTS)
    assert state.params["kernel"][...].dtype == jnp.bfloat16
