"""The Hogbatch family in real threads: no update lost, workers that fail or hang, and stopping on request."""

import threading

import jax
import numpy as np
import optax
import pytest
from async_problem import (
    FAMILY,
    covered,
    data,
    expected_merged,
    expected_shared,
    flat,
    initial_params,
    loss_fn,
    trainer_for,
)

from hetjax import NonFiniteError, Simulation, Trainer
from hetjax.data import MemorySource
from hetjax.sampling.ranges import Range
from hetjax.simulation.speeds import constant
from hetjax.sync import AdaptiveHogbatch, AdaptiveSgd, Hogbatch
from hetjax.sync.hogbatch.coordinator import Coordinator
from hetjax.sync.hogbatch.merged import Merged
from hetjax.sync.hogbatch.method import WorkItem
from hetjax.sync.hogbatch.threads import GRACE_SECONDS, POLL_SECONDS, CancellableHold, Threads

LONG = 60.0  # seconds until a test gives up on an event


class Scripted(Simulation):
    """Calls `act(worker, phase)` at the end of each phase."""

    def __init__(self, workers, act, row_time=1e-4):
        super().__init__(constant([1.0] * workers), row_time=row_time)
        self.act, self.phases_W = act, [0] * workers

    def hold(self, worker, rows, began, sleep=None):
        self.phases_W[worker] += 1
        self.act(worker, self.phases_W[worker])
        super().hold(worker, rows, began, sleep)


def fit(kind, act, *, workers=3, epochs=4, log=None, **options):
    sync = kind(batches=4, on_update=None if log is None else log.append, **options)
    with trainer_for(sync, workers, speeds=Scripted(workers, act)) as trainer:
        return trainer.fit(trainer.init(initial_params()), data(), epochs=epochs)


def no_worker_threads() -> bool:
    return not [thread for thread in threading.enumerate() if thread.name.startswith("hetjax-hogbatch")]


def fit_with_eight_threads(sync, rows, log):
    """Parameters after a run of eight threads that never pause."""
    with trainer_for(sync, workers=8) as trainer:
        state, history = trainer.fit(trainer.init(initial_params()), rows, epochs=2)
    assert covered(log, 960) == list(range(2 * 960))
    assert history.more["updates"] == len(log)
    assert history.recompiles_after_warmup == 0
    return flat(state.params)


@pytest.mark.parametrize("kind", [Hogbatch, AdaptiveHogbatch])
@pytest.mark.parametrize("bound", [None, 2])
def test_under_stress_every_update_is_applied_once(kind, bound, float64):
    rows, log = data(960), []
    found = fit_with_eight_threads(kind(batches=4, on_update=log.append, staleness_bound=bound), rows, log)
    np.testing.assert_allclose(found, expected_shared(log, rows), rtol=1e-9)
    assert len(log) == log[-1].version
    assert bound is None or max(update.staleness for update in log) <= bound


def test_under_stress_every_replica_is_merged_once(float64):
    rows, log = data(960), []
    sync = AdaptiveSgd(batches=8, smallest=4, mega_batch=96, on_update=log.append)
    found = fit_with_eight_threads(sync, rows, log)
    expected = expected_merged(log, rows, [8] * 8, sync.bounds, sync.momentum)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert log[-1].version >= 9
    assert len({update.batch for update in log}) > 1  # batches moved, and compiled nothing


@pytest.mark.parametrize(
    ("kind", "error"),
    [*((kind, RuntimeError("device lost")) for kind in FAMILY), (Hogbatch, SystemExit(1))],  # caught in one place
)
def test_a_worker_that_raises_is_dropped_and_its_samples_go_to_the_others(kind, error, caplog):
    """The others wait for it in their first phases: alone, they could be done before its third."""
    log, failing = [], threading.Event()

    def act(worker, phase):
        if (worker, phase) == (1, 3):
            failing.set()
            raise error
        assert worker == 1 or failing.wait(LONG)

    state, history = fit(kind, act, log=log)
    assert state.cursor == 4 * 96
    steps = [record.step for record in history.records]
    assert steps == sorted(set(steps))
    assert sum(update.worker == 1 for update in log) == 2
    if kind is not AdaptiveSgd:  # there, the samples of a lost replica are learned a second time
        assert covered(log, 96) == list(range(4 * 96))
    assert set(covered(log, 96)) == set(range(4 * 96))
    assert "Worker 1" in caplog.text
    assert type(error).__name__ in caplog.text
    assert "2 of 3 workers go on" in caplog.text


