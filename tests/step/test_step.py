"""A step in a user's own loop: the same training as the trainer's, for any batches, and errors for mistakes."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fake_link import act_as
from modeled_times import modeled_times
from problems import RandomPlans, distance, problem

from hetjax import Chunked, LiveState, NonFiniteError, State, Step, Trainer
from hetjax.data import batches as host_batches
from hetjax.pipeline import Requests
from hetjax.sampling.order import Sampler

BATCH = 24


def step_for(made, **options):
    options = {
        "batch_size": BATCH,
        "controller": "equal",
        "devices": jax.devices()[:2],
        "engine": Chunked(rungs=[24]),  # one rung: with more, measured prices decide the chunks, and they the last bit
        **options,
    }
    return Step(made.loss_fn, options.pop("optimizer", optax.sgd(0.1)), **options)


def epochs_of(made, epochs, batch=BATCH):
    """Batches in the order of a trainer with seed 0, as a generator like a user's loader."""
    order = Sampler(len(made.data["label"]), batch, 0)
    cursor = 0
    while cursor < epochs * order.size:
        span = order.step(cursor)
        index = order.indices(span.epoch, span.start, span.stop)
        yield {name: values[index] for name, values in made.data.items()}
        cursor += span.batch


def run(step, state, loader):
    records = []
    for batch in loader:
        state, record = step(state, batch)
        records.append(record)
    return state, [*records, step.flush()]


@pytest.mark.parametrize("controller", ["equal", "random"])
def test_a_loop_and_the_trainer_are_the_same_run_to_the_bit(controller):
    made = problem("linear", samples=100)
    make = lambda: RandomPlans(4) if controller == "random" else controller
    options = {"ema_decay": 0.9, "optimizer": optax.adam(1e-2)}
    with step_for(made, controller=make(), epoch_size=100, **options) as step:
        state, records = run(step, step.init(made.params), epochs_of(made, 2))
        in_order = [{name: x[i : i + BATCH] for name, x in made.data.items()} for i in range(0, 100, BATCH)]
        mine, whole = step.export(state), step.evaluate(state, in_order)
    with Trainer(
        made.loss_fn, optax.adam(1e-2), batch_size=BATCH, controller=make(), devices=jax.devices()[:2],
        engine=Chunked(rungs=[24]), ema_decay=0.9,
    ) as trainer:  # fmt: skip
        theirs, history = trainer.fit(trainer.init(made.params), made.data, epochs=2)
        tested = trainer.evaluate(theirs, made.data)
    assert records[0] is None
    assert [record.loss for record in records[1:]] == history.losses
    assert [record.step for record in records[1:]] == [record.step for record in history.records]
    assert (mine.step, mine.cursor) == (theirs.step, theirs.cursor)
    chex.assert_trees_all_equal(mine.core, theirs.core)
    assert whole["loss"] == pytest.approx(tested["loss"], rel=1e-5)


def test_counts_follow_the_speeds_and_the_training_stays_that_of_one_device(monkeypatch):
    made = problem("linear", samples=100)
    losses = []
    for devices, controller in [(1, "equal"), (2, "balanced")]:
        speeds = modeled_times(monkeypatch, [1, 0.25]) if devices == 2 else None
        with step_for(made, controller=controller, devices=jax.devices()[:devices], speeds=speeds) as step:
            _, records = run(step, step.init(made.params), epochs_of(made, 4))
        losses.append([record.loss for record in records[1:]])
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-4)
    full = [record.counts_W for record in records[3:] if record.counts_W.sum() == BATCH]
    assert np.median([counts[0] for counts in full]) > 2 * np.median([counts[1] for counts in full])
    assert sum(record.changed for record in records[1:]) >= 1
    assert any(record.reason for record in records[1:])


@pytest.mark.parametrize("kind", ["tuple", "nested", "jax", "array"])
def test_batches_may_be_any_tree_of_arrays(kind):
    x = np.random.default_rng(0).normal(size=(48, 4)).astype(np.float32)
    shape = {
        "tuple": (lambda rows: (rows, rows.sum(1)), lambda batch: (batch[0], batch[1])),
        "nested": (lambda rows: {"in": [rows], "out": {"y": rows.sum(1)}}, lambda b: (b["in"][0], b["out"]["y"])),
        "jax": (lambda rows: (jnp.asarray(rows), jnp.asarray(rows.sum(1))), lambda batch: batch),
        "array": (lambda rows: rows, lambda rows: (rows, rows.sum(1))),
    }
    pack, unpack = shape[kind]

    def loss_fn(params, batch, keys):
        rows, y = unpack(batch)
        return (rows @ params["w"] - y) ** 2

    with Step(loss_fn, optax.sgd(0.1), batch_size=24, devices=jax.devices()[:2], engine=Chunked(rungs=[24])) as step:
        state = step.init({"w": jnp.zeros(4)})
        for start in (0, 24):
            state, _ = step(state, pack(x[start : start + 24]))
        w = jnp.zeros(4)
        for start in (0, 24):
            rows = x[start : start + 24]
            w = w - 0.1 * jax.grad(lambda w, rows=rows: jnp.mean((rows @ w - rows.sum(1)) ** 2))(w)
        np.testing.assert_allclose(state.params["w"], w, rtol=1e-5)


