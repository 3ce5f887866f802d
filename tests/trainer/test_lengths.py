"""Sequences of unequal length: any split trains like a plain loop, in any loop, and nothing compiles on the way."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from problems import RandomPlans, distance, keys_for

from hetjax import Bucketed, Chunked, Example, Looped, Masked, Step, Trainer
from hetjax.devices.compile import compiles

LENGTHS, BATCH, SAMPLES, VOCAB = (4, 8, 16), 8, 52, 7


def loss_fn(params, batch, keys):
    """A causal model: the mean of the embeddings so far predicts the next token. Noise from the key of each sample."""

    def of_one(tokens_T, weights_T, key):
        seen_TxD = jnp.cumsum(params["embedding"][tokens_T], axis=0) / jnp.arange(1, len(tokens_T) + 1)[:, None]
        logits_TxV = (seen_TxD * (1 + 0.1 * jax.random.normal(key))) @ params["out"]
        loss_T = optax.softmax_cross_entropy_with_integer_labels(logits_TxV[:-1], tokens_T[1:])
        return (loss_T * weights_T[1:]).sum(), weights_T[1:].sum()

    loss_b, weight_b = jax.vmap(of_one)(batch["tokens"], batch["weights"], keys)
    return Example(loss_b, weight_b, {"half": 0.5 * weight_b})


def params():
    rng = np.random.default_rng(1)
    return {"embedding": jnp.array(rng.normal(size=(VOCAB, 5))), "out": jnp.array(rng.normal(size=(5, VOCAB)) * 0.1)}


def source(**options):
    rng = np.random.default_rng(0)
    sizes = np.exp(rng.uniform(np.log(2), np.log(16), SAMPLES)).astype(int)
    sequences = [{"tokens": rng.integers(0, VOCAB, size).astype(np.int32)} for size in sizes]
    return Bucketed(sequences, LENGTHS, mask="weights", **options)


def trainer_for(devices=2, **options):
    options = {"batch_size": BATCH, "controller": "equal", "engine": Chunked(rungs=[2, 8]), **options}
    return Trainer(loss_fn, optax.sgd(0.3, momentum=0.9), devices=jax.devices()[:devices], **options)


def reference(data, epochs):
    """A plain loop over the same steps, without hetjax's engines."""
    optimizer, now = optax.sgd(0.3, momentum=0.9), params()
    opt_state, order, cursor, losses = optimizer.init(now), data.sampler(BATCH), 0, []

    @jax.jit
    def grads_of(now, batch, keys):
        def mean(now):
            example = loss_fn(now, batch, keys)
            return example.loss_b.sum() / example.weight_b.sum()

        return jax.value_and_grad(mean)(now)

    while cursor < epochs * SAMPLES:
        step = order.step(cursor)
        batch = data.rows(order.indices(step.epoch, step.start, step.stop))
        loss, grads = grads_of(now, batch, keys_for(0, step.epoch, step.start, step.stop))
        updates, opt_state = optimizer.update(grads, opt_state, now)
        now, cursor = optax.apply_updates(now, updates), cursor + step.batch
        losses.append(float(loss))
    return now, losses


@pytest.fixture(scope="module")
def plain():
    return reference(source(), 2)


@pytest.mark.parametrize(
    ("devices", "options"),
    [
        (1, {}),
        (2, {"controller": RandomPlans(3)}),
        pytest.param(3, {"controller": "balanced"}, marks=pytest.mark.slow),
        pytest.param(2, {"controller": "dbs"}, marks=pytest.mark.slow),
        (2, {"engine": Looped(micro=2)}),
        (2, {"engine": Masked()}),
        pytest.param(2, {"controller": "balanced", "speeds": [1, 0.25]}, marks=pytest.mark.slow),
    ],
    ids=["one", "random", "balanced", "dbs", "looped", "masked", "simulated"],
)
def test_any_split_is_the_training_of_a_plain_loop(devices, options, plain):
    with trainer_for(devices, **options) as trainer:
        state, history = trainer.fit(trainer.init(params()), source(), epochs=2)
    np.testing.assert_allclose(history.losses, plain[1], rtol=1e-5)
    assert distance(state.params, plain[0]) < 1e-5
    assert state.cursor == 2 * SAMPLES


