"""The same run from the same data in any form: trees of arrays, samples, datasets of other packages, streams.

The model has a weight per sample, so that its parameters tell how often each sample was trained on.
"""

import itertools
import sys
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from hetjax import Bucketed, Chunked, Simulation, Trainer
from hetjax.sampling.order import Sampler
from hetjax.simulation.speeds import constant

SAMPLES, BATCH, RATE = 40, 8, 0.05
RNG = np.random.default_rng(0)
X = RNG.normal(size=(SAMPLES, 3)).astype(np.float32)
Y = np.arange(SAMPLES, dtype=np.int32)
TARGET = RNG.normal(size=SAMPLES).astype(np.float32)


class Pair(NamedTuple):
    x: object
    y: object


def loss_fn(params, batch, keys):
    x, y = (batch["x"], batch["y"]) if isinstance(batch, dict) else batch
    return (x @ params["w"] - jnp.asarray(TARGET)[y]) ** 2 + params["seen"][y]


def first_params():
    return {"w": jnp.zeros(3), "seen": jnp.zeros(SAMPLES)}


def trainer_for(**options):
    options = {"controller": "equal", "devices": jax.devices()[:2], "engine": Chunked(rungs=[4]), **options}
    return Trainer(loss_fn, optax.sgd(RATE), batch_size=BATCH, **options)


@pytest.fixture(scope="module")
def trainer():
    with trainer_for() as made:
        yield made


def times_seen(state):
    """How often each sample was trained on: each time moves its weight by RATE / BATCH."""
    return np.round(np.asarray(state.params["seen"]) * -BATCH / RATE, 3).tolist()


@jax.jit
def plain_step(params, x, y):
    loss, grads = jax.value_and_grad(lambda params: loss_fn(params, (x, y), None).mean())(params)
    return jax.tree.map(lambda p, g: p - RATE * g, params, grads), loss


def plain_losses(batches):
    """The losses of a loop in plain JAX."""
    params, losses = first_params(), []
    for index in batches:
        params, loss = plain_step(params, X[index], Y[index])
        losses.append(float(loss))
    return losses


def in_order(epochs=1):
    """The indices of successive batches."""
    return [np.arange(at, at + BATCH) % SAMPLES for at in range(0, epochs * SAMPLES, BATCH)]


def shuffled(epochs):
    """The same in the order of the trainer."""
    order = Sampler(SAMPLES, BATCH, 0)
    return [order.indices(e, at, at + BATCH) for e in range(epochs) for at in range(0, SAMPLES, BATCH)]


class Tensor:
    """What `np.asarray` needs of a tensor of PyTorch."""

    def __init__(self, values):
        self.values, self.shape, self.dtype = values, values.shape, f"torch.{values.dtype}"

    def __array__(self, dtype=None, copy=None):
        return np.asarray(self.values, dtype)


