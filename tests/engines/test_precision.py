"""Compute dtypes per kind of device: the model computes in them, parameters and sums stay float32."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from problems import RandomPlans, distance, keys_for

from hetjax import BatchNorm, Chunked, Example, Step, from_nnx
from hetjax.devices import workers
from hetjax.engines import chunked
from hetjax.engines.precision import dtype_of, dtypes_by_kind
from hetjax.planning.controllers.base import Plan

BATCH, STEPS = 24, 4
RNG = np.random.default_rng(0)
DATA = [
    {"x": RNG.normal(size=(BATCH, 6)).astype(np.float32), "label": RNG.integers(0, 3, BATCH).astype(np.int32)}
    for _ in range(STEPS)
]
PARAMS = {
    "hidden": RNG.normal(size=(6, 16)).astype(np.float32) / 2,
    "bias": RNG.normal(size=16).astype(np.float32) / 10,
    "out": RNG.normal(size=(16, 3)).astype(np.float32) / 4,
}
OPTIMIZER = optax.sgd(0.1, momentum=0.9)
TWO = {"batch_size": BATCH, "devices": jax.devices()[:2], "engine": Chunked(rungs=[8, 24])}


def loss_fn(params, batch, keys):
    noise = jax.vmap(lambda key: jax.random.normal(key, (16,)))(keys)
    hidden = jnp.tanh(batch["x"] @ params["hidden"] + params["bias"] + 0.1 * noise.astype(params["bias"].dtype))
    seen.add((str(params["out"].dtype), str(batch["x"].dtype), str(batch["label"].dtype), str(hidden.dtype)))
    return optax.softmax_cross_entropy_with_integer_labels((hidden @ params["out"]).astype(jnp.float32), batch["label"])


seen: set[tuple[str, ...]] = set()  # dtypes that a loss function was traced with


def plain(dtypes):
    """Training without hetjax; `dtypes` holds the rows up to which each compute dtype applies."""
    params, opt_state, losses = PARAMS, OPTIMIZER.init(PARAMS), []
    for step, batch in enumerate(DATA):
        keys = keys_for(0, 0, step * BATCH, (step + 1) * BATCH)

        def mean(params, batch=batch, keys=keys):
            total, start = 0.0, 0
            for stop, dtype in dtypes.items():
                low = jax.tree.map(lambda p, dtype=dtype: p.astype(dtype), params)
                rows = {"x": batch["x"][start:stop].astype(dtype), "label": batch["label"][start:stop]}
                total, start = total + loss_fn(low, rows, keys[start:stop]).astype(jnp.float32).sum(), stop
            return total / BATCH

        loss, grads = jax.jit(jax.value_and_grad(mean))(params)
        updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
        params, losses = optax.apply_updates(params, updates), [*losses, float(loss)]
    return params, losses


def train(count=3, **options):
    options = {"controller": RandomPlans(1), "engine": Chunked(rungs=[4, 24]), **options}
    seen.clear()
    with Step(loss_fn, OPTIMIZER, batch_size=BATCH, devices=jax.devices()[:count], **options) as step:
        state, records = step.init(PARAMS), []
        for batch in DATA:
            state, record = step(state, batch)
            records.append(record)
        records = [*records[1:], step.flush()]
        return step.export(state), [record.loss for record in records]


@pytest.fixture
def two_kinds(monkeypatch):
    for module in (workers, chunked):
        monkeypatch.setattr(module, "device_kind", lambda device: f"kind {device.id % 2}")


@pytest.mark.parametrize(
    ("engine", "dtype"),
    [
        (Chunked(rungs=[4, 24]), "bfloat16"),
        ("looped", "float16"),
        pytest.param(Chunked(rungs=[4, 24]), "float16", marks=pytest.mark.slow),
        pytest.param("looped", "bfloat16", marks=pytest.mark.slow),
        pytest.param("masked", "bfloat16", marks=pytest.mark.slow),
        pytest.param("masked", "float16", marks=pytest.mark.slow),
    ],
)
def test_every_engine_computes_in_the_dtype_like_a_plain_loop_with_the_same_casts(engine, dtype):
    params, losses = plain({BATCH: dtype})
    state, found = train(engine=engine, compute_dtype=dtype, controller="equal")
    assert {dtypes for dtypes in seen if dtypes[0] == dtype} == {(dtype, dtype, "int32", dtype)}
    assert all(p.dtype == np.float32 for p in jax.tree.leaves((state.params, state.opt_state)))
    assert distance(state.params, params) <= 1e-3
    np.testing.assert_allclose(found, losses, rtol=1e-3)
    assert distance(state.params, plain({BATCH: "float32"})[0]) > 1e-5  # it was not float32


def test_float32_is_the_default_to_the_bit():
    plans = lambda: {"controller": RandomPlans(1)}
    default, named, mapped = (
        train(**plans(), **options)
        for options in ({}, {"compute_dtype": "float32"}, {"compute_dtype": {"cpu": jnp.float32, "gpu": "bfloat16"}})
    )
    for other in (named, mapped):
        jax.tree.map(np.testing.assert_array_equal, default[0].params, other[0].params)
        assert default[1] == other[1]


@pytest.mark.slow
def test_the_split_changes_no_more_than_rounding():
    runs = [train(controller=RandomPlans(seed), compute_dtype="bfloat16")[0].params for seed in range(3)]
    runs.append(train(1, controller="equal", compute_dtype="bfloat16")[0].params)
    assert max(distance(run, runs[0]) for run in runs) <= 1e-3


def test_two_kinds_of_device_compute_in_their_own_dtypes(two_kinds):
    counts_W = Plan(np.array([16, 8]))
    fixed = RandomPlans(0)
    fixed.plan = lambda batch, limits, epoch=0: counts_W
    params, losses = plain({16: "bfloat16", 24: "float32"})
    state, found = train(2, controller=fixed, compute_dtype={"kind 0": "bfloat16", "default": "float32"})
    assert {dtypes[0] for dtypes in seen} == {"bfloat16", "float32"}
    assert distance(state.params, params) <= 1e-3
    np.testing.assert_allclose(found, losses, rtol=1e-3)


@pytest.mark.parametrize("train_or_eval", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_sums_are_float32(train_or_eval):
    with Step(loss_fn, OPTIMIZER, compute_dtype={"cpu": "bfloat16"}, **TWO) as step:
        state, _ = step(step.init(PARAMS), DATA[0])
        if not train_or_eval:
            step.evaluate(state, DATA)
        sessions = step.sessions._training if train_or_eval else step.sessions._evaluation
        (session,) = sessions.values()
        shapes = [session.engine._arguments(rung, None) for rung in (1, 8)]
        (ladder,) = session.engine.ladders.values()
        outputs = [jax.eval_shape(ladder.chunk, *shape) for shape in shapes]
    assert all(part.dtype == np.float32 for parts in outputs for part in parts)


def test_evaluation_computes_in_the_same_dtype():
    with Step(loss_fn, OPTIMIZER, compute_dtype="bfloat16", **TWO) as step:
        found = step.evaluate(step.init(PARAMS), DATA)["loss"]
    low = jax.tree.map(lambda p: p.astype(jnp.bfloat16), PARAMS)
    rows = [{"x": batch["x"].astype(jnp.bfloat16), "label": batch["label"]} for batch in DATA]
    keys = [keys_for(0, 0, i * BATCH, (i + 1) * BATCH) for i in range(STEPS)]
    losses = [loss_fn(low, batch, k) for batch, k in zip(rows, keys, strict=True)]
    np.testing.assert_allclose(found, np.mean(losses), rtol=1e-2)


def test_batch_norm_statistics_stay_float32():
    class Model(nnx.Module):
        def __init__(self):
            self.hidden, self.norm = nnx.Linear(6, 16, rngs=nnx.Rngs(0)), BatchNorm(16, group=4)
            self.out = nnx.Linear(16, 3, rngs=nnx.Rngs(1))

        def __call__(self, x):
            hidden = self.hidden(x)
            seen.add((str(hidden.dtype), str(self.norm.mean.dtype)))
            return self.out(self.norm(hidden))  # as in Flax, float32 statistics make a float32 output

    def example_loss(model, example, rngs):
        logits = model(example["x"])
        return Example(optax.softmax_cross_entropy_with_integer_labels(logits.astype(np.float32), example["label"]))

    states, model = [], from_nnx(Model(), example_loss)
    seen.clear()
    for dtype in ("float32", "bfloat16"):
        with Step(model, OPTIMIZER, compute_dtype=dtype, controller=RandomPlans(0), **TWO) as step:
            state, _ = step(step.init(model.params, model.model_state), DATA[0])
            states.append(step.export(state).model_state)
    assert seen == {("float32", "float32"), ("bfloat16", "float32")}
    assert all(leaf.dtype == np.float32 for leaf in jax.tree.leaves(states))
    assert 1e-7 < distance(states[1], states[0]) <= 1e-2


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ("int8", ValueError, "compute_dtype is 'int8': expected one of float32, bfloat16, float16"),
        ("float", ValueError, "compute_dtype is 'float': expected"),
        ({"cpu": None}, ValueError, "compute_dtype is None: expected"),
        ({0: "float32"}, TypeError, "compute_dtype has the key 0: expected kinds of device"),
    ],
)
def test_other_dtypes_are_refused(given, error, message):
    with pytest.raises(error, match=message):
        Step(loss_fn, OPTIMIZER, batch_size=BATCH, compute_dtype=given)


def test_a_kind_is_found_by_model_then_platform_then_default():
    dtypes = dtypes_by_kind({"Tesla T4": "float16", "gpu": jnp.bfloat16, "default": np.float32})
    assert dtype_of("gpu:Tesla T4", dtypes) == "float16"
    assert dtype_of("gpu:NVIDIA A100", dtypes) == "bfloat16"
    assert dtype_of("cpu:cpu", dtypes) == "float32"
    assert dtype_of("cpu:cpu", dtypes_by_kind({"gpu": "float16"})) is None


def test_one_program_in_two_dtypes_is_refused(two_kinds):
    with Step(loss_fn, OPTIMIZER, **TWO) as step:
        step(step.init(PARAMS), DATA[0])
        program = step.engine.program
    with pytest.raises(ValueError, match=r"different dtypes \(kind 0: bfloat16, kind 1: as the model\), but this eng"):
        type(program)(**{**vars(program), "dtypes": {"kind 0": "bfloat16"}}).for_kinds(("kind 0", "kind 1"))


def test_float16_warns_that_the_loss_is_not_scaled(caplog):
    with caplog.at_level(logging.WARNING, "hetjax"):
        train(compute_dtype="float16")
    assert caplog.text.count("does not scale the loss") == 1


@pytest.mark.slow
def test_a_loss_scaled_with_its_weight_keeps_small_gradients_in_float16():
    tiny = lambda params, batch, keys: 1e-9 * loss_fn(params, batch, keys)
    scaled = lambda params, batch, keys: Example(
        2.0**20 * tiny(params, batch, keys), weight_b=jnp.full(len(keys), 2.0**20)
    )
    moved, losses = [], []
    for loss in (tiny, scaled):
        with Step(loss, optax.sgd(1e8), compute_dtype="float16", **TWO) as step:
            state, _ = step(step.init(PARAMS), DATA[0])
            losses.append(step.flush().loss)
            moved.append(jax.tree.map(np.subtract, step.export(state).params, PARAMS))
    gradient = jax.grad(lambda params: loss_fn(params, DATA[0], keys_for(0, 0, 0, BATCH)).mean())(PARAMS)
    expected = jax.tree.map(lambda g: -0.1 * g, gradient)
    assert distance(moved[1], expected) <= 1e-2 < distance(moved[0], expected)
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
