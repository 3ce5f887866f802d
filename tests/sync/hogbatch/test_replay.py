"""The Hogbatch family on a virtual clock: what is computed, to the number, and the same again in every replay."""

import json

import jax
import numpy as np
import optax
import pytest
from async_problem import (
    FAMILY,
    RATE,
    covered,
    data,
    expected_merged,
    expected_shared,
    flat,
    initial_params,
    least_squares,
    loss_fn,
    trainer_for,
)
from problems import Problem, distance, reference_run

from hetjax import Chunked, Example, Simulation, Trainer
from hetjax.sync import AdaptiveHogbatch, AdaptiveSgd, Hogbatch
from hetjax.sync.hogbatch import VirtualSchedule
from hetjax.zoo.tasks import make_task

UNEQUAL = VirtualSchedule(seed=3, speeds=(1.0, 4.0, 2.0))


def run(kind, rows, *, workers=3, epochs=2, replay=UNEQUAL, log=None, batch=16, trainer=None, **options):
    sync = kind(replay=replay, on_update=None if log is None else log.append, **options)
    with trainer_for(sync, workers, batch, **(trainer or {})) as fitted:
        state, history = fitted.fit(fitted.init(initial_params()), rows, epochs=epochs)
    return flat(state.params), history, sync, state


def test_a_single_worker_is_sequential_sgd():
    """With dropout, momentum, and a short batch at the end of each epoch."""

    def dropout_loss(params, batch, keys):
        keep = jax.vmap(lambda key: jax.random.bernoulli(key, 0.8, (3,)))(keys)
        return Example(loss_fn(params, batch | {"x": batch["x"] * keep}, keys))

    as_float32 = lambda tree: jax.tree.map(np.float32, tree)
    rows, start, optimizer = as_float32(data(100)), as_float32(initial_params()), optax.sgd(0.05, momentum=0.9)
    params, losses = reference_run(Problem(dropout_loss, start, rows), optimizer, 24, 15)
    options = {"loss": dropout_loss, "optimizer": optimizer, "engine": Chunked(rungs=[4, 24])}
    runs = []
    for sync in ("allreduce", Hogbatch(), Hogbatch(replay=0), AdaptiveHogbatch(replay=0)):
        with trainer_for(sync, workers=1, batch=24, **options) as trainer:
            runs.append(trainer.fit(trainer.init(start), rows, epochs=3))
    for state, history in runs:
        np.testing.assert_allclose(history.losses, losses, rtol=1e-5)
        assert distance(state.params, params) <= 1e-5
        assert (state.step, state.cursor) == (15, 300)
    for state, _ in runs[1:]:  # bit-identical to the synchronous trainer
        jax.tree.map(np.testing.assert_array_equal, state.params, runs[0][0].params)


@pytest.mark.parametrize("sgd_momentum", [0.0, 0.5])
@pytest.mark.parametrize("kind", [Hogbatch, AdaptiveHogbatch])
def test_the_shared_model_follows_from_the_log(kind, sgd_momentum, float64):
    rows, log, optimizer = data(), [], optax.sgd(RATE, sgd_momentum or None)
    found, history, *_ = run(kind, rows, log=log, batches=[4, 16, 8], epochs=4, trainer={"optimizer": optimizer})
    np.testing.assert_allclose(found, expected_shared(log, rows, sgd_momentum), rtol=1e-9)
    assert covered(log, 96) == list(range(4 * 96))
    assert max(update.staleness for update in log) > 1
    assert [update.version for update in log] == list(range(1, len(log) + 1))
    assert history.more["updates"] == len(log)
    assert history.more["staleness"] == {
        str(k): sum(u.staleness == k for u in log) for k in sorted({u.staleness for u in log})
    }
    assert all(update.scale == update.span.count / 16 for update in log)


@pytest.mark.parametrize("sgd_momentum", [0.0, 0.5])
def test_merged_replicas_follow_from_the_log(sgd_momentum, float64):
    rows, log = data(), []
    options = {"batches": [4, 16, 8], "smallest": 4, "mega_batch": 64, "momentum": 0.9}
    optimizer = {"optimizer": optax.sgd(RATE, sgd_momentum or None)}
    found, _, sync, state = run(AdaptiveSgd, rows, log=log, epochs=4, trainer=optimizer, **options)
    expected = expected_merged(log, rows, [4, 16, 8], sync.bounds, 0.9, sgd_momentum)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert covered(log, 96) == list(range(4 * 96))
    assert max(update.version for update in log) >= 4
    assert {update.batch for update in log} > {4, 16}  # batches moved
    assert all(update.scale == update.span.count / (16 / 3 / (1 - 0.9)) for update in log)
    assert state.more is not None  # the velocity of the merges