def test_a_state_can_be_read_at_any_time_and_used_once():
    made = problem("linear")
    batch = next(epochs_of(made, 1))
    with step_for(made) as step:
        start = step.init(made.params)
        first, _ = step(start, batch)
        seen = jax.tree.map(np.array, first.params)  # while the step may still run
        second, record = step(first, batch)
        assert isinstance(second, LiveState)
        assert record.step == 1
        assert distance(first.params, seen) == 0  # its buffers are still there while the second step runs
        third, _ = step(second, batch)
        with pytest.raises(ValueError, match="state after step 1 is gone: it was given to a step"):
            _ = first.params
        with pytest.raises(ValueError, match="Use the state that the last call returned"):
            step(second, batch)
        assert isinstance(jax.tree.map(np.asarray, third), State)
        again, _ = step(start, batch)  # a plain state is copied and starts a new run
        assert distance(again.params, seen) == 0
        with pytest.raises(ValueError, match="belongs to a run that another state has replaced"):
            step(third, batch)
    with step_for(made) as other, pytest.raises(ValueError, match="or to another Step"):
        other(again, batch)


@pytest.fixture(scope="module")
def trained():
    """A problem and its parameters after two epochs."""
    made = problem("linear")
    with step_for(made) as step:
        state, _ = run(step, step.init(made.params), epochs_of(made, 2))
        return made, jax.tree.map(np.array, state.params)


@pytest.mark.parametrize("read", [False, True])
def test_reading_the_state_changes_nothing_and_the_last_one_outlives_the_step(trained, read):
    made, expected = trained
    with step_for(made) as step:
        state = step.init(made.params)
        for batch in epochs_of(made, 2):
            state, _ = step(state, batch)
            if read:
                step.flush()
                _ = state.params
    assert distance(state.params, expected) == 0


class Lazy:
    """A batch that records which of its rows were read."""

    def __init__(self, tree):
        self.tree, self.reads = tree, []

    def __len__(self):
        return len(self.tree["label"])

    def rows(self, start, stop):
        self.reads.append((start, stop))
        return {name: values[start:stop] for name, values in self.tree.items()}


def test_a_batch_may_fetch_its_rows_on_demand(trained):
    made, expected = trained
    batches = [Lazy(batch) for batch in epochs_of(made, 2)]
    with step_for(made) as step:
        state, _ = run(step, step.init(made.params), batches)
        assert distance(state.params, expected) == 0
    assert batches[0].reads == [(0, 1), (0, BATCH)]  # the first read is for the shapes
    assert batches[1].reads == [(0, BATCH)]


def test_a_nan_stops_a_loop_and_leaves_a_state_to_continue_from():
    made = problem("linear", samples=96)
    good, bad = list(epochs_of(made, 1))[:2]
    bad["image"][3] = np.nan
    with step_for(made) as step:
        state, _ = step(step.init(made.params), good)
        before = jax.tree.map(np.array, state.params)
        state, _ = step(state, bad)
        with pytest.raises(NonFiniteError, match="Step 2"):
            step(state, good)
        assert distance(state.params, before) == 0
        state, _ = step(state, good)
        assert distance(state.params, before) > 0
    with step_for(made, on_nonfinite="skip") as step:
        state, records = run(step, step.init(made.params), [good, bad, good])
        assert [record.nonfinite for record in records[1:]] == [(), (0,), ()]


