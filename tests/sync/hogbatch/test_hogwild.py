"""Workers of several threads: each reads, computes and updates by itself, and every update counts."""

import os
import threading
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from async_problem import FakeModel, covered, data, expected_shared, flat, initial_params, trainer_for

from hetjax import Chunked
from hetjax.engines.clocks import LocalResult
from hetjax.sampling.ranges import Range, RangePool
from hetjax.sync import AdaptiveHogbatch, Hogbatch
from hetjax.sync.hogbatch import VirtualSchedule
from hetjax.sync.hogbatch.coordinator import Coordinator
from hetjax.sync.hogbatch.immediate import Immediate
from hetjax.sync.hogbatch.method import WorkItem
from hetjax.sync.hogbatch.rules import BatchBounds, Rate
from hetjax.sync.hogbatch.threads import CancellableHold, Threads

CPU_AND_GPU = VirtualSchedule(seed=3, speeds=(1.0, 20.0))


def run(sync, rows, epochs, batch=384, rungs=(1, 8, 48, 384), **options):
    with trainer_for(sync, 2, batch, engine=Chunked(rungs=list(rungs)), **options) as trainer:
        state, history = trainer.fit(trainer.init(initial_params()), rows, epochs=epochs)
    return flat(state.params), history


def test_48_threads_in_virtual_time(float64):
    """A CPU batch of 48 samples makes 48 updates of one sample each, read and applied one by one."""
    rows, log = data(960), []
    sync = Hogbatch(replay=CPU_AND_GPU, threads=[48, 1], batches=[48, 384], on_update=log.append)
    found, history = run(sync, rows, 6)
    np.testing.assert_allclose(found, expected_shared(log, rows), rtol=1e-7)  # thousands of updates: differences grow
    assert covered(log, 960) == list(range(6 * 960))
    cpu = [update for update in log if update.worker == 0]
    assert {update.span.count for update in cpu} == {1}
    assert {update.thread for update in cpu} == set(range(48))
    assert max(update.staleness for update in cpu) >= 47  # the threads do not wait for each other
    assert len({update.ended for update in cpu}) == len(cpu)
    assert history.more["batches"] == [48, 384]
    assert all(0.5 < busy < 1 + 1e-9 for busy in history.more["utilization"])  # of all its threads


def test_adaptive_hogbatch_evens_out_the_updates_of_a_cpu_and_a_gpu():
    """With fixed batches nearly all updates are the CPU's (.98 in the paper), adaptively about half of them (.55)."""
    rows, share = data(4800), {}
    for kind in (Hogbatch, AdaptiveHogbatch):
        options = {"threads": [48, 1], "batches": [48, 384], "smallest": [48, 24], "faithful": True}
        sync = kind(replay=CPU_AND_GPU, scale_rate=True, reference=3840, **options)
        _, history = run(sync, rows, 3)
        share[kind] = history.more["update_share"][0]
        counted = sum(sync.state_dict()["updates"])  # as published: those of the last epoch
        assert 0 < counted < history.more["updates"] / 2
    assert share[Hogbatch] > 0.75
    assert 0.4 < share[AdaptiveHogbatch] < 0.65


def item(worker, thread, version=0, epoch=0):
    return WorkItem(worker, Range(epoch, 0, 4), 4, 1.0, 1.0, 0.0, version, thread=thread)


def method(**options):
    bounds = BatchBounds.of(np.array([64, 64]), 1, np.array([8, 8]), np.array([4, 1]))
    return Immediate(FakeModel(), [None] * 2, np.array([32, 32]), np.zeros(2), threads_W=bounds.threads_W, **options)


def test_a_batch_is_adapted_once_for_all_threads_and_counts_as_many_updates():
    seen = []
    made = method(adapt=lambda worker, batch_W, updates_W, active_W: seen.append(updates_W.tolist()) or 32, beta=0.5)
    assert [made.next_batch(0, np.ones(2)) for _ in range(4)] == [8] * 4
    for thread in range(4):
        made.commit(item(0, thread), None)
    made.commit(item(1, 0), None)
    made.next_batch(0, np.ones(2))
    assert seen == [[0, 0], [2, 1]]  # four updates, each with the weight beta
    assert made.next_batch(1, np.ones(2)) == 32