@pytest.mark.parametrize("dies", ["in its phase", "before the merge"])
def test_a_worker_whose_device_dies_is_dropped(dies, monkeypatch, caplog):
    """Its own phase raises, or its replica cannot be read at the next merge."""
    home, dead = jax.devices()[:2]
    put, gone, log = jax.device_put, threading.Event(), []

    def act(worker, phase):
        if (worker, phase) == (1, 3):
            gone.set()
            if dies == "in its phase":
                raise RuntimeError("device lost")
        assert worker == 1 or gone.wait(LONG)

    def device_put(x, device=None, **options):
        there = any(dead in leaf.devices() for leaf in jax.tree.leaves(x) if isinstance(leaf, jax.Array))
        if gone.is_set() and ((there and device == home) or (device == dead and dies == "in its phase")):
            raise RuntimeError("device lost")
        return put(x, device, **options)

    monkeypatch.setattr(jax, "device_put", device_put)
    state, _ = fit(AdaptiveSgd, act, log=log, mega_batch=32)
    assert state.cursor == 4 * 96
    assert set(covered(log, 96)) == set(range(4 * 96))
    assert "failed: RuntimeError: device lost" in caplog.text
    assert "2 of 3 workers go on" in caplog.text


def test_a_merge_that_fails_ends_the_run_with_its_error(monkeypatch, caplog):
    failed = []

    def on_idle(self, active_W, *, drained):
        if failed or self.pending >= self.quota:
            failed.append(True)
            raise MemoryError("no room to merge")
        return ()

    monkeypatch.setattr(Merged, "on_idle", on_idle)
    with pytest.raises(MemoryError, match="no room"):
        fit(AdaptiveSgd, lambda worker, phase: None, mega_batch=32)
    assert "Worker" not in caplog.text  # no worker is to blame


def test_a_worker_that_waits_for_rows_does_not_hang(monkeypatch, caplog):
    """A slow read ends only after the watchdog has seen a worker waiting for it."""
    check, blocked, seen, overdue = Threads._check_workers, threading.Event(), threading.Event(), []

    def check_workers(self):
        waiting = [item for item in self.coordinator.in_flight() if item.started is None]
        if blocked.is_set() and waiting:
            overdue.extend(self._overdue(item, item.taken + self.wait_limit) for item in waiting)
            seen.set()
        check(self)

    class Slow(MemorySource):
        reads = 0

        def rows(self, indices):
            self.reads += 1
            if self.reads == 6:
                blocked.set()
                assert seen.wait(LONG)
            return super().rows(indices)

    monkeypatch.setattr(Threads, "_check_workers", check_workers)
    with trainer_for(Hogbatch(batches=4)) as trainer:
        state, _ = trainer.fit(trainer.init(initial_params()), Slow(data()), epochs=2)
    assert state.cursor == 2 * 96
    assert overdue
    assert set(overdue) == {None}
    assert "failed" not in caplog.text


def test_how_long_an_item_may_take():
    """Ten seconds, or twenty times the slowest so far, from when its rows are ready; at most wait_limit."""
    watchdog = Threads(None, None, 1, hold=CancellableHold(), wait_limit=60.0, stopping=lambda: False)
    item = WorkItem(0, Range(0, 0, 4), 4, 1.0, 1.0, taken=100.0, version=0)
    assert watchdog._overdue(item, 159.0) is None
    assert "got no rows within 60 s" in watchdog._overdue(item, 161.0)
    item.started = 150.0
    assert watchdog._overdue(item, 209.0) is None
    assert "within 60 s. Its device may hang; give the Trainer a longer wait_limit" in watchdog._overdue(item, 211.0)
    watchdog._slowest_W = [0.25]  # seconds per sample
    assert watchdog._overdue(item, 169.0) is None
    assert "within 20 s, 20 times what it needed before. Its" in watchdog._overdue(item, 171.0)
    watchdog._slowest_W = [0.01]
    assert watchdog._overdue(item, 159.0) is None
    assert "within 10 s" in watchdog._overdue(item, 161.0)


def test_a_worker_that_hangs_is_dropped_and_rejoins_when_it_responds(monkeypatch, caplog):
    """The watchdog's clock jumps while worker 1 hangs; worker 0 waits for it, so that there is work left."""
    overdue, fail, rejoin, log = Threads._overdue, Coordinator.fail, Coordinator._rejoin, []
    hung, dropped, rejoined = threading.Event(), threading.Event(), threading.Event()

    def overdue_when_hung(self, item, now):
        jump = 1e6 if item.worker == 1 and hung.is_set() and not dropped.is_set() else 0.0
        return overdue(self, item, now + jump)

    def failing(self, worker, error, item=None):
        fail(self, worker, error, item)
        dropped.set()

    def rejoining(self, worker):
        rejoin(self, worker)
        rejoined.set()

    def act(worker, phase):
        if worker == 1 and phase == 3:
            hung.set()
            assert dropped.wait(LONG)
        elif worker == 0 and phase == 3:
            assert rejoined.wait(LONG)

    monkeypatch.setattr(Threads, "_overdue", overdue_when_hung)
    monkeypatch.setattr(Coordinator, "fail", failing)
    monkeypatch.setattr(Coordinator, "_rejoin", rejoining)
    fit(Hogbatch, act, workers=2, log=log)
    assert covered(log, 96) == list(range(4 * 96))
    assert "Worker 1 did not finish 4 samples within" in caplog.text
    assert "Worker 1 responded again and rejoins the training" in caplog.text
    assert sum(update.worker == 1 for update in log) > 2


