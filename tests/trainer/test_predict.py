"""Predictions: every sample's output once and in order, for any plan, engine and number of workers."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from problems import RandomPlans, keys_for

import hetjax
from hetjax import Chunked, Step, Trainer
from hetjax.devices.compile import compiles

SAMPLES, BATCH = 53, 12  # the last batch is short
ENGINES = {"rungs": Chunked(rungs=[1, 4, 12]), "max_rows": Chunked(max_rows=5), "looped": "looped", "masked": "masked"}
RNG = np.random.default_rng(0)
DATA = {"x": RNG.normal(size=(SAMPLES, 5)).astype(np.float32), "number": np.arange(SAMPLES, dtype=np.int32)}
PARAMS = {"w": RNG.normal(size=(5, 3)).astype(np.float32)}


def loss_fn(params, batch, keys):
    return ((batch["x"] @ params["w"]) ** 2).sum(-1)


def predict_fn(params, batch, keys):
    """Outputs of several shapes and dtypes, one of which depends on the sample's key."""
    logits = batch["x"] @ params["w"]
    return {
        "logits": logits,
        "noisy": logits.sum(-1) + jax.vmap(jax.random.normal)(keys),
        "half": logits.astype(jnp.bfloat16),
        "label": (logits.argmax(-1).astype(jnp.int32), batch["number"] + 2**30),
        "outer": logits[:, :, None] * logits[:, None, :],
        "positive": logits[:, 0] > 0,
    }


def check(found, samples=SAMPLES):
    """Equal to one big batch."""
    rows = {name: values[:samples] for name, values in DATA.items()}
    expected = predict_fn(PARAMS, rows, keys_for(0, 0, 0, samples))
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for mine, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert isinstance(mine, np.ndarray)
        assert (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype)
        tolerance = {"i": 0, "b": 0, "f": 1e-5}.get(mine.dtype.kind, 1e-2)  # the last of bfloat16
        wide = lambda x: np.asarray(x).astype(np.float64)
        np.testing.assert_allclose(wide(mine), wide(theirs), rtol=tolerance, atol=tolerance)


def options_for(workers, engine):
    return {
        "batch_size": BATCH, "engine": engine, "predict_fn": predict_fn, "devices": jax.devices()[:workers],
        "capacity": BATCH,
    }  # fmt: skip


@pytest.mark.parametrize(
    "engine",
    [Chunked(rungs=[1, 4, 12]), Chunked(max_rows=5), "looped", "masked"],
    ids=["rungs", "max_rows", "looped", "masked"],
)
@pytest.mark.parametrize("workers", [1, 3])
def test_predictions_equal_one_big_batch(workers, engine):
    with Trainer(loss_fn, optax.sgd(0.0), controller="equal", **options_for(workers, engine)) as trainer:
        check(trainer.predict(trainer.init(PARAMS), DATA))


def test_any_split_gives_the_same_predictions_and_compiles_nothing():
    """Batches of any size, shares of any ratio, workers without samples."""
    rng = np.random.default_rng(1)
    with Step(loss_fn, optax.sgd(0.0), **options_for(4, Chunked(rungs=[1, 3, 12]))) as step:
        state, before = step.init(PARAMS), None
        for _ in range(8):
            step._shares_W = np.maximum(rng.dirichlet(np.full(4, 0.3)), 1e-3)
            sizes = rng.integers(1, BATCH + 1, SAMPLES)
            ends = np.minimum(np.cumsum(sizes), SAMPLES)
            spans = [(a, b) for a, b in zip([0, *ends], ends, strict=False) if a < b]
            check(step.predict(state, ({name: x[a:b] for name, x in DATA.items()} for a, b in spans)))
            before = compiles() if before is None else before
        assert compiles() == before


def test_the_split_follows_the_shares_of_training():
    """Work follows the count: a worker with a quarter of the share computes a quarter of the rows."""
    batch = {name: x[:BATCH] for name, x in DATA.items()}
    with Step(loss_fn, optax.sgd(0.0), controller="fixed:4,1,1", **options_for(3, Chunked(rungs=[1]))) as step:
        state, _ = step(step.init(PARAMS), batch)
        step.flush()
        check(step.predict(state, [batch]), BATCH)
        engine, packed = next(iter(step.sessions._prediction.values())).engine, []
        pack = engine.pack
        engine.pack = lambda *arguments: packed.append(pack(*arguments)) or packed[-1]
        step.predict(state, [batch])
    assert [sum(chunk.rung for chunk in chunks) for chunks in packed[0]] == [8, 2, 2]


