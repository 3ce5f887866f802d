"""The Hogbatch family by a virtual clock: what is computed, to the number, and the same again every time."""

import json

import jax
import numpy as np
import optax
import pytest
from async_problem import (
    RATE,
    Versions,
    best,
    covered,
    data,
    first,
    flat,
    loss_fn,
    merged_account,
    shared_account,
    trainer_for,
)
from hypothesis import given
from hypothesis import strategies as st
from problems import distance, problem, reference_run

from hetjax import Chunked, Simulation, Trainer
from hetjax.sampling.ranges import Range
from hetjax.sync import AdaptiveHogbatch, AdaptiveSgd, Hogbatch
from hetjax.sync.hogbatch import VirtualSchedule
from hetjax.sync.hogbatch.immediate import Immediate
from hetjax.sync.hogbatch.method import WorkItem
from hetjax.sync.hogbatch.rules import moved_batches
from hetjax.zoo.tasks import make_task

UNEQUAL = VirtualSchedule(seed=3, speeds=(1.0, 4.0, 2.0))
FAMILY = [Hogbatch, AdaptiveHogbatch, AdaptiveSgd]


def run(kind, rows, *, workers=3, epochs=2, replay=UNEQUAL, log=None, batch=16, trainer=None, **options):
    sync = kind(replay=replay, on_update=None if log is None else log.append, **options)
    with trainer_for(sync, workers, batch, **(trainer or {})) as made:
        state, history = made.fit(made.init(first()), rows, epochs=epochs)
    return flat(state.params), history, sync, state


def test_one_worker_alone_is_sequential_sgd():
    made, optimizer = problem("mlp", samples=100), optax.sgd(0.1, momentum=0.9)
    params, losses = reference_run(made, optimizer, 24, 15)
    runs = []
    for sync in ("allreduce", Hogbatch(), Hogbatch(replay=0), AdaptiveHogbatch(replay=0)):
        with Trainer(
            made.loss_fn, optimizer, batch_size=24, sync=sync, devices=jax.devices()[:1], engine=Chunked(rungs=[4, 24])
        ) as trainer:
            runs.append(trainer.fit(trainer.init(made.params), made.data, epochs=3))
    for state, history in runs:
        np.testing.assert_allclose(history.losses, losses, rtol=1e-5)
        assert distance(state.params, params) <= 1e-5
        assert (state.step, state.cursor) == (15, 300)
    for state, _ in runs[1:]:  # and to the bit what the synchronous trainer does
        assert jax.tree.all(jax.tree.map(np.array_equal, state.params, runs[0][0].params))


@pytest.mark.parametrize("heavy", [0.0, 0.5])
@pytest.mark.parametrize("kind", [Hogbatch, AdaptiveHogbatch])
def test_the_shared_model_is_what_the_log_says_it_must_be(kind, heavy, float64):
    rows, log, optimizer = data(), [], optax.sgd(RATE, heavy or None)
    found, history, *_ = run(kind, rows, log=log, batches=[4, 16, 8], epochs=4, trainer={"optimizer": optimizer})
    np.testing.assert_allclose(found, shared_account(log, rows, heavy), rtol=1e-9)
    assert covered(log, 96) == list(range(4 * 96))
    assert max(done.staleness for done in log) > 1
    assert [done.version for done in log] == list(range(1, len(log) + 1))
    assert history.more["updates"] == len(log)
    assert history.more["staleness"] == {
        str(k): sum(d.staleness == k for d in log) for k in sorted({d.staleness for d in log})
    }
    assert all(done.scale == done.span.count / 16 for done in log)


@pytest.mark.parametrize("heavy", [0.0, 0.5])
def test_replicas_are_merged_as_the_log_says(heavy, float64):
    rows, log = data(), []
    start = np.array([4, 16, 8])
    options = {"batches": start.tolist(), "smallest": 4, "mega_batch": 64, "momentum": 0.9}
    optimizer = {"optimizer": optax.sgd(RATE, heavy or None)}
    found, _, sync, state = run(AdaptiveSgd, rows, log=log, epochs=4, trainer=optimizer, **options)

    def batches(merge):
        at = start.astype(float)
        for before in range(merge):
            at = moved_batches(
                at, np.bincount([d.worker for d in log if d.version == before], minlength=3), sync.bounds
            )
        return at

    np.testing.assert_allclose(found, merged_account(log, rows, 3, 0.9, batches, heavy), rtol=1e-6)
    assert covered(log, 96) == list(range(4 * 96))
    assert max(done.version for done in log) >= 4
    assert {done.batch for done in log} > {4, 16}  # they moved
    assert all(done.scale == done.span.count / (16 / 3 / (1 - 0.9)) for done in log)
    assert state.more is not None  # the momentum


