"""Models: per-example, independent of the split of a batch, and trainable."""

import re
from functools import lru_cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from hetjax.data import Description, fetch, load
from hetjax.zoo import Transformer, classification, make_model, next_token
from hetjax.zoo.layers import max_pool
from hetjax.zoo.transformer import causal_attention

IMAGES = Description("images", (8, 8, 1), classes=10)
WORDS = Description("words", (16,), vocab=32)
SMALL = {
    "mlp": {"hidden": (32,)},
    "cnn": {"widths": (8, 16), "hidden": 32},
    "resnet": {"width": 8},
    "transformer": {"width": 16, "depth": 1, "heads": 2},
}


def outline(name, description=None, **options):
    """A small model with shapes only."""
    description = description or (WORDS if name == "transformer" else IMAGES)
    return nnx.eval_shape(lambda: make_model(name, description, nnx.Rngs(0), **SMALL[name], **options))


def output_shape(model, shape):
    graph, params = nnx.split(model)
    return jax.eval_shape(lambda params, x: nnx.merge(graph, params)(x), params, jnp.zeros(shape)).shape


@lru_cache
def parameters(name):
    description = WORDS if name == "transformer" else IMAGES
    return nnx.state(make_model(name, description, nnx.Rngs(0), **SMALL[name]), nnx.Param)


@lru_cache
def small(name, **options):
    """A small model; initialization is slow, so all options share one set of parameters. No test modifies it."""
    return nnx.merge(nnx.split(outline(name, **options))[0], parameters(name))


def batch_for(name, rows=6, seed=0):
    rng = np.random.default_rng(seed)
    if name == "transformer":
        tokens = rng.integers(32, size=(rows, 17)).astype(np.int32)
        return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "weights": np.ones((rows, 16), np.float32)}
    return {
        "image": rng.random((rows, 8, 8, 1), np.float32),
        "label": rng.integers(10, size=rows).astype(np.int32),
    }


def scores(model, batch, keys=None):
    return split_scores(*nnx.split(model, nnx.Param), batch, keys)


@partial(jax.jit, static_argnums=0)
def split_scores(graph, params, batch, keys=None):
    """Scores of every example by itself, with its own key if there are keys."""
    model = nnx.merge(graph, params)

    def one(example, key):
        rngs = None if key is None else nnx.Rngs(dropout=key)
        if "tokens" in example:
            return next_token(model(example["tokens"], rngs=rngs), example["targets"], example["weights"])
        return classification(model(example["image"], rngs=rngs), example["label"])

    return jax.vmap(one, in_axes=(0, None if keys is None else 0))(batch, keys)


def mean_loss(graph, params, batch):
    score = split_scores(graph, params, batch)
    return score.loss.sum() / score.weight.sum()


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name == "resnet" else []) for name in SMALL]
)
def test_a_gradient_step_lowers_the_loss(name):
    graph, params = nnx.split(small(name), nnx.Param)
    batch = batch_for(name)
    value_and_grad = jax.jit(jax.value_and_grad(mean_loss, argnums=1), static_argnums=0)
    before, grads = value_and_grad(graph, params, batch)
    after, _ = value_and_grad(graph, jax.tree.map(lambda p, g: p - 0.02 * g, params, grads), batch)
    assert np.isfinite(before)
    assert after < before
    assert all(np.abs(g).max() > 0 for g in jax.tree.leaves(grads)), "a parameter without gradient"


@pytest.mark.parametrize("name", SMALL)
def test_parameters_are_the_only_state(name):
    """No random state and no statistics: the result depends only on the sample, its key and the parameters."""
    options = {} if name == "resnet" else {"dropout": 0.5}
    model = outline(name, **options)
    _, params, rest = nnx.split(model, nnx.Param, ...)
    assert not jax.tree.leaves(rest)
    assert {p.dtype for p in jax.tree.leaves(params)} == {jnp.dtype("float32")}