@pytest.mark.slow
def test_a_limit_of_tokens_changes_the_steps_but_not_their_split():
    data, losses = source(tokens=32), []
    for devices, controller in [(1, "equal"), (3, "balanced")]:
        with trainer_for(devices, controller=controller) as trainer:
            _, history = trainer.fit(trainer.init(params()), data, epochs=1)
        losses.append(history.losses)
        counts = {int(record.counts_W.sum()) for record in history.records}
        assert max(counts) == BATCH
        assert history.totals.samples == SAMPLES
    np.testing.assert_allclose(*losses, rtol=1e-5)


def test_a_run_resumes_in_the_middle_of_an_epoch_on_other_workers(plain):
    with trainer_for(2) as trainer:
        state, first = trainer.fit(trainer.init(params()), source(), steps=5)
        saved = trainer.state_dict(state)
    with trainer_for(3, controller="balanced") as trainer:
        state = trainer.load_state_dict(saved, state)
        with pytest.raises(ValueError, match="other buckets"):
            trainer.fit(state, source(tokens=16), epochs=1)
        state, second = trainer.fit(state, source(), stop_at=2 * SAMPLES)
    np.testing.assert_allclose(first.losses + second.losses, plain[1], rtol=1e-5)
    assert distance(state.params, plain[0]) < 1e-5


@pytest.mark.parametrize("controller", [pytest.param("equal", marks=pytest.mark.slow), "balanced"])
def test_nothing_compiles_after_warm_up(controller):
    data = source()
    with trainer_for(2, controller=controller) as trainer:
        state, _ = trainer.fit(trainer.init(params()), data, steps=1)
        before = compiles()
        state, history = trainer.fit(state, data, epochs=2)
        assert compiles() == before
        assert len({record.counts_W.sum() for record in history.records}) > 1
        trainer.evaluate(state, data)
        before = compiles()
        trainer.evaluate(state, data)
        assert compiles() == before


def test_evaluation_weighs_every_token_once():
    data = source()
    with trainer_for(3) as trainer:
        state = trainer.init(params())
        measured = trainer.evaluate(state, data)
    batch = data.rows(np.arange(SAMPLES))  # all at the longest length
    order = data.sampler(BATCH, shuffle=False).indices(0, 0, SAMPLES)
    keys = keys_for(0, 0, 0, SAMPLES)
    example = loss_fn(params(), jax.tree.map(lambda x: x[order], batch), keys)
    assert measured["loss"] == pytest.approx(float(example.loss_b.sum() / example.weight_b.sum()), rel=1e-5)
    assert measured["half"] == pytest.approx(0.5)


def test_a_users_own_loop_takes_batches_of_the_shapes_it_has_opened(plain):
    data = source()
    order, cursor = data.sampler(BATCH), 0
    one = lambda size: np.zeros(1, int)
    step = Step(loss_fn, optax.sgd(0.3, momentum=0.9), batch_size=BATCH, controller="equal", epoch_size=SAMPLES,
                devices=jax.devices()[:2], engine=Chunked(rungs=[2, 8]))  # fmt: skip
    with step:
        first, *further = data.samples(one)
        state, records = step.open(step.init(params()), first, further=further), []
        before = None
        while cursor < 2 * SAMPLES:
            span = order.step(cursor)
            state, record = step(state, data.rows(order.indices(span.epoch, span.start, span.stop)))
            before = before or compiles()
            records.append(record)
            cursor += span.batch
        records.append(step.flush())
        assert compiles() == before
        np.testing.assert_allclose([record.loss for record in records[1:]], plain[1], rtol=1e-5)
        by_bucket = [data.rows(np.flatnonzero(data.bucket_N == k)[:BATCH]) for k in range(3)]
        assert np.isfinite(step.evaluate(state, by_bucket)["loss"])
        with pytest.raises(ValueError, match="Pad samples to one of these shapes"):
            step(state, {"tokens": np.zeros((2, 5), np.int32), "weights": np.ones((2, 5), np.float32)})


def test_the_work_of_a_step_is_counted_in_the_longest_samples():
    data = source()
    with trainer_for(2, speeds=[1, 0.5], controller="balanced") as trainer:
        trainer.fit(trainer.init(params()), data, steps=1)
        pipeline = trainer.step._pipeline
        work_K = [session.engine.limits().stairs[0][BATCH] for session in pipeline.sessions]
        assert [session.engine.limits().bucket for session in pipeline.sessions] == [0, 1, 2]
    np.testing.assert_allclose(np.array(work_K) / work_K[0], [1, 0.5, 0.25])


