"""The trainer: the same run on any hardware, every sample once per epoch, and clear errors."""

import json
from dataclasses import replace

import jax
import numpy as np
import optax
import pytest
from modeled_times import modeled_times
from problems import RandomPlans, distance, keys_for, problem

from hetjax import Chunked, Looped, Masked, NonFiniteError, Simulation, Trainer
from hetjax.devices import memory
from hetjax.devices.compile import compiles
from hetjax.planning.controllers.base import Plan
from hetjax.sampling.order import Sampler
from hetjax.simulation.speeds import constant

BATCH = 24


def trainer_for(made, **options):
    """A trainer for two workers, with one size of microbatches where it does not matter: it compiles faster."""
    whole = Chunked(rungs=[BATCH])
    options = {"batch_size": BATCH, "controller": "equal", "devices": jax.devices()[:2], "engine": whole, **options}
    if options["engine"] == "chunked":
        options["engine"] = Chunked(rungs=[4, BATCH])
    return Trainer(made.loss_fn, options.pop("optimizer", optax.sgd(0.1)), **options)


def test_one_worker_and_four_balanced_unequal_ones_are_the_same_run(monkeypatch):
    made = problem("linear", samples=200)
    runs = []
    for workers, controller in [(1, "equal"), (4, "balanced")]:
        speeds = modeled_times(monkeypatch, [1, 1, 0.5, 0.25]) if workers == 4 else None
        with trainer_for(
            made,
            batch_size=64,
            controller=controller,
            devices=jax.devices()[:workers],
            speeds=speeds,
            engine=Chunked(rungs=[4, 16, 64]),
        ) as trainer:
            _, history = trainer.fit(trainer.init(made.params), made.data, steps=25)
            runs.append(history)
    np.testing.assert_allclose(runs[0].losses, runs[1].losses, rtol=1e-4)
    counts = [counts_W for counts_W in runs[1].counts if counts_W.sum() == 64][-1]  # not of a short last step
    assert counts[0] > counts[2] > counts[3]
    assert runs[1].summary()["plan_changes"] >= 1
    assert runs[1].recompiles_after_warmup == 0


@pytest.mark.parametrize("engine", ["chunked", "looped", "masked"])
def test_a_hundred_random_plans_compile_nothing(engine):
    made = problem("linear", samples=500)
    with trainer_for(
        made, engine=engine, controller=RandomPlans(0), devices=jax.devices()[:4], capacity=BATCH
    ) as trainer:
        state, _ = trainer.fit(trainer.init(made.params), made.data, steps=2)
        _, history = trainer.fit(state, made.data, steps=100)
    assert len({tuple(c) for c in history.counts}) > 50
    assert history.recompiles_after_warmup == 0


def test_compiles_are_counted():
    before = compiles()
    jax.jit(lambda x: x * 3 + 7)(np.ones(13))
    assert compiles() > before


class Remembering:
    """A source that records which samples were fetched."""

    def __init__(self, data):
        self.data, self.fetched = data, []

    def __len__(self):
        return len(self.data["label"])

    def __getitem__(self, index):
        self.fetched.append(index)
        return {name: values[index] for name, values in self.data.items()}


def test_evaluation_is_exact_over_every_sample_and_any_split():
    made = problem("linear", samples=61)
    means, fetched = [], []
    for workers in (1, 3):
        source = Remembering(made.data)
        options = {"devices": jax.devices()[:workers], "controller": RandomPlans(1), "engine": "chunked"}
        with trainer_for(made, **options) as trainer:
            trainer.fit(trainer.init(made.params), made.data, steps=2)
            means.append(trainer.evaluate(trainer.init(made.params), source))
        fetched.append(source.fetched)
    assert means[1]["loss"] == pytest.approx(means[0]["loss"], rel=1e-5)
    assert means[1]["accuracy"] * 61 == pytest.approx(round(means[0]["accuracy"] * 61), abs=1e-3)
    for seen in fetched:  # the first sample is read once more, for its shape
        assert np.bincount(seen).tolist() == [2] + [1] * 60


