"""Long runs: records and metrics.jsonl stay bounded, and totals do not depend on which records were kept."""

import json
from dataclasses import replace

import numpy as np
import pytest

from hetjax.history import History, Record
from hetjax.report import JsonlTracker, read_run, report
from hetjax.thinning import LIMIT, Thinning

COUNTS, TIMES = np.array([3, 1]), np.array([0.5, np.nan])
COUNTS.setflags(write=False)


def record(step, changed=False, nonfinite=()):
    seconds = 0.5 * step
    return Record(
        step, 0, 1 / step, {}, COUNTS, COUNTS, TIMES, 0.5, seconds, 4 * step, changed, "", nonfinite=nonfinite
    )  # fmt: skip


def filled(steps, limit=LIMIT, event=lambda step: False):
    history = History(thinning=Thinning(limit), ideal_samples_per_s=9.0)
    for step in range(1, steps + 1):
        history.add(record(step, changed=event(step)))
    return history


def steps_of(history):
    return np.array([record.step for record in history.records])


def test_a_long_history_is_bounded_and_its_summary_counts_every_step():
    made = 3 * LIMIT
    history = filled(made, event=lambda step: step % 1000 == 7)
    steps = steps_of(history)
    assert LIMIT / 4 <= len(steps) <= LIMIT
    assert (steps[0], steps[-1]) == (1, made)
    assert set(range(7, made, 1000)) <= set(steps.tolist())  # the events
    assert np.diff(steps).max() < 4 * made / len(steps)  # evenly spread
    summary = history.summary()
    assert (summary["steps"], summary["samples"], summary["plan_changes"]) == (made, 4 * made, made // 1000)
    assert (summary["wall_s"], summary["samples_per_s"], summary["final_loss"]) == (made / 2, 8, 1 / made)
    assert history.own_rates() == 6


@pytest.mark.parametrize("steps", [1, 2, 99, 100, 101, 399, 3000])
def test_a_thinned_history_has_the_same_totals(steps):
    event = lambda step: step % 11 == 0
    whole, thinned = filled(steps, 10**9, event), filled(steps, 100, event)
    assert len(whole.records) == steps
    assert len(thinned.records) <= 100
    assert whole.summary() == thinned.summary()
    assert whole.own_rates() == thinned.own_rates()
    assert whole.samples_per_s(skip=3) == pytest.approx(thinned.samples_per_s(skip=3), nan_ok=True)
    assert {1, steps} <= set(steps_of(thinned).tolist()) <= set(range(1, steps + 1))


def test_nothing_is_dropped_up_to_the_limit():
    assert steps_of(filled(100, 100)).tolist() == list(range(1, 101))


@pytest.mark.parametrize("event", [lambda step: True, lambda step: step % 40 == 2, lambda step: step % 2 == 0])
def test_many_events_are_thinned_evenly(event):
    history = filled(20_000, 400, event)
    assert len(history.records) <= 400
    kept = [record.step for record in history.records if record.changed]
    shares, _ = np.histogram(kept, bins=4, range=(0, 20_000))
    assert shares.min() > 0.7 * len(kept) / 4 > 10


def test_a_nonfinite_step_is_kept():
    history = filled(500, 100)
    history.add(record(501, nonfinite=(1,)))
    for step in range(502, 2000):
        history.add(record(step))
    assert 501 in steps_of(history)


@pytest.mark.parametrize(("ideal", "efficiency"), [(16.0, 0.5), (None, 8 / 6)])  # real: 3 samples in 0.5 s, 1 untimed
def test_efficiency_is_the_throughput_over_the_ideal(ideal, efficiency):
    step = replace(record(3), ideal=ideal)
    assert step.samples_per_s == 8  # 4 samples in 0.5 s
    assert step.efficiency == pytest.approx(efficiency)


# -- metrics.jsonl --


def log(tracker, steps):
    for step in steps:
        row = record(step, changed=step % 100 == 7).row()
        tracker.log(row.pop("step"), row)


def rows(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(("limit", "steps"), [(100, 5000), pytest.param(LIMIT, 200_000, marks=pytest.mark.slow)])
def test_long_metrics_are_bounded_and_can_be_drawn(tmp_path, limit, steps):
    tracker, most = JsonlTracker(tmp_path, limit=limit), 0
    for first in range(1, steps, steps // 20):
        log(tracker, range(first, first + steps // 20))
        most = max(most, len(rows(tmp_path)))
    tracker.summary({"steps": steps})
    tracker.close()
    kept = [row["step"] for row in rows(tmp_path)]
    assert limit / 4 <= len(kept) <= limit
    assert most <= limit
    assert (kept[0], kept[-1]) == (1, steps)
    assert np.diff(kept).max() < 4 * steps / len(kept)
    assert rows(tmp_path)[-1]["samples"] == 4 * steps
    assert not read_run(tmp_path).warnings[1:]  # there is no config.json
    assert report(tmp_path).page.is_file()


def test_a_resumed_run_continues_thinned_metrics(tmp_path):
    """Also after a kill, when the last row may be an old one."""
    done = 0
    for until in (230, 777, 1500, 1501):
        tracker = JsonlTracker(tmp_path, done=done, limit=100)
        log(tracker, range(done + 1, until + 100))  # the last 99 are repeated after the resume
        kept = [row["step"] for row in rows(tmp_path)]
        assert len(kept) <= 100
        assert kept == sorted(set(kept))
        done = until
    tracker = JsonlTracker(tmp_path, done=done, limit=100)
    log(tracker, [done + 1])
    tracker.close()
    tracker.close()  # does nothing more
    kept = [row["step"] for row in rows(tmp_path)]
    assert (kept[0], kept[-1]) == (1, 1502)
    assert set(range(7, 1500, 100)) <= set(kept)