@pytest.fixture(scope="module")
def ongoing():
    """A run of one step, its states, and a batch to continue with."""
    made = problem("linear")
    good = next(epochs_of(made, 1))
    with step_for(made) as step:
        yield step, [step(step.init(made.params), good)[0]], good


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ({"image": np.zeros((25, 8, 8, 1)), "label": np.zeros(25)}, "has 25 samples; expected 1 to 24"),
        ({"image": np.zeros((0, 8, 8, 1)), "label": np.zeros(0)}, "has 0 samples"),
        ({"image": np.zeros((3, 8, 8, 1)), "label": np.zeros(4)}, "same number of rows, but they have"),
        ({"image": 3.0, "label": np.zeros(4)}, "first axis counts the samples; got a dict of"),
        ({}, "first axis counts the samples; got a dict"),
        ({"image": np.zeros((24, 3)), "label": np.zeros(24, np.int32)}, "Pad samples to one shape"),
        ([[1, 2], [3]], "first axis counts the samples"),
        (np.array([None, "a"], object), "arrays of numbers"),
    ],
)
def test_a_bad_batch_is_refused_and_leaves_the_state_valid(batch, words, ongoing):
    step, states, good = ongoing
    with pytest.raises(ValueError, match=words):
        step(states[-1], batch)
    state, record = step(states[-1], good)
    states.append(state)
    assert record.step == len(states) - 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"strategy": "hogbatch", "controller": None}, "Use hetjax.Trainer with it"),
        ({"sync": "adaptive-sgd", "controller": None}, "Use hetjax.Trainer with it"),
        ({"engine": "warp"}, "Unknown engine 'warp'"),
        ({"transport": "pigeon"}, "Unknown transport"),
        ({"controller": "best"}, "There is no controller 'best'"),
        ({"controller": "fixed"}, "needs shares"),
        ({"controller": "fixed:1,2,3"}, "Got 3 shares for 2 workers"),
        ({"controller": "fixed:gpu=4"}, "none fit cpu"),
        ({"controller": "fixed:1,x"}, "expected numbers such as"),
        ({"controller": "equal:3"}, "There is no controller 'equal:3'"),
    ],
)
def test_bad_options_are_refused_by_the_constructor(options, words):
    with pytest.raises(ValueError, match=words):
        step_for(problem("linear"), **options)


def test_methods_that_act_once_per_epoch_need_epoch_size():
    made = problem("mlp")
    batch = next(epochs_of(made, 1))
    with step_for(made, controller="dbs") as step, pytest.raises(ValueError, match="give Step epoch_size"):
        step(step.init(made.params), batch)
    with step_for(made, controller="equal", sync="daso") as step, pytest.raises(ValueError, match="epoch_size"):
        step(step.init(made.params), batch)
    with step_for(made, sync="daso", epoch_size=len(made.data["label"]), epochs=2) as step:
        _, records = run(step, step.init(made.params), epochs_of(made, 2))
        assert records[-1].loss < records[1].loss


@pytest.mark.parametrize(("shares", "counts"), [("3,1", [18, 6]), ("cpu=1", [12, 12]), ("1,0", [24, 0])])
def test_fixed_shares_give_fixed_counts(shares, counts):
    made = problem("linear")
    with step_for(made, controller=f"fixed:{shares}") as step:
        _, records = run(step, step.init(made.params), epochs_of(made, 1))
    assert records[1].counts_W.tolist() == counts


def test_the_trainer_takes_a_stream_of_batches():
    made = problem("linear", samples=100)
    with step_for(made) as step:
        state, records = run(step, step.init(made.params), epochs_of(made, 2))
        mine = jax.tree.map(np.asarray, state.params)
    with Trainer(made.loss_fn, optax.sgd(0.1), batch_size=BATCH, controller="equal", devices=jax.devices()[:2],
                 engine=Chunked(rungs=[24])) as trainer:  # fmt: skip
        theirs, history = trainer.fit(trainer.init(made.params), epochs_of(made, 2))
        assert history.losses == [record.loss for record in records[1:]]
        assert distance(theirs.params, mine) == 0
        _, short = trainer.fit(trainer.init(made.params), epochs_of(made, 2), steps=3)
        assert short.losses == history.losses[:3]
        for options, words in (({"epochs": 1}, "no known length"), ({"steps": 0}, "steps is 0")):
            with pytest.raises(ValueError, match=words):
                trainer.fit(theirs, epochs_of(made, 2), **options)
        with pytest.raises(ValueError, match="is empty"):
            trainer.fit(theirs, iter(()))


@pytest.mark.parametrize("lengths", [(5, 3), (3, 5), (4, 4), (1, 4), (4, 1), (0, 2), (2, 9), (6, 2, 7)])
def test_loaders_of_unequal_length_end_together(lengths, monkeypatch, caplog):
    """All processes in lockstep: how many batches each has left is known two steps later, as with real sums."""
    act_as(monkeypatch, 0, len(lengths), gathered=lambda own: [min(length, 2) for length in lengths])

    requests = [Requests() for _ in lengths]
    table = {}
    loaders = [
        host_batches.until_shortest(iter(range(length)), request, table.__getitem__, range(len(lengths)), 0)
        for length, request in zip(lengths, requests, strict=True)
    ]
    made = 0
    while True:
        got = [next(loader, None) for loader in loaders]
        if None in got:
            assert set(got) == {None}
            break
        assert set(got) == {made}
        table[made] = np.array([request.left for request in requests])
        table.pop(made - 2, None)
        made += 1
    assert made == min(lengths)
    messages = [record.getMessage() for record in caplog.records]
    assert all(f"process {np.argmin(lengths)}" in message for message in messages if max(lengths) > min(lengths))
    assert len([message for message in messages if "this one has more" in message]) == sum(
        n > min(lengths) for n in lengths
    )