def test_resuming_on_other_workers_is_the_same_run():
    made = problem("linear", samples=100)
    optimizer = optax.sgd(0.1, momentum=0.9)
    with trainer_for(made, optimizer=optimizer, devices=jax.devices()[:1], engine="chunked") as trainer:
        whole, history = trainer.fit(trainer.init(made.params), made.data, steps=12)
    with trainer_for(made, optimizer=optimizer, devices=jax.devices()[:3], controller=RandomPlans(5)) as trainer:
        half, first = trainer.fit(trainer.init(made.params), made.data, steps=7)
    half = jax.tree.map(np.asarray, half)  # through the host, as a checkpoint would
    with trainer_for(made, optimizer=optimizer, devices=jax.devices()[3:8], controller=RandomPlans(6)) as trainer:
        rest, second = trainer.fit(half, made.data, stop_at=whole.cursor)
    np.testing.assert_allclose(first.losses + second.losses, history.losses, rtol=1e-5)
    assert (rest.step, rest.cursor) == (whole.step, whole.cursor)
    assert distance(rest.params, whole.params) <= 1e-5


def test_epochs_cover_every_sample_exactly_once():
    made = problem("linear", samples=50)
    source = Remembering(made.data)
    with trainer_for(made, batch_size=16, controller=RandomPlans(0), devices=jax.devices()[:3]) as trainer:
        state, history = trainer.fit(trainer.init(made.params), source, epochs=2)
    assert np.bincount(source.fetched).tolist() == [3] + [2] * 49  # the first sample once more, for its shape
    assert [int(record.counts_W.sum()) for record in history.records] == [16, 16, 16, 2] * 2
    assert state.cursor == 100
    assert [record.epoch for record in history.records] == [0] * 4 + [1] * 4


