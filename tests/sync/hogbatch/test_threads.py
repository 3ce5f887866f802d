"""The Hogbatch family in real threads: nothing lost under stress, workers that fail, an end when it is asked for."""

import threading
import time

import jax
import numpy as np
import optax
import pytest
from async_problem import covered, data, first, flat, loss_fn, merged_account, shared_account, trainer_for

from hetjax import Chunked, NonFiniteError, Simulation, Trainer
from hetjax.data import MemorySource
from hetjax.sampling.ranges import Range
from hetjax.simulation.speeds import constant
from hetjax.sync import AdaptiveHogbatch, AdaptiveSgd, Hogbatch
from hetjax.sync.hogbatch import threads
from hetjax.sync.hogbatch.merged import Merged
from hetjax.sync.hogbatch.method import WorkItem
from hetjax.sync.hogbatch.rules import moved_batches
from hetjax.sync.hogbatch.threads import Pause, Threads

FAMILY = [Hogbatch, AdaptiveHogbatch, AdaptiveSgd]


class Acted(Simulation):
    """Lets `act(worker, phase)` decide what happens at the end of each phase."""

    def __init__(self, workers, act, row_time=1e-4):
        super().__init__(constant([1.0] * workers), row_time=row_time)
        self.act, self.done_W = act, [0] * workers

    def hold(self, worker, rows, began, sleep=None):
        self.done_W[worker] += 1
        self.act(worker, self.done_W[worker])
        super().hold(worker, rows, began, sleep)


def fit(kind, act, *, workers=3, epochs=4, samples=96, log=None, wait_limit=600.0, hooks=(), **options):
    sync = kind(batches=4, on_update=None if log is None else log.append, **options)
    with trainer_for(sync, workers, speeds=Acted(workers, act), wait_limit=wait_limit) as trainer:
        return trainer.fit(trainer.init(first()), data(samples), epochs=epochs, hooks=hooks)


def stress(sync, rows, log):
    """Eight threads without any pause; the parameters that they came to."""
    with trainer_for(sync, workers=8) as trainer:
        state, history = trainer.fit(trainer.init(first()), rows, epochs=2)
    assert covered(log, 960) == list(range(2 * 960))
    assert history.more["updates"] == len(log)
    assert history.recompiles_after_warmup == 0
    return flat(state.params)


@pytest.mark.parametrize("kind", [Hogbatch, AdaptiveHogbatch])
@pytest.mark.parametrize("bound", [None, 2])
def test_under_stress_every_update_is_applied_once(kind, bound, float64):
    """The account of all updates gives the model to the number."""
    rows, log = data(960), []
    found = stress(kind(batches=4, on_update=log.append, staleness_bound=bound), rows, log)
    np.testing.assert_allclose(found, shared_account(log, rows), rtol=1e-9)
    assert len(log) == log[-1].version
    assert bound is None or max(done.staleness for done in log) <= bound


def test_under_stress_every_replica_is_merged_once(float64):
    rows, log = data(960), []
    sync = AdaptiveSgd(batches=8, smallest=4, mega_batch=96, on_update=log.append)
    found = stress(sync, rows, log)
    made_MxW = [np.bincount([d.worker for d in log if d.version == m], minlength=8) for m in range(log[-1].version + 1)]

    def batches(merge):
        at_W = np.full(8, 8.0)
        for made_W in made_MxW[:merge]:
            at_W = moved_batches(at_W, made_W, sync.bounds)
        return at_W

    np.testing.assert_allclose(found, merged_account(log, rows, 8, sync.momentum, batches), rtol=1e-6)
    assert len(made_MxW) >= 10
    assert len({done.batch for done in log}) > 1  # they moved, and compiled nothing


def broken(worker, at, error):
    def act(who, phase):
        if who == worker and phase == at:
            raise error

    return act


@pytest.mark.parametrize("kind", FAMILY)
@pytest.mark.parametrize("error", [RuntimeError("device lost"), SystemExit(1)])
def test_a_worker_that_raises_is_left_out_and_its_samples_go_to_the_others(kind, error, caplog):
    log = []
    state, history = fit(kind, broken(1, 3, error), log=log)
    assert state.cursor == 4 * 96
    steps = [record.step for record in history.records]
    assert steps == sorted(set(steps))
    assert sum(done.worker == 1 for done in log) == 2
    if kind is not AdaptiveSgd:  # there, what a lost replica had learned has to be learned again
        assert covered(log, 96) == list(range(4 * 96))
    assert set(covered(log, 96)) == set(range(4 * 96))
    assert "Worker 1" in caplog.text
    assert type(error).__name__ in caplog.text
    assert "2 of 3 workers go on" in caplog.text