def test_a_thread_that_dies_silently_is_noticed(monkeypatch, caplog):
    work, log = Threads._work, []

    def die(self, worker, number):
        if worker == 1:
            self.coordinator.take(worker)
        else:
            work(self, worker, number)

    monkeypatch.setattr(Threads, "_work", die)
    fit(Hogbatch, lambda worker, phase: None, log=log)
    assert covered(log, 96) == list(range(4 * 96))
    assert "The thread of worker 1 died" in caplog.text


@pytest.mark.parametrize("kind", FAMILY)
def test_the_failure_of_the_last_worker_ends_the_run_with_its_error(kind, caplog):
    def act(worker, phase):
        if phase == 3 + worker:
            raise OSError(f"worker {worker} is gone")

    with pytest.raises(OSError, match="is gone"):
        fit(kind, act, epochs=50)
    assert "No worker is left." in caplog.text
    assert "0 of 3" not in caplog.text
    assert no_worker_threads()


@pytest.mark.parametrize("kind", FAMILY)
def test_stopping_does_not_wait_for_phases_in_flight_and_the_run_can_be_resumed(kind):
    """A phase of the slow worker takes hours; two graces and a poll bound the end, below two seconds."""
    assert 2 * GRACE_SECONDS + POLL_SECONDS < 2
    rows, log = data(), []
    slow = Simulation(constant([1.0, 1e-6]), row_time=1e-3)
    sync = kind(batches=16, on_update=log.append, **({"mega_batch": 64} if kind is AdaptiveSgd else {}))
    with trainer_for(sync, speeds=slow) as trainer:
        stop = lambda record, state: trainer.stop()
        state, _ = trainer.fit(trainer.init(initial_params()), rows, epochs=10, hooks=[stop])
        assert 0 < state.cursor < 960
        assert {update.worker for update in log} == {0}
        saved = trainer.state_dict(state)
    assert no_worker_threads()
    state = jax.tree.map(np.asarray, state)
    with trainer_for(kind(on_update=log.append)) as trainer:
        state, _ = trainer.fit(trainer.load_state_dict(saved, state), rows, stop_at=960)
    assert state.cursor == 960
    if kind is not AdaptiveSgd:
        assert covered(log, 96) == list(range(960))


def test_a_stop_requested_during_compilation_counts():
    rows, traced = data(), []

    def loss(params, batch, keys):
        if not traced:
            traced.append(True)
            trainer.stop()
        return loss_fn(params, batch, keys)

    slow = Simulation(constant([1.0, 1.0]), row_time=1.0)
    with trainer_for(Hogbatch(), loss=loss, speeds=slow) as trainer:
        state, history = trainer.fit(trainer.init(initial_params()), rows, epochs=1)
        assert (state.cursor, history.records) == (0, [])
        slow.row_time = 1e-4
        state, _ = trainer.fit(state, rows, epochs=1)
    assert state.cursor == 96


def test_calibration_works_with_capacities_that_sum_to_less_than_the_batch():
    with Trainer(
        loss_fn, optax.sgd(0.1), batch_size=48, sync=Hogbatch(), capacity=[4, 16], speeds=[1, 4],
        devices=jax.devices()[:2],
    ) as trainer:  # fmt: skip
        _, history = trainer.fit(trainer.init(initial_params()), MemorySource(data()), epochs=1)
    assert trainer.simulation.row_time > 0
    assert sum(int(record.counts_W.sum()) for record in history.records) == 96


def test_workers_compute_in_parallel(caplog):
    """Each phase ends only when the other worker is in its own: one after the other, they would never meet."""
    both, log = threading.Barrier(2, timeout=LONG), []
    fit(Hogbatch, lambda worker, phase: both.wait() if phase <= 5 else None, workers=2, epochs=1, log=log)
    assert "failed" not in caplog.text
    assert {update.worker for update in log[:2]} == {0, 1}
    assert covered(log, 96) == list(range(96))


def test_a_nonfinite_gradient_stops_the_run_or_is_skipped():
    rows = data()
    rows["y"][7] = np.nan
    for policy in ("stop", "skip"):
        with trainer_for(Hogbatch(batches=4), on_nonfinite=policy) as trainer:
            state = trainer.init(initial_params())
            if policy == "stop":
                with pytest.raises(NonFiniteError, match="NaN or infinite"):
                    trainer.fit(state, rows, epochs=2)
            else:
                state, history = trainer.fit(state, rows, epochs=2)
    assert np.isfinite(flat(state.params)).all()
    assert sum(bool(record.nonfinite) for record in history.records) == 2
    assert np.isfinite(history.losses).all()


def test_an_error_while_tracing_the_loss_is_raised_before_any_thread_starts():
    def wrong(params, batch, keys):
        return batch["x"] @ params["nothing"]

    with pytest.raises(KeyError), trainer_for(Hogbatch(), loss=wrong) as trainer:
        trainer.fit(trainer.init(initial_params()), data(), epochs=1)
    assert no_worker_threads()