def test_with_shards_every_worker_reads_its_own_and_every_sample_is_read_once():
    made = problem("linear", samples=101)
    source = Remembering(made.data)
    with trainer_for(made, partition="proportional", controller="dbs", devices=jax.devices()[:3]) as trainer:
        state, history = trainer.fit(trainer.init(made.params), source, epochs=2)
    assert np.bincount(source.fetched, minlength=101).tolist() == [3] + [2] * 100  # the first once more, for its shape
    assert state.cursor == 202
    assert len(history.records) == 2 * -(-101 // BATCH)
    for epoch in (0, 1):  # counts of a worker differ by one at most within an epoch
        counts = np.array([record.counts_W for record in history.records if record.epoch == epoch])
        assert (np.ptp(counts, axis=0) <= 1).all()


def test_the_state_passed_to_fit_stays_valid():
    made = problem("linear")
    with trainer_for(made) as trainer:
        start = trainer.init(made.params)
        first = trainer.fit(start, made.data, steps=3)[1].losses
        second = trainer.fit(start, made.data, steps=3)[1].losses
    assert first == second


def test_hooks_see_each_step_with_the_state_after_it():
    made = problem("linear")
    seen, size = [], lambda state: float(np.abs(jax.tree.leaves(state.params)[0]).sum())

    def hook(record, state):
        seen.append((record.step, state.step, state.cursor, size(state)))
        json.dumps(record.row())

    with trainer_for(made) as trainer:
        state, history = trainer.fit(trainer.init(made.params), made.data, steps=4, hooks=[hook])
    assert [s[:3] for s in seen] == [(1, 1, 24), (2, 2, 48), (3, 3, 64), (4, 4, 88)]
    assert len({s[3] for s in seen}) == 4
    assert seen[-1][3] == size(state)
    assert len(history.records) == 4
    json.dumps(history.summary())


def test_stop_ends_the_run_after_a_whole_step():
    made = problem("linear")
    with trainer_for(made) as trainer:
        hook = lambda record, state: trainer.stop() if record.step == 3 else None
        state, history = trainer.fit(trainer.init(made.params), made.data, steps=50, hooks=[hook])
    assert 3 <= len(history.records) <= 6
    assert state.step == len(history.records)


def test_a_stop_request_does_not_cut_an_evaluation_short():
    made = problem("linear", samples=300)

    class Stopping(Remembering):
        def __getitem__(self, index):
            trainer.stop()
            return super().__getitem__(index)

    with trainer_for(made) as trainer:
        state = trainer.init(made.params)
        assert trainer.evaluate(state, Stopping(made.data)) == trainer.evaluate(state, made.data)


def test_requests_outlast_an_evaluation_between_two_steps():
    made, saved = problem("linear"), []

    def hook(record, state):
        saved.append(record.save)
        if record.step == 3:
            trainer.ask_to_save()
            trainer.stop()
            trainer.evaluate(state, made.data)

    with trainer_for(made) as trainer:
        _, history = trainer.fit(trainer.init(made.params), made.data, steps=50, hooks=[hook])
    assert 3 <= len(history.records) <= 6
    assert saved.count(True) == 1


@pytest.mark.parametrize("transport", ["mesh", pytest.param("host", marks=pytest.mark.slow)])
def test_a_nan_is_reported_and_leaves_the_parameters_alone(transport):
    made = problem("linear", samples=48)
    order = Sampler(48, BATCH, 0).indices(0, 0, 48)
    made.data["image"][order[30]] = np.nan  # position 30 lies in step 2, in the slice of worker 0 of 2
    with (
        trainer_for(made, transport=transport) as trainer,
        pytest.raises(NonFiniteError, match="Step 2: the loss or gradient of worker 0"),
    ):
        trainer.fit(trainer.init(made.params), made.data, steps=2)
    with trainer_for(made, transport=transport, on_nonfinite="skip") as trainer:
        one, _ = trainer.fit(trainer.init(made.params), made.data, steps=1)
        two, history = trainer.fit(trainer.init(made.params), made.data, steps=2)
    assert history.records[1].nonfinite == (0,)
    assert distance(two.params, one.params) == 0


def test_the_moving_average_of_parameters():
    made = problem("linear")
    seen = []
    with trainer_for(made, ema_decay=0.8) as trainer:
        hook = lambda record, state: seen.append(jax.tree.map(np.array, state.params))
        state, _ = trainer.fit(trainer.init(made.params), made.data, steps=3, hooks=[hook])
    expected = jax.tree.map(np.asarray, made.params)
    for params in seen:
        expected = jax.tree.map(lambda e, p: 0.8 * e + 0.2 * p, expected, params)
    assert distance(state.ema, expected) <= 1e-6


def test_the_plan_of_a_step_uses_the_timings_up_to_two_steps_before():
    calls = []

    class Watcher(RandomPlans):
        def plan(self, batch, limits, epoch=0):
            calls.append("plan")
            return super().plan(batch, limits, epoch)

        def observe(self, seen):
            calls.append(seen.step)

    made = problem("linear")
    with trainer_for(made, controller=Watcher(0)) as trainer:
        trainer.fit(trainer.init(made.params), made.data, steps=5)
    assert calls == ["plan", "plan", 0, "plan", 1, "plan", 2, "plan", 3, 4]


def test_the_next_step_is_planned_and_packed_while_this_one_computes():
    made, calls = problem("linear"), []

    def recorded(name, call):
        return lambda *args, **kwargs: (calls.append(name), call(*args, **kwargs))[1]

    with trainer_for(made) as trainer:
        state, _ = trainer.fit(trainer.init(made.params), made.data, steps=1)
        engine = trainer.step.engine
        engine.start = recorded("start", engine.start)
        engine.pack = recorded("pack", engine.pack)
        engine.clocks.wait = recorded("wait", engine.clocks.wait)
        trainer.controller.plan = recorded("plan", trainer.controller.plan)
        trainer.fit(state, made.data, steps=3)
    assert calls == ["plan", "pack", *2 * ["start", "plan", "pack", "wait"], "start", "wait"]


def test_the_first_step_and_steps_during_a_compile_are_not_timed():
    made = problem("linear")

    def hook(record, state):
        trainer.step.engine.compiling = record.step == 3

    with trainer_for(made) as trainer:
        _, history = trainer.fit(trainer.init(made.params), made.data, steps=8, hooks=[hook])
    timed = [np.isfinite(record.times_W).all() for record in history.records]
    assert not timed[0]
    assert not all(timed[3:6])
    assert all(timed[1:3])
    assert all(timed[6:])


def test_an_evaluation_is_split_like_the_training_steps():
    class Uneven(RandomPlans):
        def plan(self, batch, limits, epoch=0):
            return Plan(np.array([batch - batch // 4, batch // 4]))

    made, counts = problem("linear", samples=244), []
    options = {"controller": Uneven(0), "engine": Looped(max_rows=1), "capacity": 24}  # no padding
    with trainer_for(made, **options) as trainer:
        state, _ = trainer.fit(trainer.init(made.params), made.data, epochs=1)  # the last step is a short one
        engine = trainer.step.sessions.for_evaluation(state, [{k: v[:1] for k, v in made.data.items()}])[0].engine
        pack, engine.pack = engine.pack, lambda *given: (counts.append(given[2].tolist()), pack(*given))[1]
        trainer.evaluate(state, made.data)
    assert counts == [*[[18, 6]] * 10, [3, 1]]


@pytest.mark.slow
def test_padding_is_charged_and_masked_shows_no_gain():
    """Simulated time is charged for computed rows: a buffer that is always computed whole cannot be balanced."""
    made = problem("linear", samples=400)
    last = {}
    for engine in ("chunked", "masked"):
        simulation = Simulation(constant([1, 0.25]), row_time=1e-3)
        options = {"engine": engine, "batch_size": 64, "controller": "balanced", "capacity": 64}
        with trainer_for(made, speeds=simulation, **options) as trainer:
            _, history = trainer.fit(trainer.init(made.params), made.data, steps=20)
        last[engine] = history.records[-3]
        modeled = last[engine].rows_W * simulation.row_time / np.array([1, 0.25])
        assert (last[engine].times_W >= 0.999 * modeled).all()
    assert last["chunked"].rows_W[0] > 2 * last["chunked"].rows_W[1]
    assert last["masked"].rows_W.tolist() == [64, 64]
    assert last["masked"].counts_W.min() >= 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"batch_size": 0}, "batch_size is 0: expected a whole number of at least 1"),
        ({"batch_size": True}, "batch_size is True"),
        ({"batch_size": 1.5}, "batch_size is 1.5"),
        ({"batch_size": 10**11}, "batch_size is 100000000000"),
        ({"batch_size": 65}, "batch_size is 65, but the source has 64 samples"),
        ({"seed": 1.5}, "seed is 1.5"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": 10**22}, "seed is 10000000000000000000000"),
        ({"quantum": 1.5}, "quantum is 1.5"),
        ({"quantum": True}, "quantum is True"),
        ({"capacity": True}, "capacity is True"),
        ({"capacity": [24, True]}, "capacity is True"),
        ({"capacity": 10**12}, "capacity is 1000000000000"),
        ({"engine": Chunked(max_rows=0)}, "max_rows is 0"),
        ({"engine": Looped(max_rows=1.5)}, "max_rows is 1.5"),
        ({"rungs": [4]}, r"no option 'rungs'. Give it to the engine: engine=hetjax.Chunked\(rungs="),
        ({"learning_rate": 1}, "Trainer has no option 'learning_rate'. Options of a step are"),
        ({"devices": ["cpu"]}, "devices holds 'cpu': expected JAX's devices"),
        ({"devices": "cpu+"}, r"devices is 'cpu\+', in which a kind is missing"),
        ({"devices": 0}, "The number of devices is 0"),
        ({"devices": 9}, "9 devices were requested, but there are 8"),
        ({"devices": 2.5}, "devices is 2.5: expected a list of JAX's devices"),
        ({"partition": ["global"]}, r"There is no partition \['global'\]"),
        ({"sync": 5}, "sync is 5"),
        ({"engine": []}, r"Unknown engine \[\]"),
        ({"wait_limit": float("nan")}, "wait_limit is nan"),
        ({"ema_decay": "x"}, "ema_decay is 'x'"),
        ({"eval_fn": 5}, "eval_fn is 5: expected a function"),
        ({"advance": 5}, "advance is 5: expected a function"),
        ({"speeds": ["fast", "slow"]}, "Simulated speeds are one number per worker"),
        ({"engine": "fast"}, "Unknown engine 'fast'"),
        ({"transport": "pigeon"}, "Unknown transport 'pigeon'"),
        ({"partition": "random"}, "There is no partition 'random'"),
        ({"partition": "submodular", "controller": "static"}, "needs its blocks"),
        ({"controller": "balanced", "partition": "proportional"}, "once per epoch"),
        ({"strategy": "best"}, "There is no strategy 'best'"),
        ({"controller": "best"}, "controller 'best'"),
        ({"speeds": [1, 1, 1]}, "Speeds were given for 3 workers, but there are 2"),
        ({"speeds": [1, 0]}, "must be positive"),
        ({"capacity": 5}, "can take 10 samples a step in all"),
        ({"capacity": [20, 20, 20]}, "capacity lists 3 numbers for 2 workers"),
        ({"capacity": [30, 3], "engine": "masked"}, "one buffer size for all workers"),
        ({"devices": []}, "No devices"),
        ({"on_nonfinite": "pray"}, "on_nonfinite must be"),
        ({"ema_decay": 1.5}, "ema_decay must be"),
    ],
)
def test_bad_options_are_refused(options, words):
    made = problem("linear")
    with pytest.raises((ValueError, TypeError), match=words), trainer_for(made, **options) as trainer:
        trainer.fit(trainer.init(made.params), made.data, steps=1)


def test_parameters_and_batches_that_do_not_fit_into_memory_are_refused(monkeypatch):
    made = problem("linear")
    with trainer_for(made) as trainer:
        state = trainer.init(made.params)
        monkeypatch.setattr(memory, "host", lambda: 1000)
        with pytest.raises(ValueError, match="The parameters take"):
            trainer.init(made.params)
        with pytest.raises(ValueError, match="The 24 samples of a step take"):
            trainer.fit(state, made.data, steps=1)


def test_numpy_integers_are_accepted():
    made = problem("linear")
    with trainer_for(made, batch_size=np.int32(BATCH), seed=np.uint32(3), capacity=np.array([24, 24])) as trainer:
        state, history = trainer.fit(trainer.init(made.params), made.data, steps=np.int64(2))
        assert len(history.records) == 2
        assert type(history.last_step) is type(trainer.seed) is int  # JSON knows no NumPy integers
        state, _ = trainer.fit(state, made.data, stop_at=np.int64(64))
    assert state.cursor == 64


def test_a_failed_fit_leaves_the_trainer_usable():
    made = problem("linear")
    with trainer_for(made) as trainer:
        state, _ = trainer.fit(trainer.init(made.params), made.data, steps=1)
        with pytest.raises(TypeError):
            trainer.fit(state, {**made.data, "image": made.data["image"][:, :5]}, steps=1)  # a wrong shape
        state, _ = trainer.fit(state, made.data, steps=1)
    assert state.step == 2


def test_no_engine_computes_more_than_max_rows_at_once():
    made = problem("linear")
    with trainer_for(made, engine=Looped(max_rows=3)) as trainer:
        state, _ = trainer.fit(trainer.init(made.params), made.data, steps=1)
        assert trainer.step.engine.micro == 3
    words = "the smallest capacity or max_rows: 8 x 2 workers is less than"
    with trainer_for(made, engine=Masked(max_rows=[12, 8])) as trainer, pytest.raises(ValueError, match=words):
        trainer.fit(state, made.data, steps=1)


def test_bad_arguments_are_refused():
    made = problem("mlp")
    with trainer_for(made) as trainer:
        state = trainer.init(made.params)
        with pytest.raises(ValueError, match="exactly one of epochs, steps or stop_at"):
            trainer.fit(state, made.data)
        with pytest.raises(ValueError, match="exactly one of epochs, steps or stop_at; got epochs, steps"):
            trainer.fit(state, made.data, steps=1, epochs=1)
        for name in ("epochs", "steps", "stop_at"):
            for value in (0, -1, 1.5, True, "3", float("nan")):
                with pytest.raises((ValueError, TypeError), match=f"{name} is {value!r}: expected a whole number"):
                    trainer.fit(state, made.data, **{name: value})
        for wrong, words in (
            (made.params, r"state is a flax\.nnx.*: expected what `init` or an earlier `fit` returned"),
            (replace(state, cursor=-5), "state.cursor is -5"),
            (replace(state, step=1.5), "state.step is 1.5"),
        ):
            with pytest.raises((ValueError, TypeError), match=words):
                trainer.fit(wrong, made.data, steps=1)
        with pytest.raises(TypeError, match="state is a flax"):
            trainer.evaluate(made.params, made.data)
        for hooks, words in ((5, "hooks is 5"), ([5], "hooks holds 5"), (print, "hooks is <built-in")):
            with pytest.raises(TypeError, match=f"{words}.*functions of .record, state."):
                trainer.fit(state, made.data, steps=1, hooks=hooks)
        for strange in ("U1", "O", "M8[s]"):
            with pytest.raises(TypeError, match=r"The array 'label' is .*, not numbers"):
                trainer.fit(state, {**made.data, "label": made.data["label"].astype(strange)}, steps=1)
        with pytest.raises(TypeError, match="needs __len__ and __getitem__"):
            trainer.fit(state, 5, steps=1)
        for params, words in ((5, "params is 5"), ({"w": "x"}, r"params\['w'\] is 'x'"), ([print], r"params\[0\] is")):
            with pytest.raises(TypeError, match=f"{words}.*: expected an array"):
                trainer.init(params)
        with pytest.raises(ValueError, match="same number of rows"):
            trainer.fit(state, {"image": np.zeros(3), "label": np.zeros(4)}, steps=1)
        with pytest.raises(ValueError, match="holds no arrays"):
            trainer.init({})
    averaged = Trainer(lambda p, b, k: made.loss_fn(p, b, k).loss_b.mean(), optax.sgd(0.1), batch_size=BATCH)
    with averaged, pytest.raises(ValueError, match="one value per example"):
        averaged.fit(averaged.init(made.params), made.data, steps=1)


@pytest.mark.parametrize("transport", ["mesh", pytest.param("host", marks=pytest.mark.slow)])
def test_weights_of_a_plan_scale_the_gradient_sum_of_each_worker(transport):
    """The published dp averages the workers' means: weights B / (N b_i), biased towards the small worker."""
    made = problem("linear", samples=BATCH)
    counts = np.array([6, 18])

    class MeanOfMeans(RandomPlans):
        def plan(self, batch, limits, epoch=0):
            return Plan(counts, mean_weights_W=np.full(2, 0.5))

    with trainer_for(made, controller=MeanOfMeans(0), transport=transport, optimizer=optax.sgd(1.0)) as trainer:
        state, _ = trainer.fit(trainer.init(made.params), made.data, steps=1)
    order = Sampler(BATCH, BATCH, 0).indices(0, 0, BATCH)
    keys = keys_for(0, 0, 0, BATCH)

    def mean(params, rows):
        batch = {name: values[order[rows]] for name, values in made.data.items()}
        return made.loss_fn(params, batch, keys[rows]).loss_b.mean()

    parts = [jax.jit(jax.grad(lambda p, rows=rows: mean(p, rows)))(made.params) for rows in (slice(6), slice(6, 24))]
    expected = jax.tree.map(lambda p, a, b: p - (a + b) / 2, made.params, *parts)
    moved = lambda params: jax.tree.map(np.subtract, params, made.params)
    assert distance(moved(state.params), moved(expected)) <= 1e-5


@pytest.mark.parametrize("counts", [[0, 0], [12, 13], [-1, 25], [24], [12.0, 12.0], [4, 20]])
def test_impossible_counts_of_a_controller_are_refused_before_anything_runs(counts):
    made = problem("linear")

    class Wrong(RandomPlans):
        name = "wrong"

        def plan(self, batch, limits, epoch=0):
            return Plan(np.array(counts))

    with (
        trainer_for(made, controller=Wrong(0), capacity=[24, 16]) as trainer,
        pytest.raises(ValueError, match="The controller 'wrong' returned counts"),
    ):
        trainer.fit(trainer.init(made.params), made.data, steps=1)