@pytest.mark.parametrize("name", ["mlp", "cnn", "transformer"])
def test_dropout_depends_on_the_sample_not_on_the_split(name):
    model = small(name, dropout=0.3)
    graph, params = nnx.split(model, nnx.Param)
    batch = batch_for(name)
    keys = jax.random.split(jax.random.key(1), 6)
    whole = scores(model, batch, keys).loss
    part = scores(model, jax.tree.map(lambda x: x[2:4], batch), keys[2:4]).loss
    np.testing.assert_allclose(whole[2:4], part, rtol=1e-5)
    assert not np.allclose(whole, scores(model, batch, keys[::-1]).loss), "the keys have no effect"
    evaluation = str(jax.make_jaxpr(partial(split_scores, graph))(params, batch))
    assert "random" not in evaluation, "dropout without keys"


@pytest.mark.parametrize("name", ["mlp", "cnn", "resnet"])
def test_leading_batch_axes_give_the_logits_of_each_image(name):
    model = nnx.jit(small(name))
    image = batch_for(name)["image"]
    stacked = model(image)
    assert stacked.shape == (6, 10)
    np.testing.assert_allclose(stacked, [model(one) for one in image], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(model(image.reshape(2, 3, 8, 8, 1)), stacked.reshape(2, 3, 10), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", SMALL)
def test_bfloat16_compute_keeps_float32_parameters(name):
    fine, coarse = (jax.jit(small(name, **options)) for options in ({}, {"dtype": jnp.bfloat16}))
    example = batch_for(name)["tokens" if name == "transformer" else "image"][0]
    assert coarse(example).dtype == jnp.float32
    heavy = re.findall(r":(\w+)\[[^=]*= (?:dot_general|conv_general_dilated)\[", str(jax.make_jaxpr(coarse)(example)))
    assert len(heavy) > 1
    assert set(heavy) == {"bf16"}
    np.testing.assert_allclose(coarse(example), fine(example), atol=0.1)
    assert not np.array_equal(coarse(example), fine(example))
    assert {p.dtype for p in jax.tree.leaves(nnx.state(outline(name, dtype=jnp.bfloat16)))} == {jnp.dtype("float32")}


@pytest.mark.parametrize("name", SMALL)
def test_float64_is_never_narrowed(name, float64):
    """Needed to compare splits in float64."""
    graph, params = nnx.split(outline(name), nnx.Param)
    params = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, jnp.float64), params)
    batch = jax.tree.map(lambda x: x.astype(np.float64) if x.dtype == np.float32 else x, batch_for(name, rows=2))
    text = str(jax.make_jaxpr(partial(split_scores, graph))(params, batch))
    assert "f64" in text
    assert "f32" not in text