class TorchDataset:
    """The protocol of a map-style dataset of PyTorch."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return Tensor(X[index]), int(Y[index])


class TorchSubset(TorchDataset):
    def __getitems__(self, indices):
        return [super(TorchSubset, self).__getitem__(index) for index in indices]


class TorchLoader:
    """The protocol of a DataLoader of PyTorch, which has a length but no index, and yields lists."""

    def __len__(self):
        return SAMPLES // BATCH

    def __iter__(self):
        return ([Tensor(X[index]), Tensor(Y[index])] for index in in_order())


def samples():
    return [{"x": x, "y": y} for x, y in zip(X, Y, strict=True)]


def memory_mapped(folder):
    for name, values in (("x", X), ("y", Y)):
        np.save(folder / f"{name}.npy", values)
    return {name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in "xy"}


def hugging_face(kind=None):
    datasets = pytest.importorskip("datasets")
    return datasets.Dataset.from_dict({"x": X, "y": Y}).with_format(kind)


def grain_map(make=lambda dataset: dataset):
    return make(pytest.importorskip("grain").MapDataset.source(samples()))


SOURCES = {
    "dict": lambda _: {"x": X, "y": Y},
    "dict of float64": lambda _: {"x": X.astype(np.float64), "y": Y.astype(np.int64)},
    "dict of lists": lambda _: {"x": X.tolist(), "y": Y.tolist()},
    "dict of JAX arrays": lambda _: {"x": jnp.asarray(X), "y": jnp.asarray(Y)},
    "tuple": lambda _: (X, Y),
    "list of arrays": lambda _: [X, Y],
    "named tuple": lambda _: Pair(X, Y),
    "list of dicts": lambda _: samples(),
    "list of tuples": lambda _: list(zip(X, Y, strict=True)),
    "list of named tuples": lambda _: list(map(Pair, X.tolist(), Y)),
    "list of lists": lambda _: [[x, y] for x, y in zip(X, Y, strict=True)],
    "memory map": memory_mapped,
    "PyTorch": lambda _: TorchDataset(),
    "PyTorch with __getitems__": lambda _: TorchSubset(),
    "Grain": lambda _: grain_map(),
    "Grain mapped": lambda _: grain_map(lambda dataset: dataset.map(lambda sample: Pair(sample["x"], sample["y"]))),
    "Hugging Face": lambda _: hugging_face(),
    "Hugging Face, NumPy": lambda _: hugging_face("numpy"),
    "Hugging Face, JAX": lambda _: hugging_face("jax"),
}


@pytest.mark.parametrize("kind", SOURCES)
def test_every_form_of_the_data_gives_the_same_run(trainer, kind, tmp_path):
    source = SOURCES[kind](tmp_path)
    start = trainer.init(first_params())
    state, history = trainer.fit(start, source, epochs=2)
    np.testing.assert_allclose(history.losses, plain_losses(shuffled(2)), rtol=1e-5)
    assert history.losses == trainer.fit(start, {"x": X, "y": Y}, epochs=2)[1].losses  # to the bit
    assert times_seen(state) == [2.0] * SAMPLES
    expected = np.mean(np.asarray(loss_fn(state.params, (X, Y), None)))
    assert trainer.evaluate(state, source)["loss"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("kind", ["Grain", "Hugging Face"])
def test_predictions_for_a_dataset_of_another_package_are_in_its_order(kind):
    predict_fn = lambda params, batch, keys: {"y": batch["y"], "sum": batch["x"].sum(-1)}
    with trainer_for(predict_fn=predict_fn) as trainer:
        found = trainer.predict(trainer.init(first_params()), SOURCES[kind](None))
    np.testing.assert_array_equal(found["y"], Y)
    np.testing.assert_allclose(found["sum"], X.sum(-1), rtol=1e-5, atol=1e-6)


def sequences():
    """X cut to 1, 2 or 3 entries."""
    return [{"x": x[: 1 + i % 3].tolist(), "y": int(i)} for i, x in enumerate(X)]


BUCKETED = {
    "list": sequences,
    "Grain": lambda: pytest.importorskip("grain").MapDataset.source(sequences()),
    "Hugging Face": lambda: pytest.importorskip("datasets").Dataset.from_list(sequences()).with_format("numpy"),
}


def test_buckets_over_a_dataset_of_another_package_give_the_same_run():
    def loss(params, batch, keys):
        width = batch["x"].shape[1]
        return (batch["x"] @ params["w"][:width] - jnp.asarray(TARGET)[batch["y"]]) ** 2 + params["seen"][batch["y"]]

    predict_fn = lambda params, batch, keys: {"y": batch["y"], "sum": (batch["x"] * batch["mask"]).sum(-1)}
    ends = []
    with Trainer(
        loss, optax.sgd(RATE), batch_size=BATCH, devices=jax.devices()[:2], controller="equal",
        engine=Chunked(rungs=[4]), predict_fn=predict_fn,
    ) as trainer:  # fmt: skip
        for kind, make in BUCKETED.items():
            source = Bucketed(make(), (2, 3), mask="mask")
            state, history = trainer.fit(trainer.init(first_params()), source, epochs=1)
            found = trainer.predict(state, source)
            assert found["y"].tolist() == Y.tolist(), kind
            expected = [sum(sample["x"]) for sample in sequences()]
            np.testing.assert_allclose(found["sum"], expected, rtol=1e-5, atol=1e-6)
            ends.append(history.losses)
    assert ends[0] == ends[1] == ends[2]


def test_a_shuffled_dataset_of_grain_is_another_order_of_the_same_samples(trainer):
    source = grain_map(lambda dataset: dataset.shuffle(seed=3))
    state, history = trainer.fit(trainer.init(first_params()), source, epochs=1)
    assert times_seen(state) == [1.0] * SAMPLES
    assert history.losses != trainer.fit(trainer.init(first_params()), samples(), epochs=1)[1].losses


def test_a_filtered_dataset_of_grain_is_refused_with_a_reason(trainer):
    source = grain_map(lambda dataset: dataset.filter(lambda sample: sample["y"] != 0))
    with pytest.raises(TypeError, match=r"Sample 0 is None, not numbers\. A source needs a value for every index"):
        trainer.fit(trainer.init(first_params()), source, epochs=1)


def grain_loader():
    grain = pytest.importorskip("grain")
    return grain.DataLoader(
        data_source=samples(),
        sampler=grain.samplers.SequentialSampler(SAMPLES),
        operations=[grain.transforms.Batch(BATCH)],
        worker_count=0,
    )


STREAMS = {
    "generator": lambda: ({"x": X[index].astype(np.float64), "y": Y[index]} for index in in_order()),
    "named tuples": lambda: (Pair(X[index], Y[index]) for index in in_order()),
    "lists of numbers": lambda: ({"x": X[index].tolist(), "y": Y[index].tolist()} for index in in_order()),
    "PyTorch": TorchLoader,
    "Grain batched": lambda: iter(grain_map(lambda dataset: dataset.batch(BATCH))),
    "Grain stream": lambda: grain_map(lambda dataset: dataset.to_iter_dataset().batch(BATCH)),
    "Grain DataLoader": grain_loader,
    "Hugging Face batches": lambda: hugging_face().iter(BATCH),
    "Hugging Face stream": lambda: hugging_face().to_iterable_dataset().batch(BATCH),
}


@pytest.mark.parametrize("kind", STREAMS)
@pytest.mark.parametrize("steps", [None, 3, 9])
def test_a_stream_trains_on_every_batch_once_and_its_end_is_the_end_of_the_run(trainer, kind, steps):
    state, history = trainer.fit(trainer.init(first_params()), STREAMS[kind](), steps=steps)
    made = min(steps or 5, 5)
    np.testing.assert_allclose(history.losses, plain_losses(in_order())[:made], rtol=1e-5)
    assert (state.step, state.cursor) == (made, made * BATCH)
    assert times_seen(state) == [1.0] * made * BATCH + [0.0] * (SAMPLES - made * BATCH)


@pytest.mark.parametrize("speeds", [None, [1, 0.5]])
def test_no_batch_of_a_stream_is_lost_between_two_calls_of_fit(speeds):
    speeds = speeds and Simulation(constant(speeds))  # the time of a row is measured first
    batches = iter(STREAMS["generator"]())
    with trainer_for(speeds=speeds, controller="balanced") as trainer:
        state, first = trainer.fit(trainer.init(first_params()), batches, steps=2)
        state, second = trainer.fit(state, batches, steps=1)
        state, third = trainer.fit(state, batches)
        assert times_seen(state) == [1.0] * SAMPLES
        np.testing.assert_allclose(
            first.losses + second.losses + third.losses, plain_losses(in_order()), rtol=1e-5
        )  # fmt: skip
        with pytest.raises(ValueError, match="The stream of batches is empty"):
            trainer.fit(state, batches, steps=1)


class Repeated:
    """An endless source."""

    def __len__(self):
        return sys.maxsize

    def __getitem__(self, index):
        return X[index % SAMPLES], Y[index % SAMPLES]


ENDLESS = {
    "source": Repeated,
    "Grain": lambda: grain_map(lambda dataset: dataset.repeat()),
    "Grain mapped": lambda: grain_map(lambda dataset: dataset.repeat().map(lambda sample: sample)),
    "Grain stream": lambda: grain_map(lambda dataset: dataset.repeat().to_iter_dataset().batch(BATCH)),
    "iterator": lambda: itertools.cycle(STREAMS["generator"]()),
}


@pytest.mark.parametrize("kind", ENDLESS)
def test_an_endless_source_is_read_in_its_order_for_a_number_of_steps(trainer, kind):
    state, history = trainer.fit(trainer.init(first_params()), ENDLESS[kind](), steps=12)
    np.testing.assert_allclose(history.losses, plain_losses(in_order(3))[:12], rtol=1e-5)
    assert times_seen(state) == [3.0] * 2 * BATCH + [2.0] * (SAMPLES - 2 * BATCH)
    assert state.cursor == 12 * BATCH
    with pytest.raises(ValueError, match="give the number of steps"):
        trainer.fit(state, ENDLESS[kind](), epochs=1)


def test_an_endless_source_is_resumed_where_it_stopped(trainer):
    state, first = trainer.fit(trainer.init(first_params()), Repeated(), steps=7)
    state, second = trainer.fit(state, Repeated(), stop_at=10 * BATCH)
    np.testing.assert_allclose(first.losses + second.losses, plain_losses(in_order(2)), rtol=1e-5)
    assert times_seen(state) == [2.0] * SAMPLES


def test_a_shuffled_and_repeated_dataset_of_grain_shows_every_sample_once_per_epoch(trainer):
    source = grain_map(lambda dataset: dataset.shuffle(seed=0).repeat())
    state, _ = trainer.fit(trainer.init(first_params()), source, steps=3 * SAMPLES // BATCH)
    assert times_seen(state) == [3.0] * SAMPLES


def test_what_needs_epochs_refuses_an_endless_source(trainer):
    state = trainer.init(first_params())
    with pytest.raises(ValueError, match=r"has no end .* to evaluate every sample, leave out"):
        trainer.evaluate(state, Repeated())
    for options, words in (
        ({"partition": "proportional", "controller": "dbs"}, "chooses samples by itself: give a source that ends"),
        (
            {"strategy": "hogbatch", "controller": None, "engine": None},
            "chooses samples by itself: give a source that ends",
        ),
        ({"controller": "dbs"}, "acts once per epoch"),
    ):
        with trainer_for(**options) as other, pytest.raises(ValueError, match=words):
            other.fit(other.init(first_params()), Repeated(), steps=1)


def test_a_pair_of_like_arrays_is_one_source():
    """Regression from one number to one number: x and y have the same shape and dtype."""
    x = np.linspace(0, 1, 24, dtype=np.float32)[:, None]
    loss = lambda params, batch, keys: ((batch[0] * params["w"] - batch[1]) ** 2).sum(-1)
    with Trainer(loss, optax.sgd(0.5), batch_size=8, devices=jax.devices()[:2]) as trainer:
        state, _ = trainer.fit(trainer.init({"w": jnp.zeros(1)}), (x, 3 * x), epochs=40)
    assert float(state.params["w"][0]) == pytest.approx(3, abs=0.01)
    with Trainer(loss, optax.sgd(0.5), batch_size=8, devices=jax.devices()[:2]) as trainer:
        words = "the source has 2 samples, .* Give at most 2 or a tuple of arrays instead of a list of samples"
        with pytest.raises(ValueError, match=words):
            trainer.fit(trainer.init({"w": jnp.zeros(1)}), [x, 3 * x], epochs=1)
