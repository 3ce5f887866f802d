"""The controller bench: its scores on hand-made runs, and one short trace from end to end."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "experiments"))

import bench_controllers
from benches import controller_traces

from hetjax.planning.simulator import SimulatedRun


def hand_made(times, changes=()):
    times_T = np.array(times, float)
    changed_T = np.isin(np.arange(len(times_T)), changes)
    return SimulatedRun(times_T, times_T, changed_T, np.zeros((len(times_T), 1), np.int64))


def test_regret_and_settling_by_hand():
    best_T = np.ones(10)
    score = bench_controllers.judge(hand_made([9, 3, 1.2, 1.2, 1.2, 1, 1, 1, 1, 1], [2, 5, 8]), best_T, best_T, delay=1)
    assert score.regret == pytest.approx(0.6 / 8)
    assert score.from_second_step == pytest.approx(2.6 / 9)
    assert score.uninformed == pytest.approx(6.0)
    assert score.worst_step == pytest.approx(1.2)
    assert score.settle == 2  # within 5% from step 5 on, after its second change
    never = bench_controllers.judge(hand_made([1, 1, 1, 2]), np.ones(4), np.ones(4), delay=0)
    assert never.settle == np.inf


@pytest.mark.parametrize("name", [*controller_traces.QUIET, *controller_traces.DISTURBED])
def test_traces_are_reproducible_and_differ_by_seed(name):
    build = (controller_traces.QUIET | controller_traces.DISTURBED)[name]
    one, again, other = build(60, 5), build(60, 5), build(60, 6)
    assert one.name == name
    np.testing.assert_array_equal(one.startup_TxW, again.startup_TxW)
    np.testing.assert_array_equal(one.per_work_TxW, again.per_work_TxW)
    np.testing.assert_array_equal(one.draw(5), again.draw(5))
    assert not np.array_equal(one.draw(5), other.draw(6))
    assert np.all(one.startup_TxW >= 0)
    assert np.all(one.per_work_TxW > 0)


def test_all_controllers_run_on_a_short_trace_and_beat_the_equal_split():
    name, _, scores = bench_controllers.bench(("hetero6", 60, 3))
    assert name == "hetero6"
    for delay in (0, 1):
        assert set(scores[delay]) == {"oracle+1", *bench_controllers.COLUMNS}
        regret = {column: score.regret for column, score in scores[delay].items()}
        assert regret["balanced"] < 0.05 < regret["equal"]
        assert all(x <= regret["equal"] for x in regret.values())