@pytest.mark.parametrize("reset", [False, True])
def test_counters_are_reset_every_epoch_as_published(reset):
    made = method(reset_by_epoch=reset)
    for epoch in (0, 0, 1):
        made.commit(item(0, 0, epoch=epoch), None)
    made.commit(item(1, 0, epoch=1), None)
    assert made.updates_W.tolist() == ([1, 1] if reset else [3, 1])
    assert made.state_dict()["epoch"] == (1 if reset else 0)
    assert [kind(faithful=True).faithful for kind in (Hogbatch, AdaptiveHogbatch)] == [True, True]


def test_real_threads_of_a_worker_compute_at_the_same_time():
    """Three threads of worker 0 can only pass the barrier together."""
    together = threading.Barrier(3, timeout=30)

    def compute(item):
        if item.worker == 0:
            together.wait()
        return LocalResult((), item.span.count, 0.0, 1.0)

    made = Immediate(FakeModel(), [None] * 2, np.array([6, 4]), np.zeros(2), threads_W=np.array([3, 1]))
    coordinator = Coordinator(
        RangePool(10, 10), made, Rate(4), 2, clock=lambda: 0.0, step_of=lambda n: n, threads_W=[3, 1]
    )
    threads = Threads(coordinator, compute, 2, hold=CancellableHold(), wait_limit=60.0, stopping=lambda: False)
    held = coordinator.try_take(1)  # four samples stay away from the pool: worker 0 gets the other six
    events = threads.run()
    applied = [next(events).update for _ in range(3)]
    assert sorted(update.thread for update in applied) == [0, 1, 2]
    assert {update.span.count for update in applied} == {2}
    coordinator.finish(held, LocalResult((), 4, 0.0, 1.0))
    list(events)
    assert made.updates_W.tolist() == [3, 1]


@pytest.mark.parametrize("threads", [2, 4])
def test_real_threads_train(threads):
    rows, log = data(960), []
    sync = Hogbatch(threads=[threads, 1], batches=[16, 32], on_update=log.append)
    found, _ = run(sync, rows, 3, batch=32, rungs=(4, 8, 32), devices=jax.devices()[:2])
    np.testing.assert_allclose(found, expected_shared(log, rows), rtol=1e-4, atol=1e-4)
    assert covered(log, 960) == list(range(3 * 960))


def test_a_failing_thread_returns_the_ranges_of_all_threads():
    made = method()
    pool = RangePool(96, 96)
    coordinator = Coordinator(pool, made, Rate(4), 2, clock=lambda: 0.0, step_of=lambda n: n, threads_W=[4, 1])
    items = [coordinator.take(0, thread) for thread in range(4)]
    coordinator.fail(0, RuntimeError("gone"), items[2])
    assert pool.undone() == [(0, 32)]
    assert not any(coordinator.holds(one) for one in items)
    assert coordinator.take(0, 1) is None  # dropped
    assert coordinator.take(1).span.start == 0


def test_as_published_a_cpu_beside_a_gpu_has_48_threads_in_virtual_time_and_one_per_core_otherwise(monkeypatch):
    workers = SimpleNamespace(own=[SimpleNamespace(platform="cpu"), SimpleNamespace(platform="gpu")])
    assert Hogbatch(faithful=True, replay=CPU_AND_GPU)._threads_W(workers).tolist() == [48, 1]
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {3, 5, 7})  # pinned to three of 64 cores
    assert Hogbatch(faithful=True)._threads_W(workers).tolist() == [3, 1]
    assert Hogbatch(replay=CPU_AND_GPU)._threads_W(workers) is None


def test_bounds_divide_evenly_between_threads():
    bounds = BatchBounds.of(np.array([100, 64]), 1, threads_W=np.array([48, 1]))
    assert (bounds.lower_W.tolist(), bounds.upper_W.tolist()) == ([48, 4], [96, 64])
    assert bounds.rungs() == [1, 2, 4, 8, 16, 32, 64]
    with pytest.raises(ValueError, match="its 48 threads: raise capacity"):
        BatchBounds.of(np.array([32, 64]), 1, threads_W=np.array([48, 1]))