@pytest.mark.parametrize("kind", FAMILY)
def test_converges_on_a_quadratic(kind):
    rows = data()
    options = {"mega_batch": 32} if kind is AdaptiveSgd else {}
    found, *_ = run(kind, rows, epochs=40, **options)
    np.testing.assert_allclose(found, least_squares(rows), atol=0.03)


@pytest.mark.parametrize("kind", FAMILY)
@pytest.mark.slow
def test_learns_the_digits(kind):
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
def test_a_seed_replays_the_same_interleaving_bit_for_bit(kind):
    rows, logs, found = data(), [[], [], []], []
    for log, seed in zip(logs, (5, 5, 6), strict=True):
        found.append(run(kind, rows, log=log, replay=VirtualSchedule(seed, 0.3, (1.0, 4.0, 2.0)))[0])
    assert logs[0] == logs[1]
    assert np.array_equal(found[0], found[1])
    assert [u.worker for u in logs[0]] != [u.worker for u in logs[2]]


def test_adaptive_batches_equalize_updates_and_compile_nothing():
    rows = data(960)
    fixed = run(Hogbatch, rows, batches=4)[1]
    ladder = {"engine": Chunked(rungs=[2, 4, 8, 16])}
    moved = run(AdaptiveHogbatch, rows, batches=4, smallest=2, trainer=ladder, epochs=6)[1]
    spread = lambda history: np.ptp(history.more["update_share"])
    assert spread(fixed) == pytest.approx((4 - 1) / 7, abs=0.05)  # in proportion to the speeds 1, 4, 2
    assert spread(moved) < spread(fixed) / 5
    assert len({tuple(r.more["batches"]) for r in moved.records}) > 2
    assert moved.recompiles_after_warmup == 0


def test_no_worker_idles_and_record_times_sum_to_the_utilization():
    history = run(Hogbatch, data(960))[1]
    assert min(history.more["utilization"]) > 0.97
    busy_W = np.sum([r.times_W for r in history.records], axis=0) / history.records[-1].seconds
    np.testing.assert_allclose(busy_W, history.more["utilization"], atol=0.03)
    assert sum(int(r.counts_W.sum()) for r in history.records) == 2 * 960


@pytest.mark.parametrize("bound", [0, 1, 2])
def test_staleness_stays_within_its_bound(bound, float64):
    rows, log = data(), []
    found, *_ = run(Hogbatch, rows, log=log, staleness_bound=bound, batches=[4, 4, 4])
    assert max(update.staleness for update in log) == bound
    assert covered(log, 96) == list(range(2 * 96))
    np.testing.assert_allclose(found, expected_shared(log, rows), rtol=1e-9)


def test_a_resumed_run_sees_every_sample_once(float64):
    rows, log = data(), []
    sync = Hogbatch(replay=UNEQUAL, on_update=log.append)
    with trainer_for(sync, 3) as trainer:
        state = trainer.init(initial_params())
        stop = lambda record, state: trainer.stop() if record.step == 5 else None
        state, history = trainer.fit(state, rows, epochs=2, hooks=[stop])
        assert len(log) < 24
        whole = [r.step for r in history.records if r.step <= state.step]  # the last may be partial
        saved = trainer.state_dict(state)
        assert saved["sync"]["state"]["undone"]  # ranges were in flight
    with trainer_for(Hogbatch(replay=7, on_update=log.append), 2) as trainer:  # other workers, another interleaving
        state = trainer.load_state_dict(saved, jax.tree.map(np.asarray, state))
        state, more = trainer.fit(state, rows, stop_at=2 * 96)
    assert covered(log, 96) == list(range(2 * 96))
    assert (state.step, state.cursor) == (12, 192)
    steps = whole + [r.step for r in more.records]
    assert steps == sorted(set(steps))


def test_the_summary_of_a_resumed_run_covers_both_parts():
    rows, log, records = data(), [], []
    sync = Hogbatch(replay=UNEQUAL, on_update=log.append)
    with trainer_for(sync, 3) as trainer:
        stop = lambda record, state: trainer.stop() if record.step == 5 else None
        state, history = trainer.fit(trainer.init(initial_params()), rows, epochs=2, hooks=[stop])
        records += [r for r in history.records if r.step <= state.step]
        assert len(records) < len(history.records)  # it stopped within a step
        saved, before = json.loads(json.dumps(trainer.state_dict(state))), len(log)
    with trainer_for(Hogbatch(replay=7, on_update=log.append), 3) as trainer:
        state, history = trainer.fit(
            trainer.load_state_dict(saved, jax.tree.map(np.asarray, state)), rows, stop_at=2 * 96
        )
        records += history.records
    summary, updates_W = history.more, np.bincount([u.worker for u in log])
    assert 0 < before < summary["updates"] == len(log)
    assert summary["update_share"] == (updates_W / len(log)).tolist()
    assert summary["staleness"] == {
        str(k): sum(u.staleness == k for u in log) for k in sorted({u.staleness for u in log})
    }
    np.testing.assert_array_equal(np.sum([r.more["updates"] for r in records], axis=0), updates_W)
    assert sum(int(r.counts_W.sum()) for r in records) == 2 * 96
    busy_W = np.sum([r.times_W for r in records], axis=0) / sum(r.step_time for r in records)
    np.testing.assert_allclose(busy_W, summary["utilization"], rtol=1e-6)


