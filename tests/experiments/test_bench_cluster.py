"""The figures of the cluster bench, on stretches of steps whose figures can be worked out by hand."""

import numpy as np
import pytest
from bench_cluster import SKIP, _made, figures, joined, main, noise_ceiling, recovery


def stretch(times_TxW, step_times_T, counts_W=(30, 10)):
    times, steps = np.array(times_TxW, float), np.array(step_times_T, float)
    rubbish = np.full((SKIP, times.shape[1]), 9.0)
    return {
        "times": np.concatenate([rubbish, times]).tolist(),
        "step_times": [9.0] * SKIP + steps.tolist(),
        "counts": [list(counts_W)] * (SKIP + len(steps)),
        "changed": [True] * SKIP + [False] * (len(steps) - 1) + [True],
        "recompiles": 0,
    }


def test_figures_leave_the_first_steps_aside():
    found = figures(stretch([[1.0, 3.0], [2.0, 1.0]], [3.5, 2.5]), batch=40, ideal=20.0)
    assert found["samples_per_s"] == pytest.approx(80 / 6)
    assert found["efficiency"] == pytest.approx(80 / 6 / 20)
    assert found["imbalance"] == pytest.approx((2.0 - 1.5) / 1.75)
    assert found["overhead_ms"] == pytest.approx(500)
    assert found["overhead_share"] == pytest.approx((0.5 / 3.5 + 0.5 / 2.5) / 2)
    assert found["changes"] == 1


def test_rounds_are_joined_without_the_first_step_of_the_further_ones():
    one, two = stretch([[1.0, 3.0]], [3.5]), {**stretch([[2.0, 1.0]], [2.5]), "recompiles": 2}
    short = {key: value if key == "recompiles" else value[-2:] for key, value in two.items()}
    whole = joined([one, short])
    assert whole["step_times"] == [*one["step_times"], 2.5]
    assert whole["times"] == [*one["times"], [2.0, 1.0]]
    assert whole["changed"] == [*one["changed"], *short["changed"]]
    assert whole["recompiles"] == 2


def test_the_ceiling_is_that_of_shares_which_are_right_on_average():
    """Worker 0 is as often 50% slow as 50% fast. Worker 1 is steady, but has half the samples that it could do."""
    seen = stretch([[1.5, 0.5], [0.5, 0.5]], [2.0, 2.0])
    assert noise_ceiling(seen, overhead_share=0.1) == pytest.approx(0.9 * ((1.25 / 1.5) + (0.75 / 1.0)) / 2)


def test_recovery_counts_the_steps_until_one_is_back():
    quiet, swaps = [1.0] * 20, [[3.0, 3.0, 1.2, 1.1] + [1.0] * 16, [3.0, 1.0] + [1.0] * 18, [2.0] * 20]
    assert recovery({"step_times": [*quiet, *(t for swap in swaps for t in swap)]}, every=20, swaps=3) == 3.0


def test_names_and_cadences():
    assert _made("dbs") == ("dbs", {"every": 5})
    assert _made("dbs@7") == ("dbs", {"every": 7})
    assert _made("balanced") == ("balanced", {})
    with pytest.raises(ValueError, match="no controller 'best'"):
        main(controllers="equal,best")
    with pytest.raises(ValueError, match="30 steps cannot be made in 4 rounds"):
        main(steps=30, rounds=4)