def test_prediction_between_steps_changes_nothing():
    """Training continues, also with samples that have no more than the prediction reads.

    With one rung: with several, measured prices choose the chunks, and with them the order of the sums.
    """
    ends = []
    for predicts in (False, True):
        with Trainer(
            loss_fn, optax.sgd(0.01), controller=RandomPlans(3), ema_decay=0.5, **options_for(3, Chunked(rungs=[12]))
        ) as trainer:
            trainer.step.sessions.predict_fn = lambda params, batch, keys: batch["x"] @ params["w"]
            state, _ = trainer.fit(trainer.init(PARAMS), DATA, steps=3)
            if predicts:
                found = trainer.predict(state, {"x": DATA["x"]})
                np.testing.assert_allclose(found, DATA["x"] @ np.asarray(state.ema["w"]), rtol=1e-5, atol=1e-5)
            state, history = trainer.fit(state, DATA, steps=3)
            ends.append(history.losses)
    assert ends[0] == ends[1]


@pytest.mark.parametrize("strategy", ["daso", "hogbatch"])
def test_every_strategy_predicts_with_its_answer(strategy):
    options = options_for(4, Chunked(rungs=[4, 12])) | {"capacity": None}
    with Trainer(loss_fn, optax.sgd(0.0), strategy=strategy, **options) as trainer:
        state, _ = trainer.fit(trainer.init(PARAMS), DATA, epochs=1)
        check(trainer.predict(state, DATA))


class Net(nnx.Module):
    def __init__(self, rngs):
        self.norm, self.drop = hetjax.BatchNorm(5, group=4, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)
        self.head = nnx.Linear(5, 3, rngs=rngs)

    def __call__(self, x):
        return self.head(self.drop(self.norm(x)))


def test_flax_models_predict_in_evaluation_mode():
    """Equal to the merged model itself, with dropout off and running statistics of BatchNorm."""
    example_loss = lambda model, example, rngs: (model(example["x"]) ** 2).sum()
    model = hetjax.from_nnx(Net(nnx.Rngs(0)), example_loss, predict=lambda model, example: model(example["x"]))
    options = {"batch_size": BATCH, "devices": jax.devices()[:3], "engine": Chunked(rungs=[4, 12])}
    with Trainer(model, optax.sgd(0.01), **options) as trainer:
        state, _ = trainer.fit(trainer.init(model.params, model.model_state), DATA, epochs=1)
        found = trainer.predict(state, DATA)
        merged = model.merge(*jax.tree.map(np.asarray, (state.params, state.model_state)))
    np.testing.assert_allclose(found, merged(DATA["x"]), rtol=1e-5, atol=1e-5)


def test_linen_modules_predict():
    module = linen.Dense(3)
    variables = module.init(jax.random.key(0), DATA["x"][:1])
    model = hetjax.from_linen(
        module, variables, lambda apply, example: (apply(example["x"]) ** 2).sum(),
        predict=lambda apply, example: {"y": apply(example["x"])},
    )  # fmt: skip
    with Trainer(model, optax.sgd(0.1), batch_size=BATCH, devices=jax.devices()[:2]) as trainer:
        found = trainer.predict(trainer.init(model.params), DATA)
    np.testing.assert_allclose(found["y"], module.apply(variables, DATA["x"]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (None, "There is no function for predictions: give predict_fn"),
        (lambda params, batch, keys: (batch["x"] @ params["w"]).sum(), r"one output per example.* has shape \(\)"),
        (lambda params, batch, keys: None, "an array or a tree of arrays, but it returned a NoneType"),
        (lambda params, batch, keys: "logits", "but it returned a str"),
    ],
)
def test_functions_that_do_not_fit_are_refused(given, message):
    with (
        Step(loss_fn, optax.sgd(0.0), **options_for(2, "chunked") | {"predict_fn": given}) as step,
        pytest.raises((TypeError, ValueError), match=message),
    ):
        step.predict(step.init(PARAMS), [{name: x[:BATCH] for name, x in DATA.items()}])


def test_no_batches_are_refused_and_a_failing_source_leaves_nothing_running():
    def failing():
        yield {name: x[:BATCH] for name, x in DATA.items()}
        raise OSError("disk on fire")

    with Step(loss_fn, optax.sgd(0.0), **options_for(2, Chunked(rungs=[4, 12]))) as step:
        state = step.init(PARAMS)
        with pytest.raises(ValueError, match="nothing to predict"):
            step.predict(state, [])
        with pytest.raises(OSError, match="disk on fire"):
            step.predict(state, failing())
        check(step.predict(state, [{name: x[:BATCH] for name, x in DATA.items()}]), BATCH)
