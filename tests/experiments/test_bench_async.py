"""The benchmark of asynchronous training: its definitions by hand, and a short run end to end."""

import json
from dataclasses import replace

import bench_async
import pytest
from bench_async import ALONE, SLOW_ALONE, SYNCS, make_trainer, medians, row_time, verdict
from benches.async_problems import digits

from hetjax import Simulation
from hetjax.data import MemorySource
from hetjax.simulation.speeds import constant


def test_the_shortest_phase_lasts_as_long_as_stated():
    for ratio in (4, 16, 64):
        slow, fast = bench_async.SMALLEST * row_time(ratio), bench_async.LARGEST * row_time(ratio) / ratio
        assert min(slow, fast) == pytest.approx(bench_async.PHASE)


def test_medians_over_seeds_and_a_target_missed_once_is_missed():
    runs = [
        {"time_to_target_s": 3.0, "update_share": [0.2, 0.8]},
        {"time_to_target_s": 1.0, "update_share": [0.4, 0.6]},
        {"time_to_target_s": 2.0, "update_share": [0.3, 0.7]},
    ]
    assert medians(runs) == {"time_to_target_s": 2.0, "update_share": [0.3, 0.7], "seeds": 3}
    runs[1]["time_to_target_s"] = None
    assert medians(runs)["time_to_target_s"] is None


def test_the_fast_worker_alone_is_one_worker_with_its_own_batch():
    for sync, batch in ALONE.items():
        with make_trainer(digits(), sync, Simulation(constant([4.0]), row_time=1e-3)) as trainer:
            assert (len(trainer.workers), trainer.batch_size) == (1, batch)


def test_the_slow_worker_alone_is_hogwild():
    """Every thread updates the model with its part of a small batch, at the speed of the slow worker."""
    assert bench_async.speeds_of(SLOW_ALONE, 16.0) == [1.0]
    problem, updates = digits(), []
    with make_trainer(problem, SLOW_ALONE, Simulation(constant([1.0]), row_time=1e-4)) as trainer:
        trainer.sync.on_update = updates.append
        trainer.fit(trainer.init(problem.params(0)), MemorySource(problem.rows), steps=2)
    assert len(trainer.workers) == 1
    assert {update.thread for update in updates} == set(range(bench_async.THREADS))
    assert [update.span.count for update in updates] == [bench_async.SMALLEST // bench_async.THREADS] * len(updates)
    assert len(updates) == 2 * bench_async.BATCH * bench_async.THREADS // bench_async.SMALLEST


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        ({"balanced": 2.0, "hogbatch": 3.0, "adaptive-sgd": 9.0}, "balanced synchronous training is the better choice"),
        ({"balanced": 3.0, "hogbatch": 2.0}, "hogbatch is the better choice"),
        ({"balanced": 3.0, "hogbatch": 2.0, "alone-slow": 1.0}, "hogbatch is the better choice"),
        ({"balanced": 2.0, "hogbatch": 2.01}, "equally fast"),
        ({"balanced": None, "hogbatch": 2.0}, "only asynchronous"),
        ({"balanced": 2.0, "hogbatch": None}, "no asynchronous"),
        ({"balanced": None, "hogbatch": None}, "no training reached"),
    ],
)
def test_the_verdict_names_the_better_choice(seconds, words):
    assert words in verdict("1:4", {sync: {"time_to_target_s": s} for sync, s in seconds.items()})


@pytest.mark.slow
def test_a_short_benchmark_end_to_end(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench_async, "PHASE", 0.004)
    monkeypatch.setattr(bench_async, "digits", lambda: replace(easy, target=1.9))
    monkeypatch.setattr(bench_async, "simulated_speed_up", lambda: 2.0)
    easy, charged, figures_of = digits(), [], bench_async.run_figures
    monkeypatch.setattr(
        bench_async, "run_figures", lambda history, hook: charged.append(history) or figures_of(history, hook)
    )
    bench_async.main(tmp_path / "found.json", quick=True)
    (ratio,) = found = json.loads((tmp_path / "found.json").read_text())
    assert ratio == "1:16"
    assert set(found[ratio]) == set(SYNCS)
    for figures in found[ratio].values():
        assert figures.keys() >= {"utilization", "time_to_target_s", "samples_to_target", "update_share"}
        assert 0 < figures["utilization"] <= 1.01
        assert figures["time_to_target_s"] > 0
        assert sum(figures["update_share"]) == pytest.approx(1)
    equal, balanced = found[ratio]["equal"], found[ratio]["balanced"]
    assert equal["samples_to_target"] == balanced["samples_to_target"]  # the same training, run and not derived,
    steps = equal["samples_to_target"] / bench_async.BATCH
    assert equal["updates"] >= steps
    # and the first steps of balanced, of equal counts, are charged: later ones take a tenth of their time.
    longest = bench_async.BATCH / 2 * row_time(16)
    assert equal["time_to_target_s"] > 0.9 * steps * longest
    assert balanced["time_to_target_s"] > 2 * 0.9 * longest
    (history,) = [history for history in charged if history.controller == "balanced"]
    assert history.counts[:2].tolist() == [[bench_async.BATCH // 2] * 2] * 2
    assert "choice" in capsys.readouterr().out