@pytest.mark.parametrize("shape", [(8, 8, 3), (2, 7, 5, 3)])
def test_max_pool_is_the_maximum_of_each_window(shape):
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    pooled = max_pool(jnp.asarray(x))
    for row in range(shape[-3] // 2):
        for column in range(shape[-2] // 2):
            window = x[..., 2 * row : 2 * row + 2, 2 * column : 2 * column + 2, :]
            np.testing.assert_array_equal(pooled[..., row, column, :], window.max(axis=(-3, -2)))


def test_no_gradient_of_a_window_reduction_in_the_cnn():
    graph, params = nnx.split(small("cnn"), nnx.Param)
    text = str(jax.make_jaxpr(jax.grad(lambda p: mean_loss(graph, p, batch_for("cnn"))))(params))
    assert "conv_general_dilated" in text
    assert "reduce_window" not in text
    assert "select_and_scatter" not in text


@pytest.mark.parametrize("shape", [(28, 28, 1), (4, 4, 3), (9, 5, 2)])
def test_cnn_and_resnet_take_images_of_many_sizes(shape):
    for name in ("cnn", "resnet"):
        assert output_shape(outline(name, Description("images", shape, classes=7)), shape) == (7,)


def test_resnet_takes_a_norm_factory():
    made = []

    def factory(features, *, dtype, rngs):
        made.append(features)
        return lambda x: x * 2

    assert output_shape(outline("resnet", norm=factory), (8, 8, 1)) == (10,)
    assert made == [8, 8, 8, 16, 16, 32, 32]
    with pytest.raises(ValueError, match="norm='batch'"):
        outline("resnet", norm="batch")


def test_transformer_is_causal():
    model = nnx.jit(small("transformer"))
    tokens = jnp.arange(16)
    logits = model(tokens)
    for position in (0, 7, 15):
        changed = model(tokens.at[position].set(31))
        np.testing.assert_allclose(changed[:position], logits[:position], atol=1e-5)
        assert not np.allclose(changed[position], logits[position], atol=1e-3)


def test_attention_equals_that_of_jax():
    q, k, v = np.random.default_rng(0).normal(size=(3, 2, 7, 5)).astype(np.float32)
    reference = jax.jit(partial(jax.nn.dot_product_attention, is_causal=True))
    expected = reference(*(x.swapaxes(0, 1) for x in (q, k, v)))
    np.testing.assert_allclose(jax.jit(causal_attention)(q, k, v).swapaxes(0, 1), expected, rtol=1e-5, atol=1e-6)


def test_tokens_without_weight_do_not_count():
    model = small("transformer")
    batch = batch_for("transformer", rows=1)
    batch["weights"][:, 10:] = 0
    other = {**batch, "targets": batch["targets"].copy()}
    other["targets"][:, 10:] = 3
    np.testing.assert_allclose(scores(model, batch).loss, scores(model, other).loss)
    assert scores(model, batch).weight[0] == 10
    short = scores(model, jax.tree.map(lambda x: x[:, :10], batch))
    np.testing.assert_allclose(scores(model, batch).loss, short.loss, rtol=1e-5)


def test_classification_is_cross_entropy():
    logits = jnp.log(jnp.array([0.5, 0.3, 0.2]))
    score = classification(logits, jnp.array(1))
    np.testing.assert_allclose(score.loss, -np.log(0.3), rtol=1e-6)
    assert score.weight == 1
    assert score.correct == 0
    assert classification(logits, jnp.array(0)).correct == 1


@pytest.mark.parametrize(
    ("name", "description", "options", "message"),
    [
        ("vgg", IMAGES, {}, "no model 'vgg'. Expected one of mlp, cnn, resnet, transformer"),
        ("cnn", WORDS, {}, "cnn needs inputs with labels, but the samples of words are text"),
        ("cnn", Description("vectors", (7,), classes=2), {}, r"cnn needs images .* each of shape \(7,\)"),
        ("transformer", IMAGES, {}, "transformer needs text"),
        ("cnn", Description("tiny", (2, 2, 1), classes=2), {}, "2x2 pixels are too small"),
        ("mlp", IMAGES, {"depth": 3}, "mlp has no option 'depth'. It has hidden, dropout, dtype"),
        ("mlp", IMAGES, {"dropout": 1.0}, "dropout is 1.0"),
        ("transformer", WORDS, {"width": 30, "heads": 4}, "width of 30 cannot be divided among 4 heads"),
    ],
)
def test_invalid_models_are_rejected(name, description, options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        make_model(name, description, nnx.Rngs(0), **options)


def test_transformer_rejects_batches_and_long_sequences():
    model = Transformer(8, 32, width=16, heads=2, depth=1, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"at most 8 tokens, but got shape \(9,\)"):
        model(jnp.zeros(9, jnp.int32))
    with pytest.raises(ValueError, match=r"got shape \(2, 8\)"):
        model(jnp.zeros((2, 8), jnp.int32))


@pytest.mark.parametrize(("spec", "name"), [("digits", "cnn"), ("synthetic", "mlp"), ("text", "transformer")])
def test_models_fit_the_builtin_datasets(spec, name):
    source = load(spec)
    model = nnx.eval_shape(lambda: make_model(name, source.description, nnx.Rngs(0)))
    graph, params = nnx.split(model, nnx.Param)
    score = jax.eval_shape(partial(split_scores, graph), params, fetch(source, np.arange(2)))
    assert score.loss.shape == (2,)
