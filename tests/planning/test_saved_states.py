"""Controller states in checkpoints: their JSON layout is fixed, and a state saved earlier is continued exactly."""

from __future__ import annotations

import json

import numpy as np
import pytest

from hetjax.planning.controllers import REGISTRY, Observation, make
from hetjax.planning.limits import Limits

# Per controller: the state after 6 steps of 16 samples on 2 workers, as saved by hand-written state_dict methods; and
# the counts of the next steps, in which worker 1 is faster.
SAVED: dict[str, tuple[str, list[list[int]]]] = {
    "balanced": (
        """
        {"controller": "balanced", "workers": 2, "usual": 16, "short": 0, "counts_W": [12, 4], "since": 4,
        "calm": 5, "calm_before": 5, "looks": 0, "looks_before": 0, "unrest": 0.0, "planned": true, "away":
        false, "before_W": null, "idle_W": [0, 0], "trials_W": [0, 0], "tried": -1, "tried_seen": 0, "model":
        {"startup_W": [0.17707748410836224, 0.11315239981539946], "per_work_W": [0.4842075247271674,
        1.342044975621102], "var_ss_W": [0.33721312130394127, 1.347484889909665], "var_sp_W":
        [-0.02995950557386352, -0.31390832704575267], "var_pp_W": [0.003188385498475695, 0.07756416241640601],
        "seen_W": [6, 6], "noise": 0.10249651514311331, "weight": 18.0, "ratio_W": [0.964631575957447,
        1.0353684240425531], "doubt_W": [false, false], "kept_5xW": [[0.0, 0.0], [0.0, 0.0], [0.0, 0.0], [0.0,
        0.0], [0.0, 0.0]], "away_W": [0, 0], "evidence_W": [0.0, 0.0], "lasting": 0.0, "passing": 0.0,
        "sums_2xSxW": [[[0.024449568973832353, -0.959641258675307], [0.06553256206488307,
        -0.22592288943920869], [0.2113623439499647, -0.639456499085854], [0.0, 0.0], [0.0, 0.0], [0.0, 0.0]],
        [[0.0, 0.0], [0.024449568973832353, -0.959641258675307], [0.024449568973832353, -0.959641258675307],
        [0.23581191292379705, -1.599097757761161], [0.23581191292379705, -1.599097757761161],
        [0.23581191292379705, -1.599097757761161]]], "clock": 5, "age_W": [5, 5], "work_W": [12.0, 4.0],
        "steady_W": [4, 4], "jumped": false, "passed": false, "shifted": false, "common":
        1.4849943545851673e-05, "common_weight": 21.0}}
        """,
        [[12, 4]],
    ),
    "dbs": (
        """
        {"controller": "dbs", "workers": 2, "usual": 16, "short": 0, "counts_W": [12, 4], "sum_n_W": [24.0,
        8.0], "sum_t_W": [12.0, 11.0], "timed_W": [2, 2], "gathered": 2, "epoch": 1}
        """,
        [[12, 4], [12, 4], [10, 6], [10, 6], [10, 6], [10, 6]],
    ),
    "dp": (
        """
        {"controller": "dp", "workers": 2, "usual": 16, "short": 0, "counts_W": [12, 4], "sum_n_W": [24.0,
        8.0], "sum_t_W": [12.0, 11.0], "timed_W": [2, 2], "gathered": 2, "epoch": 1, "share_W":
        [0.7333333333333333, 0.26666666666666666]}
        """,
        [[12, 4], [12, 4], [10, 6], [10, 6], [10, 6], [10, 6]],
    ),
    "edp": (
        """
        {"controller": "edp", "workers": 2, "usual": 16, "short": 0, "counts_W": [12, 4], "sum_n_W": [24.0,
        8.0], "sum_t_W": [12.0, 11.0], "timed_W": [2, 2], "gathered": 2, "epoch": 1, "share_W":
        [0.7333333333333333, 0.26666666666666666]}
        """,
        [[12, 4], [12, 4], [10, 6], [10, 6], [10, 6], [10, 6]],
    ),
    "equal": (
        """
        {"controller": "equal", "workers": 2, "usual": 16, "short": 0, "counts_W": [8, 8]}
        """,
        [[8, 8], [8, 8], [8, 8], [8, 8], [8, 8], [8, 8]],
    ),
    "fixed:3,1": (
        """
        {"controller": "fixed", "workers": 2, "usual": 16, "short": 0, "counts_W": [12, 4]}
        """,
        [[12, 4], [12, 4], [12, 4], [12, 4], [12, 4], [12, 4]],
    ),
    "lbb": (
        """
        {"controller": "lbb", "workers": 2, "usual": 16, "short": 0, "counts_W": [6, 10], "steps": 5, "cool":
        0, "sums_5xW": [[4.68559, 4.68559], [35.48472, 39.48472], [17.74236, 53.794880000000006], [271.87776,
        335.87776], [135.93888, 455.35904000000005]], "last_W": [3.0, 12.5], "fresh": true}
        """,
        [[10, 6], [6, 10], [10, 6], [6, 10], [10, 6], [10, 6]],
    ),
    "lbbsp": (
        """
        {"controller": "lbbsp", "workers": 2, "usual": 16, "short": 0, "counts_W": [13, 3], "sum_n_W": [13.0,
        3.0], "sum_t_W": [6.5, 3.75], "timed_W": [1, 1], "gathered": 1, "epoch": 0, "delta": 5, "window": 5,
        "last_slow": 1, "last_fast": 0}
        """,
        [[13, 3], [13, 3], [13, 3], [13, 3], [11, 5], [11, 5]],
    ),
    "oracle": (
        """
        {"controller": "oracle", "workers": 2, "usual": 16, "short": 0, "counts_W": [12, 4], "step": 6}
        """,
        [[12, 4], [12, 4], [12, 4], [12, 4], [12, 4], [12, 4]],
    ),
    "proportional": (
        """
        {"controller": "proportional", "workers": 2, "usual": 16, "short": 0, "counts_W": [12, 4], "sum_n_W":
        [24.0, 8.0], "sum_t_W": [12.0, 11.0], "timed_W": [2, 2], "gathered": 2, "epoch": 1, "time_W": [6.0,
        5.7]}
        """,
        [[12, 4], [12, 4], [10, 6], [10, 6], [10, 6], [10, 6]],
    ),
    "static": (
        """
        {"controller": "static", "workers": 2, "usual": 16, "short": 0, "counts_W": [12, 4], "share_W": [0.75,
        0.25]}
        """,
        [[12, 4], [12, 4], [12, 4], [12, 4], [12, 4], [12, 4]],
    ),
}
OPTIONS = {"oracle": {"costs": lambda step: (np.zeros(2), np.array([1.0, 3.0]))}}


def test_every_controller_is_covered():
    assert {name.partition(":")[0] for name in SAVED} == REGISTRY.keys()


@pytest.mark.parametrize("name", SAVED)
def test_a_saved_state_keeps_its_layout_and_is_continued(name):
    saved, counts = SAVED[name]
    controller, limits = make(name, **OPTIONS.get(name, {})), Limits.plain(2, 16)
    controller.load_state_dict(json.loads(saved))
    assert json.dumps(controller.state_dict()) == json.dumps(json.loads(saved))
    for step, expected in enumerate(counts, start=6):
        plan = controller.plan(16, limits, step // 4)
        assert plan.counts_W.tolist() == expected
        times_W = plan.counts_W * np.array([0.5, 0.25])
        controller.observe(Observation(plan.counts_W, limits.work(plan.counts_W), times_W, step // 4, step))