@pytest.mark.parametrize("kind", FAMILY)
def test_it_converges_on_a_quadratic(kind):
    rows = data()
    options = {"mega_batch": 32} if kind is AdaptiveSgd else {}
    found, *_ = run(kind, rows, epochs=40, **options)
    np.testing.assert_allclose(found, best(rows), atol=0.03)


@pytest.mark.parametrize("kind", FAMILY)
@pytest.mark.slow
def test_it_learns_the_digits(kind):
    task = make_task("digits", "mlp", hidden=(24,), dropout=0.0)
    options = {"mega_batch": 256} if kind is AdaptiveSgd else {}
    sync = kind(replay=VirtualSchedule(0, speeds=(1.0, 8.0)), batches=[8, 64], smallest=8, **options)
    with Trainer(
        task.model, optax.sgd(0.3), batch_size=64, sync=sync, devices=jax.devices()[:2],
        engine=Chunked(rungs=[8, 64]),
    ) as trainer:  # fmt: skip
        state, history = trainer.fit(trainer.init(task.model.params), task.train, epochs=12)
        tested = trainer.evaluate(state, task.test)
    assert history.losses[0] > 2
    assert tested["accuracy"] > 0.9


@pytest.mark.parametrize("kind", FAMILY)
def test_a_seed_replays_the_same_interleaving_to_the_bit(kind):
    rows, logs, found = data(), [[], [], []], []
    for log, seed in zip(logs, (5, 5, 6), strict=True):
        found.append(run(kind, rows, log=log, replay=VirtualSchedule(seed, 0.3, (1.0, 4.0, 2.0)))[0])
    assert logs[0] == logs[1]
    assert np.array_equal(found[0], found[1])
    assert [d.worker for d in logs[0]] != [d.worker for d in logs[2]]


def test_adaptive_batches_even_the_updates_out_and_compile_nothing():
    rows = data(960)
    fixed = run(Hogbatch, rows, batches=[4, 4, 4])[1]
    moved = run(
        AdaptiveHogbatch,
        rows,
        batches=[4, 4, 4],
        smallest=2,
        trainer={"engine": Chunked(rungs=[2, 4, 8, 16])},
        epochs=6,
    )[1]
    spread = lambda history: np.ptp(history.more["update_share"])
    assert spread(fixed) > 0.3  # by speed: 1 to 4 to 2
    assert spread(moved) < 0.1
    assert len({tuple(r.more["batches"]) for r in moved.records}) > 2
    assert moved.recompiles_after_warmup == 0


def test_utilization_is_full_where_nobody_waits_and_the_times_add_up():
    history = run(Hogbatch, data(960))[1]
    assert min(history.more["utilization"]) > 0.97
    busy_W = np.sum([r.times_W for r in history.records], axis=0) / history.records[-1].seconds
    np.testing.assert_allclose(busy_W, history.more["utilization"], atol=0.03)
    assert sum(int(r.counts_W.sum()) for r in history.records) == 2 * 960


@pytest.mark.parametrize("bound", [0, 1, 2])
def test_staleness_can_be_bounded(bound, float64):
    rows, log = data(), []
    found, *_ = run(Hogbatch, rows, log=log, staleness_bound=bound, batches=[4, 4, 4])
    assert max(done.staleness for done in log) == bound
    assert covered(log, 96) == list(range(2 * 96))
    np.testing.assert_allclose(found, shared_account(log, rows), rtol=1e-9)


@given(st.integers(2, 6), st.integers(0, 5), st.lists(st.integers(0, 5), min_size=10, max_size=80))
def test_the_bound_holds_in_any_order_of_events_and_never_locks(workers, bound, events):
    method = Immediate(Versions(), [None] * workers, np.ones(workers), np.zeros(workers), bound=bound)
    flying = {}
    for worker in (event % workers for event in events):
        if worker in flying:
            assert method.commit(flying.pop(worker), None).staleness <= bound
        elif method.may_start(flying.values()):
            flying[worker] = WorkItem(worker, Range(0, 0, 1), 1, 1.0, 1.0, 0.0, method.version)
        else:
            assert flying  # only ever waits for somebody


