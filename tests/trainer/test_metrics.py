"""Metrics with a weight and a shape of their own equal NumPy's for any allocation, and change nothing else."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from problems import RandomPlans

from hetjax import BatchNorm, Chunked, Example, Metric, Progress, Step, Trainer, from_nnx
from hetjax.adapters.contract import Objective
from hetjax.report import Composite, JsonlTracker, TensorBoardTracker
from hetjax.report.hooks import Follow
from hetjax.report.run_folder import read_run
from hetjax.report.trackers import scalars
from hetjax.sync import AdaptiveSgd, Daso, Decentralized, Hogbatch
from hetjax.sync.hogbatch.metrics import MetricSums

SAMPLES, BATCH, LENGTH, CLASSES = 50, 16, 6, 4
RNG = np.random.default_rng(0)
DATA = {
    "x": RNG.normal(size=(SAMPLES, LENGTH, 3)).astype(np.float32),
    "label": RNG.integers(0, CLASSES - 1, (SAMPLES, LENGTH)).astype(np.int32),  # the last class never occurs
    "valid": RNG.random((SAMPLES, LENGTH)) < 0.6,
}
PARAMS = {"w": RNG.normal(size=(3, CLASSES)).astype(np.float32)}
ENGINES = [Chunked(rungs=[4, 16]), "looped", "masked"]
FURTHER = [(1, "mesh"), (3, "host")]  # workers and transport


def token_loss(params, batch, keys):
    """A classifier of tokens, with a mean over tokens, and over sequences, classes and pairs of classes."""
    logits = batch["x"] @ params["w"]
    valid = batch["valid"]
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    guess, truth = jax.nn.one_hot(logits.argmax(-1), CLASSES), jax.nn.one_hot(batch["label"], CLASSES)
    pairs = jnp.einsum("btg,btc,bt->bcg", guess, truth, valid.astype(jnp.float32))
    correct = (logits.argmax(-1) == batch["label"]) & valid
    hits, labels = jnp.einsum("bcc->bc", pairs), pairs.sum(-1)
    metrics = {
        "token_accuracy": correct.sum(-1),
        "sequence_accuracy": Metric((correct == valid).all(-1)),
        "first_token": Metric(correct[:, 0], valid[:, 0]),
        "recall": Metric(hits, labels),
        "rows": Metric(pairs, labels[:, :, None]),
        "confusion": Metric(pairs, reduce="sum"),
        "average_pairs": Metric(pairs),
    }
    return Example((loss * valid).sum(-1), valid.sum(-1), metrics)


def loss_alone(params, batch, keys):
    example = token_loss(params, batch, keys)
    return Example(example.loss_b, example.weight_b)


def expected(rows=slice(None)):
    """The same in NumPy, without hetjax."""
    x, label, valid = DATA["x"][rows], DATA["label"][rows], DATA["valid"][rows]
    logits = np.einsum("btk,kc->btc", x.astype(np.float64), PARAMS["w"])
    shifted = logits - logits.max(-1, keepdims=True)
    log_p = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    nll, guess = -np.take_along_axis(log_p, label[..., None], -1)[..., 0], logits.argmax(-1)
    confusion = np.zeros((CLASSES, CLASSES))
    np.add.at(confusion, (label[valid], guess[valid]), 1)
    correct = (guess == label) & valid
    seen = confusion.sum(1)
    with np.errstate(invalid="ignore"):
        recall, shares = np.diag(confusion) / seen, confusion / seen[:, None]
    return {
        "loss": nll[valid].mean(),
        "token_accuracy": correct.sum() / valid.sum(),
        "sequence_accuracy": (correct == valid).all(-1).mean(),
        "first_token": correct[:, 0].sum() / valid[:, 0].sum(),
        "recall": recall,
        "rows": shares,
        "confusion": confusion,
        "average_pairs": confusion / len(x),
    }


def check(found, reference):
    assert set(found) == set(reference)
    for name, value in reference.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5, err_msg=name)


def trainer_for(loss_fn, workers=3, engine=ENGINES[0], **options):
    options = {"optimizer": optax.sgd(0.1), "controller": RandomPlans(workers), "capacity": BATCH, **options}
    return Trainer(loss_fn, batch_size=BATCH, engine=engine, devices=jax.devices()[:workers], **options)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("engine", "workers", "transport"),
    [
        *((engine, 3, "mesh") for engine in ENGINES),
        *((ENGINES[0], *case) for case in FURTHER),
        *(pytest.param(engine, *case, marks=pytest.mark.slow) for engine in ENGINES[1:] for case in FURTHER),
    ],
    ids=str,
)
def test_metrics_of_an_evaluation_equal_numpy(engine, workers, transport):
    """A loss and an accuracy by token, an accuracy by sequence, recall by class, and a confusion matrix at once."""
    with trainer_for(token_loss, workers, engine, transport=transport) as trainer:
        found = trainer.evaluate(trainer.init(PARAMS), DATA)
    check(found, expected())
    assert np.isnan(found["recall"][-1])  # a class without samples, and no warning


def test_metrics_of_a_step_equal_numpy_for_any_plan():
    with Step(
        token_loss, optax.sgd(0.0), batch_size=BATCH, controller=RandomPlans(1), devices=jax.devices()[:4],
        capacity=BATCH, engine=ENGINES[0],
    ) as step:  # fmt: skip
        state, records = step.init(PARAMS), []
        spans = [slice(start, min(start + BATCH, SAMPLES)) for start in range(0, SAMPLES, BATCH)]
        for span in spans:
            state, record = step(state, {name: values[span] for name, values in DATA.items()})
            records += [] if record is None else [record]
        records.append(step.flush())
    for span, record in zip(spans, records, strict=True):
        check({"loss": record.loss, **record.metrics}, expected(span))


SYNCS = {
    "allreduce": lambda: "allreduce",
    "decentralized": lambda: Decentralized("ring"),
    "daso": lambda: Daso(nodes=[2, 1]),
    "hogbatch": lambda: Hogbatch(),
    "adaptive-sgd": lambda: AdaptiveSgd(),
}


@pytest.mark.parametrize("sync", SYNCS)
def test_records_of_every_sync_add_up_to_the_whole(sync):
    """An epoch without movement: the confusion matrices of all steps add up, and shares stay shares."""
    options = {"controller": None, "capacity": None} if sync in ("hogbatch", "adaptive-sgd") else {}
    with trainer_for(token_loss, optimizer=optax.sgd(0.0), sync=SYNCS[sync](), **options) as trainer:
        _, history = trainer.fit(trainer.init(PARAMS), DATA, epochs=1)
        saved = json.loads(json.dumps(trainer.sync.state_dict()))
    whole = expected()
    summed = sum(record.metrics["confusion"] for record in history.records)
    np.testing.assert_array_equal(summed, whole["confusion"])
    counts = [record.counts_W.sum() for record in history.records]
    mean = np.average([record.metrics["sequence_accuracy"] for record in history.records], weights=counts)
    assert mean == pytest.approx(whole["sequence_accuracy"], rel=1e-6)
    for record in history.records:
        shares = record.metrics["rows"].sum(1)
        np.testing.assert_allclose(shares[~np.isnan(shares)], 1, rtol=1e-6)
        np.testing.assert_allclose(record.metrics["recall"], np.diag(record.metrics["rows"]), rtol=1e-6)
    if sync in ("hogbatch", "adaptive-sgd"):  # whose sums go into checkpoints
        again = MetricSums(3, 0.0, saved["tally"]["whole"])
        check({"loss": again.means.loss, **again.means.metrics}, whole)


@pytest.mark.parametrize("norm", [False, True])
def test_flax_models_return_the_metrics_of_one_example(norm):
    class Tokens(nnx.Module):
        def __init__(self, rngs):
            self.norm = BatchNorm(3, group=4, rngs=rngs) if norm else lambda x: x
            self.head = nnx.Linear(3, CLASSES, rngs=rngs)

    def example_loss(model, example, rngs):
        logits = model.head(model.norm(example["x"][0]))
        guess, truth = jax.nn.one_hot(logits.argmax(), CLASSES), jax.nn.one_hot(example["label"][0], CLASSES)
        loss = optax.softmax_cross_entropy(logits, truth)
        pairs = truth[:, None] * guess
        metrics = {"confusion": Metric(pairs, reduce="sum"), "recall": Metric(jnp.diag(pairs), truth)}
        return Example(2 * loss, jnp.float32(2), metrics)

    model = from_nnx(Tokens(nnx.Rngs(0)), example_loss, predict=lambda model, x: model.head(model.norm(x["x"][0])))
    with trainer_for(model, controller="equal") as trainer:
        state = trainer.init(model.params, model.model_state)
        found, guess = trainer.evaluate(state, DATA), trainer.predict(state, DATA).argmax(-1)
        _, history = trainer.fit(state, DATA, epochs=1)
    confusion = np.zeros((CLASSES, CLASSES))
    np.add.at(confusion, (DATA["label"][:, 0], guess), 1)
    np.testing.assert_array_equal(found["confusion"], confusion)
    np.testing.assert_allclose(found["recall"][:-1], (np.diag(confusion) / confusion.sum(1).clip(1))[:-1], rtol=1e-6)
    assert sum(record.metrics["confusion"].sum() for record in history.records) == SAMPLES


def test_metrics_change_neither_loss_nor_parameters():
    ends = []
    for loss_fn in (token_loss, loss_alone):
        with trainer_for(loss_fn) as trainer:
            state, history = trainer.fit(trainer.init(PARAMS), DATA, epochs=3)
            ends.append((history.losses, np.asarray(state.params["w"])))
    np.testing.assert_allclose(ends[0][0], ends[1][0], rtol=1e-6)
    np.testing.assert_allclose(ends[0][1], ends[1][1], rtol=1e-6)


def test_trackers_write_and_read_metrics_that_are_arrays(tmp_path):
    pytest.importorskip("tensorboardX")
    tracker = Composite(JsonlTracker(tmp_path / "run"), TensorBoardTracker(tmp_path / "board"))
    with trainer_for(token_loss) as trainer:
        _, history = trainer.fit(trainer.init(PARAMS), DATA, epochs=1, hooks=[Follow(tracker), Progress()])
    tracker.close()
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    for row, record in zip(rows, history.records, strict=True):
        written = {name: np.array(value, np.float64) for name, value in row["metrics"].items()}  # null is NaN
        for name, value in record.metrics.items():
            np.testing.assert_array_equal(written[name], value)
    assert len(read_run(tmp_path / "run").loss_S) == len(rows)
    shown = {name for name, _ in scalars(rows[0]) if name.startswith("metrics/")}
    assert shown == {"metrics/token_accuracy", "metrics/sequence_accuracy", "metrics/first_token"}


@pytest.mark.filterwarnings("error")
def test_a_metric_without_weight_is_nan_and_a_sum_is_zero():
    def loss_fn(params, batch, keys):
        none_b = jnp.zeros(len(keys))
        metrics = {
            "plain": none_b + 1,
            "own": Metric(none_b, none_b),
            "shaped": Metric(jnp.zeros((len(keys), 2)), none_b),
            "sum": Metric(none_b, reduce="sum"),
            "mean": Metric(none_b + 3),
        }
        return Example(params["w"].sum() * none_b, none_b, metrics)

    with trainer_for(loss_fn) as trainer:
        found = trainer.evaluate(trainer.init(PARAMS), DATA)
    assert np.isnan([found["loss"], found["plain"], found["own"], *found["shaped"]]).all()
    assert (found["sum"], found["mean"]) == (0, 3)


@pytest.mark.parametrize(
    ("metric", "message"),
    [
        (
            lambda b: Metric(b.sum()),
            r"sum_b should have shape \(2, ...\), one entry per example",
        ),
        (lambda b: Metric(b, jnp.ones(3)), "weight_b should have shape"),
        (lambda b: Metric(b, jnp.ones((2, 3))), r"does not broadcast to \(\)"),
        (lambda b: Metric(jnp.ones((2, 3)), jnp.ones((2, 2))), r"\(2,\), which does not broadcast to \(3,\)"),
        (lambda b: Metric(b, b, reduce="sum"), "is a sum, which has no weight"),
        (lambda b: Metric(b, reduce="max"), "use 'mean' or 'sum'"),
        (lambda b: jnp.ones((2, 3)), "or return a hetjax.Metric, which may have any shape"),
        (lambda b: Metric("much"), "should be an array, not a str"),
    ],
)
def test_metrics_that_do_not_fit_are_refused(metric, message):
    objective = Objective(lambda params, batch, keys: Example(batch, metrics={"own": metric(batch)}))
    keys = jax.random.split(jax.random.key(0), 2)
    with pytest.raises((TypeError, ValueError), match=message):
        objective((), None, jnp.ones(2), keys, jnp.ones(2, bool))