def summary(params, batch, keys):
    """Outputs of one shape for all lengths, one of which depends on the sample's key."""
    embedded = params["embedding"][batch["tokens"]] * batch["weights"][..., None]
    return {"sum": embedded.sum(1), "noise": jax.vmap(jax.random.normal)(keys), "tokens": batch["weights"].sum(-1)}


@pytest.mark.parametrize("tokens", [None, 32])
def test_predictions_of_samples_in_buckets_are_in_the_order_of_the_source(tokens):
    data, start = source(tokens=tokens), params()
    with trainer_for(3, predict_fn=summary) as trainer:
        state = trainer.init(start)
        found = trainer.predict(state, data)
        before = compiles()
        again = trainer.predict(state, data)
        assert compiles() == before
    assert found["tokens"].tolist() == data.size_N.tolist()
    expected = [np.asarray(start["embedding"])[sample["tokens"]].sum(0) for sample in data.source]
    np.testing.assert_allclose(found["sum"], expected, rtol=1e-5, atol=1e-5)
    assert len(set(found["noise"].tolist())) == SAMPLES  # every sample has a key of its own
    jax.tree.map(np.testing.assert_array_equal, found, again)


def test_predictions_with_an_axis_of_tokens_are_refused_with_a_sentence():
    by_token = lambda params, batch, keys: params["embedding"][batch["tokens"]]
    words = r"no common shape \(.*16, 5.* and .*8, 5.*\)\. Let predict_fn return outputs without an axis of tokens"
    with trainer_for(predict_fn=by_token) as trainer, pytest.raises(ValueError, match=words):
        trainer.predict(trainer.init(params()), source())


def test_samples_of_one_length_are_evaluated_and_predicted_after_training_on_buckets():
    data = source()
    short = data.rows(np.flatnonzero(data.bucket_N == 2))
    with trainer_for(predict_fn=summary) as trainer:
        state, _ = trainer.fit(trainer.init(params()), data, steps=1)
        found = trainer.predict(state, short)["tokens"]
        example = loss_fn(state.params, short, keys_for(0, 0, 0, len(found)))
        assert trainer.evaluate(state, short)["loss"] == pytest.approx(
            float(example.loss_b.sum() / example.weight_b.sum()), rel=1e-5
        )
    assert found.tolist() == short["weights"].sum(-1).tolist()


@pytest.mark.parametrize("options", [{"strategy": "daso"}, {"strategy": "hogbatch"}, {"partition": "proportional"}])
def test_what_divides_samples_by_number_is_refused(options):
    made = Trainer(loss_fn, optax.sgd(0.1), batch_size=BATCH, devices=jax.devices()[:2], **options,
                   **({"controller": "equal"} if "partition" in options else {}))  # fmt: skip
    with made as trainer, pytest.raises(ValueError, match="unequal length"):
        trainer.fit(trainer.init(params()), source(), epochs=1)


PROGRAM = """
import json, sys
from hetjax.fleet import initialize, leave
info = initialize(wait_limit=60)
import test_lengths as case
with case.Trainer(case.loss_fn, case.optax.sgd(0.3, momentum=0.9), batch_size=case.BATCH) as trainer:
    data = case.source()
    state, history = trainer.fit(trainer.init(case.params()), data, epochs=2)
    loss = trainer.evaluate(state, data)["loss"]
if info.first:
    open(sys.argv[1], "w").write(json.dumps([len(trainer.workers), *history.losses, loss]))
leave(0, together=True)
"""


@pytest.mark.slow
def test_two_processes_train_like_one(tmp_path):
    program, found = tmp_path / "program.py", {}
    program.write_text(PROGRAM)
    paths = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    for processes in (1, 2):
        out = tmp_path / f"{processes}.json"
        command = [sys.executable, "-m", "hetjax", "launch", "--processes", str(processes), "--", program, out]
        flags = "--xla_force_host_platform_device_count=1"
        environment = {**os.environ, "PYTHONPATH": paths, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
        done = subprocess.run(list(map(str, command)), env=environment, capture_output=True, text=True, timeout=280)
        assert done.returncode == 0, done.stderr
        found[processes] = json.loads(out.read_text())
    assert (found[1][0], found[2][0]) == (1, 2)
    np.testing.assert_allclose(found[2][1:], found[1][1:], rtol=1e-5)