def test_a_run_goes_on_where_it_was_and_no_sample_is_seen_twice(float64):
    rows, log = data(), []
    sync = Hogbatch(replay=UNEQUAL, on_update=log.append)
    with trainer_for(sync, 3) as trainer:
        state = trainer.init(first())
        stop = lambda record, state: trainer.stop() if record.step == 5 else None
        state, history = trainer.fit(state, rows, epochs=2, hooks=[stop])
        assert len(log) < 24
        whole = [r.step for r in history.records if r.step <= state.step]  # the last record may be of a part of a step
        saved = trainer.state_dict(state)
        assert saved["sync"]["state"]["undone"]  # ranges were on their way
    again = Hogbatch(replay=7, on_update=log.append)
    with trainer_for(again, 2) as trainer:  # other workers, another interleaving
        state = trainer.load_state_dict(saved, jax.tree.map(np.asarray, state))
        state, more = trainer.fit(state, rows, stop_at=2 * 96)
    assert covered(log, 96) == list(range(2 * 96))
    assert (state.step, state.cursor) == (12, 192)
    steps = whole + [r.step for r in more.records]
    assert steps == sorted(set(steps))


def test_the_summary_of_a_resumed_run_is_of_all_its_parts():
    rows, log, records = data(), [], []
    sync = Hogbatch(replay=UNEQUAL, on_update=log.append)
    with trainer_for(sync, 3) as trainer:
        stop = lambda record, state: trainer.stop() if record.step == 5 else None
        state, history = trainer.fit(trainer.init(first()), rows, epochs=2, hooks=[stop])
        records += [r for r in history.records if r.step <= state.step]
        assert len(records) < len(history.records)  # it stopped within a step
        saved, before = json.loads(json.dumps(trainer.state_dict(state))), len(log)
    with trainer_for(Hogbatch(replay=7, on_update=log.append), 3) as trainer:
        state, history = trainer.fit(
            trainer.load_state_dict(saved, jax.tree.map(np.asarray, state)), rows, stop_at=2 * 96
        )
        records += history.records
    told, made_W = history.more, np.bincount([d.worker for d in log])
    assert 0 < before < told["updates"] == len(log)
    assert told["update_share"] == (made_W / len(log)).tolist()
    assert told["staleness"] == {str(k): sum(d.staleness == k for d in log) for k in sorted({d.staleness for d in log})}
    np.testing.assert_array_equal(np.sum([r.more["updates"] for r in records], axis=0), made_W)
    assert sum(int(r.counts_W.sum()) for r in records) == 2 * 96
    busy_W = np.sum([r.times_W for r in records], axis=0) / sum(r.step_time for r in records)
    np.testing.assert_allclose(busy_W, told["utilization"], rtol=1e-6)


def test_resumed_batches_keep_to_the_bounds_of_now():
    rows, log = data(), []
    with trainer_for(Hogbatch(replay=0, batches=16)) as trainer:
        state, _ = trainer.fit(trainer.init(first()), rows, epochs=1)
        saved, state = trainer.state_dict(state), jax.tree.map(np.asarray, state)
    with trainer_for(Hogbatch(replay=0, on_update=log.append), capacity=8, engine=Chunked(rungs=[4, 8])) as trainer:
        trainer.fit(trainer.load_state_dict(saved, state), rows, epochs=1)
    assert {done.batch for done in log} == {8}


def test_a_replay_follows_speeds_that_change():
    """Twice three quarters: the first worker has three of four updates until step 30, and then one of four."""
    swapped = lambda step: (np.array([3.0, 1.0] if step < 30 else [1.0, 3.0]), np.zeros(2))
    sync = Hogbatch(replay=0, batches=4)
    with trainer_for(sync, speeds=Simulation(swapped)) as trainer:
        _, history = trainer.fit(trainer.init(first()), data(), epochs=10)
    made_SxW = np.array([record.more["updates"] for record in history.records])
    for part_SxW, share in ((made_SxW[:30], 0.75), (made_SxW[30:], 0.25)):
        assert part_SxW[:, 0].sum() / part_SxW.sum() == pytest.approx(share, abs=0.04)


