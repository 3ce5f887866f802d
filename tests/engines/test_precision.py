"""Compute dtypes per kind of device: the model computes in them, parameters and sums stay float32."""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import microbatches
import numpy as np
import optax
import pytest
from flax import nnx
from problems import RandomPlans, distance, keys_for

import hetjax
from hetjax import BatchNorm, Chunked, Example, Looped, Step, from_nnx
from hetjax.devices import workers
from hetjax.engines import chunked
from hetjax.engines.precision import announce, dtype_of, dtypes_by_kind, warn_of_unused

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


def plain(counts_W, *dtype_W, rows=4):
    """Training without hetjax, in the same microbatches."""
    return microbatches.train(loss_fn, PARAMS, OPTIMIZER, DATA, counts_W, rows, dtype_W)


def train(count=3, **options):
    defaults = {"devices": jax.devices()[:count], "controller": RandomPlans(1), "engine": Chunked(rungs=[4, 24])}
    seen.clear()
    with Step(loss_fn, OPTIMIZER, batch_size=BATCH, **{**defaults, **options}) as step:
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
    ("engine", "rows", "dtype"),
    [
        (Chunked(rungs=[4]), 4, "bfloat16"),
        (Looped(micro=4), 4, "float16"),
        pytest.param(Chunked(rungs=[4]), 4, "float16", marks=pytest.mark.slow),
        pytest.param(Looped(micro=4), 4, "bfloat16", marks=pytest.mark.slow),
        pytest.param("masked", 12, "bfloat16", marks=pytest.mark.slow),
        pytest.param("masked", 12, "float16", marks=pytest.mark.slow),
    ],
)
def test_every_engine_computes_in_the_dtype_like_a_plain_loop_over_the_same_microbatches(engine, rows, dtype, caplog):
    params, losses = plain([12, 9, 3], dtype, dtype, dtype, rows=rows)
    with caplog.at_level(logging.WARNING, "hetjax"):
        state, found = train(engine=engine, compute_dtype=dtype, controller="fixed:12,9,3", capacity=12)
    assert caplog.text.count("does not scale the loss") == (dtype == "float16")
    assert {dtypes for dtypes in seen if dtypes[0] == dtype} == {(dtype, dtype, "int32", dtype)}
    assert all(p.dtype == np.float32 for p in jax.tree.leaves((state.params, state.opt_state)))
    assert distance(state.params, params) <= 1e-5
    np.testing.assert_allclose(found, losses, rtol=1e-5)
    whole = plain([24], "float32", rows=24)[0]
    assert distance(state.params, whole) > 2e-5  # it was not float32


def test_float32_is_the_default_to_the_bit():
    # One rung: with several, measured prices choose the microbatches, and the last bits follow them.
    plans = lambda: {"controller": RandomPlans(1), "engine": Chunked(rungs=[4])}
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
    params, losses = plain([16, 8], "bfloat16", "float32")
    state, found = train(
        2,
        engine=Chunked(rungs=[4]),
        controller="fixed:16,8",
        compute_dtype={"kind 0": "bfloat16", "default": "float32"},
    )
    assert {dtypes[0] for dtypes in seen} == {"bfloat16", "float32"}
    assert distance(state.params, params) <= 1e-5
    np.testing.assert_allclose(found, losses, rtol=1e-5)


TWO_CLIENTS = """
import json, sys
import jax
from jax._src import xla_bridge
from jax._src.lib import xla_client

second = lambda: xla_client.make_cpu_client(asynchronous=True)
xla_bridge.register_backend_factory("second", second, priority=-100, fail_quietly=False)
devices = jax.devices("cpu")[0], jax.devices("second")[0]
assert devices[0].client is not devices[1].client

import test_precision as precision
from hetjax.devices import workers

plain_kind = workers.device_kind  # both clients call their devices 'cpu'
own_kind = lambda device: "second:Tesla T4" if device.client is devices[1].client else plain_kind(device)
for module in list(sys.modules.values()):
    if getattr(module, "device_kind", None) is plain_kind:
        module.device_kind = own_kind

dtypes = {"Tesla T4": "float16", "default": "bfloat16"}
options = {"controller": "fixed:14,10", "engine": precision.Chunked(rungs=[4]), "compute_dtype": dtypes}
state, losses = precision.train(devices=devices, **options)
right, swapped = (precision.plain([14, 10], *pair) for pair in (("bfloat16", "float16"), ("float16", "bfloat16")))
distances = [precision.distance(state.params, params) for params, _ in (right, swapped)]
print(json.dumps({"distances": distances, "losses": losses, "expected": right[1]}))
"""