@pytest.mark.parametrize("dies", ["in its phase", "before the merge"])
def test_a_dead_device_is_left_alone(dies, monkeypatch, caplog):
    """Its worker is left out, be it that it says so itself or that its replica cannot be read."""
    home, dead = jax.devices()[:2]
    put, gone, log = jax.device_put, threading.Event(), []

    def act(worker, phase):
        if (worker, phase) == (1, 3):
            gone.set()
            if dies == "in its phase":
                raise RuntimeError("device lost")

    def device_put(x, device=None, **how):
        there = any(dead in leaf.devices() for leaf in jax.tree.leaves(x) if isinstance(leaf, jax.Array))
        if gone.is_set() and ((there and device == home) or (device == dead and dies == "in its phase")):
            raise RuntimeError("device lost")
        return put(x, device, **how)

    monkeypatch.setattr(jax, "device_put", device_put)
    state, _ = fit(AdaptiveSgd, act, log=log, mega_batch=32)
    assert state.cursor == 4 * 96
    assert set(covered(log, 96)) == set(range(4 * 96))
    assert "failed: RuntimeError: device lost" in caplog.text
    assert "2 of 3 workers go on" in caplog.text


def test_a_merge_that_fails_ends_the_run_with_its_error(monkeypatch, caplog):
    failed = []

    def rest(self, taking_part_W, *, dry):
        if failed or self.pending >= self.quota:
            failed.append(True)
            raise MemoryError("no room to merge")
        return ()

    monkeypatch.setattr(Merged, "rest", rest)
    with pytest.raises(MemoryError, match="no room"):
        fit(AdaptiveSgd, lambda worker, phase: None, mega_batch=32)
    assert "Worker" not in caplog.text  # it is the fault of none


def test_rows_that_come_late_are_no_fault_of_the_worker(monkeypatch, caplog):
    monkeypatch.setattr(threads, "_LEAST_PATIENCE", 0.1)
    rows = data()

    class Late(MemorySource):
        asked = 0

        def rows(self, indices):
            self.asked += 1
            if self.asked == 6:
                time.sleep(0.4)
            return super().rows(indices)

    with trainer_for(Hogbatch(batches=4)) as trainer:
        state, _ = trainer.fit(trainer.init(first()), Late(rows), epochs=2)
    assert state.cursor == 2 * 96
    assert "failed" not in caplog.text


def test_how_long_a_task_may_take():
    """Ten seconds or twenty times the usual, from when the rows are there; and wait_limit in any case."""
    looking = Threads(None, None, 1, pause=Pause(), wait_limit=60.0, stopping=lambda: False)
    task = WorkItem(0, Range(0, 0, 4), 4, 1.0, 1.0, taken=100.0, version=0)
    assert looking._too_long(task, 159.0) is None
    assert "got no rows within 60 s" in looking._too_long(task, 161.0)
    task.started = 150.0
    assert looking._too_long(task, 209.0) is None
    assert "within 60 s. Its device may hang; give the Trainer a longer wait_limit" in looking._too_long(task, 211.0)
    looking._slowest_W = [0.25]  # seconds a sample
    assert looking._too_long(task, 169.0) is None
    assert "within 20 s, 20 times what it needed before. Its" in looking._too_long(task, 171.0)
    looking._slowest_W = [0.01]
    assert looking._too_long(task, 159.0) is None
    assert "within 10 s" in looking._too_long(task, 161.0)


def test_a_worker_that_hangs_is_left_out_and_may_come_back(caplog):
    """It hangs until it is left out; what it then brings is refused, and it goes on."""
    missed, log = threading.Event(), []

    def act(worker, phase):
        if worker == 1 and phase == 3:
            while "did not finish" not in caplog.text:
                time.sleep(0.01)
            missed.set()
        elif not missed.is_set():
            time.sleep(0.02)  # so that there is work left for it

    fit(Hogbatch, act, workers=2, epochs=20, log=log, wait_limit=0.3)
    assert covered(log, 96) == list(range(20 * 96))
    assert "Worker 1 did not finish 4 samples within 0.3 s" in caplog.text
    assert "has come back" in caplog.text
    assert sum(done.worker == 1 for done in log) > 2


def test_a_thread_that_dies_without_a_word_is_noticed(monkeypatch, caplog):
    work, log = Threads._work, []

    def die(self, worker):
        if worker == 1:
            self.coordinator.take(worker)
        else:
            work(self, worker)

    monkeypatch.setattr(Threads, "_work", die)
    fit(Hogbatch, lambda worker, phase: None, log=log)
    assert covered(log, 96) == list(range(4 * 96))
    assert "The thread of worker 1 died" in caplog.text