def test_model_state_moves_with_every_update():
    """A running sum of counts as model state: every sample is in it once."""

    def stateful(params, state, batch, keys, mask_b):
        return loss_fn(params, batch, keys), {"seen": mask_b.sum(dtype=np.float32)}

    advance = lambda state, sums: {"seen": state["seen"] + sums["seen"]}
    rows = data()
    with Trainer(
        stateful, optax.sgd(0.1), batch_size=16, sync=Hogbatch(replay=0), devices=jax.devices()[:3],
        engine=Chunked(rungs=[4, 16]), advance=advance,
    ) as trainer:  # fmt: skip
        state, _ = trainer.fit(trainer.init(first(), {"seen": np.zeros((), np.float32)}), rows, epochs=2)
    assert float(state.model_state["seen"]) == 192


def test_a_schedule_counts_in_samples():
    rows, log = data(), []
    run(Hogbatch, rows, log=log, schedule=lambda step: 1 - step / 12, scale_rate=False)
    done = np.cumsum([0] + [d.span.count for d in log[:-1]])
    assert log[0].rate == 1
    assert all(d.rate >= 1 - seen / 16 / 12 for d, seen in zip(log, done, strict=True))  # as of when it was taken
    assert log[-1].rate < 0.2
    assert {d.scale for d in log} == {1.0}


def test_the_rate_of_a_large_batch_is_capped():
    for options, scale in (
        ({}, 4.0),
        ({"rate_cap": 6.0}, 6.0),
        ({"rate_cap": np.inf}, 8.0),
        ({"scale_rate": False}, 1),
    ):
        log = []
        run(Hogbatch, data(), log=log, epochs=1, batches=16, reference=2, **options)
        assert {d.scale for d in log} == {scale}


def test_what_is_given_goes_before_what_was_published():
    made = Hogbatch(faithful=True, scale_rate=True, rate_cap=2.0)
    assert (made.scale_rate, made.rate_cap) == (True, 2.0)
    assert AdaptiveHogbatch(faithful=True, dead_zone=3, rate_cap=2.0).dead_zone == 3
    assert AdaptiveHogbatch(faithful=True).rate_cap == np.inf


def test_as_published():
    rows, log = data(), []
    run(Hogbatch, rows, log=log, batches=[4, 16, 8], faithful=True)
    assert {d.scale for d in log} == {1.0}
    assert AdaptiveHogbatch(faithful=True).dead_zone == 0
    log = []
    sync = run(AdaptiveSgd, rows, log=log, batches=16, faithful=True, mega_batch=64)[2]
    assert sync.momentum == 0.9
    assert {d.scale for d in log if d.span.count == 16} == {3.0}


@pytest.mark.parametrize(
    ("sync", "options", "words"),
    [
        (Hogbatch(), {"partition": "proportional"}, "gives every worker its own"),
        (Hogbatch(), {"engine": "looped"}, "every worker runs alone"),
        (Hogbatch(smallest=99), {}, "smallest batch of 99"),
        (Hogbatch(batches=[1, 2, 3]), {}, "batches lists 3 numbers for 2 workers"),
        (Hogbatch(replay=VirtualSchedule(speeds=(1.0,))), {}, "speeds for 1 workers"),
    ],
)
def test_what_makes_no_sense_is_refused(sync, options, words):
    with pytest.raises(ValueError, match=words), trainer_for(sync, **options) as trainer:
        trainer.fit(trainer.init(first()), data(), epochs=1)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Hogbatch(staleness_bound=-1), "at least 0"),
        (lambda: Hogbatch(staleness_bound=1.5), "whole number"),
        (lambda: Hogbatch(replay=True), "whole number"),
        (lambda: Hogbatch(rate_cap=0), "above 0"),
        (lambda: Hogbatch(rate_cap=np.nan), "above 0"),
        (lambda: AdaptiveHogbatch(dead_zone=-1), "at least 0"),
        (lambda: AdaptiveHogbatch(alpha=1), "above 1"),
        (lambda: AdaptiveSgd(mega_batch=0), "at least 1"),
        (lambda: AdaptiveSgd(momentum=1.0), "below 1"),
    ],
)
def test_options_out_of_range_are_refused(make, words):
    with pytest.raises((ValueError, TypeError), match=words):
        make()