@pytest.mark.slow
def test_two_pjrt_clients_compute_in_their_own_dtypes():
    """As a GPU beside a CPU: no program spans both, and arrays of one are not those of the other."""
    folders = [Path(__file__).parent, Path(microbatches.__file__).parent, Path(hetjax.__file__).parents[1]]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders))}
    command = [sys.executable, "-c", TWO_CLIENTS]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout.splitlines()[-1])
    right, swapped = results["distances"]
    assert right <= 1e-5 < 1e-4 < swapped
    np.testing.assert_allclose(results["losses"], results["expected"], rtol=1e-5)


def sums_of(sessions):
    """The shapes of what a worker returns, for two sizes of microbatches."""
    (session,) = sessions.values()
    (ladder,) = session.engine.ladders.values()
    shapes = [session.engine._arguments(rung, None) for rung in (1, 8)]
    return [part for shape in shapes for part in jax.eval_shape(ladder.chunk, *shape)]


def test_evaluation_computes_in_the_same_dtype_and_all_sums_are_float32():
    with Step(loss_fn, OPTIMIZER, compute_dtype={"cpu": "bfloat16"}, **TWO) as step:
        state = step.init(PARAMS)
        found = step.evaluate(state, DATA)["loss"]
        step(state, DATA[0])
        sums = [sums_of(sessions) for sessions in (step.sessions._training, step.sessions._evaluation)]
    assert all(len(parts) >= 2 and all(part.dtype == np.float32 for part in parts) for parts in sums)
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


def test_a_word_of_the_model_names_a_kind():
    dtypes = dtypes_by_kind({"T4": "float16", "a100": "bfloat16", "gpu": "float32"})
    kinds = ("gpu:Tesla T4", "gpu:NVIDIA A100-SXM4-40GB", "gpu:NVIDIA T400", "cpu:cpu")
    assert [dtype_of(kind, dtypes) for kind in kinds] == ["float16", "bfloat16", "float32", None]


def test_a_warning_names_the_kinds_that_emulate_bfloat16(caplog):
    kinds = ["gpu:Tesla T4", "gpu:Tesla V100-SXM2-16GB", "gpu:NVIDIA A100-SXM4-40GB", "cpu:cpu", "tpu:TPU v4"]
    announce(kinds, dtypes_by_kind({"V100": "float16", "default": "bfloat16"}))
    (warning,) = [record.getMessage() for record in caplog.records if "has no bfloat16" in record.getMessage()]
    assert warning.startswith("gpu:Tesla T4 has no bfloat16 (CUDA compute capability below 8.0)")
    caplog.clear()
    announce(kinds, dtypes_by_kind({"T4": "float16", "V100": "float32", "default": "bfloat16"}))
    assert "has no bfloat16" not in caplog.text


def test_a_warning_names_keys_that_match_no_worker(two_kinds, caplog):
    dtypes = {"kind 1": "float32", "Tesla T5": "float16", "default": "bfloat16", "rocket": "float16"}
    with Step(loss_fn, OPTIMIZER, compute_dtype=dtypes, batch_size=BATCH, devices=jax.devices()[:2]) as step:
        step.evaluate(step.init(PARAMS), DATA[:1])
    (warning,) = [record.getMessage() for record in caplog.records if "matches" in record.getMessage()]
    assert warning.startswith("No worker matches 'Tesla T5' and 'rocket' of compute_dtype; the workers are of kind")


def test_keys_that_match_less_than_others_are_no_mistake(caplog):
    warn_of_unused(["gpu:Tesla T4", "cpu:cpu"], dict.fromkeys(["gpu", "T4", "cpu", "default"], "float16"))
    assert not caplog.records


def test_one_program_in_two_dtypes_is_refused(two_kinds):
    with Step(loss_fn, OPTIMIZER, **TWO) as step:
        step(step.init(PARAMS), DATA[0])
        program = step.engine.program
    with pytest.raises(ValueError, match=r"different dtypes \(kind 0: bfloat16, kind 1: as the model\), but this eng"):
        type(program)(**{**vars(program), "dtypes": {"kind 0": "bfloat16"}}).for_kinds(("kind 0", "kind 1"))


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