def test_resumed_batches_are_clipped_to_the_current_bounds():
    rows, log = data(), []
    with trainer_for(Hogbatch(replay=0, batches=16)) as trainer:
        state, _ = trainer.fit(trainer.init(initial_params()), rows, epochs=1)
        saved, state = trainer.state_dict(state), jax.tree.map(np.asarray, state)
    with trainer_for(Hogbatch(replay=0, on_update=log.append), capacity=8, engine=Chunked(rungs=[4, 8])) as trainer:
        trainer.fit(trainer.load_state_dict(saved, state), rows, epochs=1)
    assert {update.batch for update in log} == {8}


def test_a_replay_follows_speeds_that_change():
    """The first worker makes three of four updates until step 30, and then one of four."""
    swapped = lambda step: (np.array([3.0, 1.0] if step < 30 else [1.0, 3.0]), np.zeros(2))
    sync = Hogbatch(replay=0, batches=4)
    with trainer_for(sync, speeds=Simulation(swapped)) as trainer:
        _, history = trainer.fit(trainer.init(initial_params()), data(), epochs=10)
    updates_SxW = np.array([record.more["updates"] for record in history.records])
    for part_SxW, share in ((updates_SxW[:30], 0.75), (updates_SxW[30:], 0.25)):
        assert part_SxW[:, 0].sum() / part_SxW.sum() == pytest.approx(share, abs=0.04)


def test_model_state_advances_with_every_update():
    """The model state counts samples: each enters once."""

    def stateful(params, state, batch, keys, mask_b):
        return loss_fn(params, batch, keys), {"seen": mask_b.sum(dtype=np.float32)}

    advance = lambda state, sums: {"seen": state["seen"] + sums["seen"]}
    with trainer_for(Hogbatch(replay=0), 3, loss=stateful, advance=advance) as trainer:
        state = trainer.init(initial_params(), {"seen": np.zeros((), np.float32)})
        state, _ = trainer.fit(state, data(), epochs=2)
    assert float(state.model_state["seen"]) == 192


def test_a_schedule_counts_samples():
    rows, log = data(), []
    run(Hogbatch, rows, log=log, schedule=lambda step: 1 - step / 12, scale_rate=False)
    seen_U = np.cumsum([0] + [u.span.count for u in log[:-1]])
    assert log[0].rate == 1
    # The rate is that of when an item was taken, before updates by others.
    assert all(u.rate >= 1 - seen / 16 / 12 for u, seen in zip(log, seen_U, strict=True))
    assert log[-1].rate < 0.2
    assert {u.scale for u in log} == {1.0}


def test_the_gradient_scale_of_a_large_batch_is_capped():
    for options, scale in (
        ({}, 4.0),
        ({"rate_cap": 6.0}, 6.0),
        ({"rate_cap": np.inf}, 8.0),
        ({"scale_rate": False}, 1),
    ):
        log = []
        run(Hogbatch, data(), log=log, epochs=1, batches=16, reference=2, **options)
        assert {u.scale for u in log} == {scale}


def test_explicit_options_take_precedence_over_faithful():
    sync = Hogbatch(faithful=True, scale_rate=True, rate_cap=2.0)
    assert (sync.scale_rate, sync.rate_cap) == (True, 2.0)
    assert AdaptiveHogbatch(faithful=True, dead_zone=3, rate_cap=2.0).dead_zone == 3
    assert AdaptiveHogbatch(faithful=True).rate_cap == np.inf


def test_faithful_follows_the_papers():
    rows, log = data(), []
    run(Hogbatch, rows, log=log, batches=[4, 16, 8], faithful=True)
    assert {u.scale for u in log} == {1.0}
    assert AdaptiveHogbatch(faithful=True).dead_zone == 0
    log = []
    sync = run(AdaptiveSgd, rows, log=log, batches=16, faithful=True, mega_batch=64)[2]
    assert sync.momentum == 0.9
    assert {u.scale for u in log if u.span.count == 16} == {3.0}


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
def test_impossible_combinations_are_rejected(sync, options, words):
    with pytest.raises(ValueError, match=words), trainer_for(sync, **options) as trainer:
        trainer.fit(trainer.init(initial_params()), data(), epochs=1)


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
def test_options_out_of_range_are_rejected(make, words):
    with pytest.raises((ValueError, TypeError), match=words):
        make()