@pytest.mark.parametrize("kind", FAMILY)
def test_the_last_workers_failure_ends_the_run_with_its_error(kind, caplog):
    def act(worker, phase):
        if phase == 3 + worker:
            raise OSError(f"worker {worker} is gone")

    with pytest.raises(OSError, match="is gone"):
        fit(kind, act, epochs=50)
    assert "No worker is left." in caplog.text
    assert "0 of 3" not in caplog.text
    assert not [t for t in threading.enumerate() if t.name.startswith("hetjax-hogbatch")]


@pytest.mark.parametrize("kind", FAMILY)
def test_asked_to_stop_it_ends_within_two_seconds_and_goes_on_later(kind):
    """Phases of a minute: nobody waits for them."""
    log, asked = [], []
    slow = Simulation(constant([1.0, 1e-3]), row_time=5e-3)  # 20 ms and 80 s for 16 rows
    sync = kind(batches=16, on_update=log.append, **({"mega_batch": 64} if kind is AdaptiveSgd else {}))
    rows = data()
    with trainer_for(sync, speeds=slow) as trainer:

        def stop():
            asked.append(time.monotonic())
            trainer.stop()

        soon = lambda record, state: threading.Timer(0.2, stop).start() if record.step == 1 else None
        state, _ = trainer.fit(trainer.init(first()), rows, epochs=100, hooks=[soon])
        assert time.monotonic() - asked[0] < 2
        assert 0 < state.cursor < 9600
        saved = trainer.state_dict(state)
    assert not [t for t in threading.enumerate() if t.name.startswith("hetjax-hogbatch")]
    state = jax.tree.map(np.asarray, state)
    sync = kind(on_update=log.append)
    with trainer_for(sync) as trainer:
        state, _ = trainer.fit(trainer.load_state_dict(saved, state), rows, stop_at=9600)
    assert state.cursor == 9600
    if kind is not AdaptiveSgd:
        assert covered(log, 96) == list(range(9600))


def test_a_wish_to_end_that_comes_during_the_compile_counts():
    rows, asked = data(), []

    def loss(params, batch, keys):
        if not asked:
            asked.append(time.monotonic())
            trainer.stop()
        return loss_fn(params, batch, keys)

    slow = Simulation(constant([1.0, 1.0]), row_time=1.0)
    with Trainer(
        loss,
        optax.sgd(0.1),
        batch_size=16,
        sync=Hogbatch(),
        devices=jax.devices()[:2],
        engine=Chunked(rungs=[4, 16]),
        speeds=slow,
    ) as trainer:
        state, history = trainer.fit(trainer.init(first()), rows, epochs=1)
        assert (state.cursor, history.records) == (0, [])
        slow.row_time = 1e-4
        state, _ = trainer.fit(state, rows, epochs=1)
    assert state.cursor == 96


def test_capacities_smaller_together_than_the_batch_are_calibrated_with():
    with Trainer(
        loss_fn, optax.sgd(0.1), batch_size=48, sync=Hogbatch(), capacity=[4, 16], speeds=[1, 4],
        devices=jax.devices()[:2],
    ) as trainer:  # fmt: skip
        _, history = trainer.fit(trainer.init(first()), MemorySource(data()), epochs=1)
    assert trainer.simulation.row_time > 0
    assert sum(int(record.counts_W.sum()) for record in history.records) == 96


def test_two_equal_workers_do_twice_the_work_of_one():
    rates = []
    for workers in (1, 2):
        speeds = Simulation(constant([1.0] * workers), row_time=5e-3)
        with trainer_for(Hogbatch(batches=16), workers, speeds=speeds) as trainer:
            _, history = trainer.fit(trainer.init(first()), data(), epochs=3)
        rates.append(history.samples_per_s())
    assert rates[1] / rates[0] > 1.7


def test_a_gradient_that_is_not_finite_stops_the_run_or_is_left_out(caplog):
    rows = data()
    rows["y"][7] = np.nan
    for policy in ("stop", "skip"):
        with trainer_for(Hogbatch(batches=4), on_nonfinite=policy) as trainer:
            state = trainer.init(first())
            if policy == "stop":
                with pytest.raises(NonFiniteError, match="NaN or infinite"):
                    trainer.fit(state, rows, epochs=2)
            else:
                state, history = trainer.fit(state, rows, epochs=2)
    assert np.isfinite(flat(state.params)).all()
    assert sum(bool(record.nonfinite) for record in history.records) == 2
    assert np.isfinite(history.losses).all()


def test_what_a_loss_raises_while_it_is_traced_is_raised_before_any_thread_starts():
    def wrong(params, batch, keys):
        return batch["x"] @ params["nothing"]

    with (
        pytest.raises(KeyError),
        Trainer(wrong, optax.sgd(0.1), batch_size=16, sync="hogbatch", devices=jax.devices()[:2]) as trainer,
    ):
        trainer.fit(trainer.init(first()), data(), epochs=1)
