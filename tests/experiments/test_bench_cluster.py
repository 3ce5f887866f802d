"""The cluster bench: its figures on stretches of steps worked out by hand, what it refuses, and a quick run of it."""

import json
import os
import subprocess
import sys
from io import StringIO
from pathlib import Path

import bench_cluster
import numpy as np
import pytest
import quick_compiles
from bench_cluster import (
    SKIP,
    _made,
    efficiency_by_round,
    figures,
    joined,
    leads,
    main,
    noise_ceiling,
    recovery,
    table_of,
    unrest,
    use_by_round,
)
from benches.cluster_worker import swapped
from rich.console import Console

from hetjax.launch.quotas import QuotasRefused, find_cgroup_root

ROOT = Path(__file__).parents[2]


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
    found = figures(stretch([[1.0, 3.0], [2.0, 1.0]], [3.5, 2.5]), batch=40)
    assert found["samples_per_s"] == pytest.approx(80 / 6)
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


def test_unrest_is_one_in_noise_and_more_where_a_worker_becomes_slower():
    seed = 3
    rng = np.random.default_rng(seed)
    print(f"seed {seed}")
    common = np.linspace(1.0, 2.0, 210)[:, None]  # a machine that becomes slower moves nobody against the others
    times = common * np.exp(rng.normal(0, 0.1, (210, 4)))
    quiet = stretch(times, times.max(axis=1), (8, 4, 2, 2))
    assert unrest(quiet) == pytest.approx(1.0, abs=0.5)
    times[105:, 1] *= 1.2
    assert unrest(stretch(times, times.max(axis=1), (8, 4, 2, 2))) > 5


def test_unrest_by_hand():
    """Logarithms of the times of worker 0 against the mean: 1, 3 in every block but the last, where they are 5, 7."""
    own = np.array([1.0, 3.0] * 6 + [5.0, 7.0])
    times = np.exp(np.stack([own, -own], axis=1))
    between = 2 * np.var([2.0] * 6 + [6.0], ddof=1)  # means of two
    assert unrest(stretch(times, times.max(axis=1), (1, 1))) == pytest.approx(between / 2.0)


def test_recovery_counts_the_steps_until_one_is_back():
    quiet, swaps = [1.0] * 20, [[3.0, 3.0, 1.2, 1.1] + [1.0] * 16, [3.0, 1.0] + [1.0] * 18, [2.0] * 20]
    assert recovery({"step_times": [*quiet, *(t for swap in swaps for t in swap)]}, every=20, swaps=3) == 3.0


def test_every_round_is_seen_beside_the_speeds_around_it():
    one = {"step_times": [9.0] * SKIP + [2.0, 2.0]}
    two = {"step_times": [9.0, 2.0, 3.0, 4.0]}  # nothing overlaps with its first step
    assert efficiency_by_round([one, two], 60, [40.0, 30.0]) == pytest.approx([30 / 40, 20 / 30])


def test_use_is_the_rate_over_what_the_workers_did_in_their_own_times():
    """60 samples in 2 s and 20 in 1 s are 50 a second; the step took 2.5 s. A step without timings says nothing."""
    nothing = [[np.nan, np.nan]]
    one = {"counts": [[60, 20]] * (SKIP + 2), "times": [[9, 9]] * SKIP + [[2, 1]] + nothing}
    one["step_times"] = [9.0] * SKIP + [2.5, 7.0]
    two = {"counts": [[60, 20]] * 3, "times": nothing + [[4, 2]] * 2, "step_times": [9.0, 5.0, 5.0]}
    assert use_by_round([one, two]) == pytest.approx([32 / 50, 16 / 25])


def test_leads_are_differences_within_the_same_rounds():
    by_round = {"equal": [0.4, 0.3, 0.5], "balanced": [0.8, 0.7, 0.9], "dbs": [0.9, 0.6, 0.9]}
    ahead = leads(by_round)
    assert ahead["equal"] == pytest.approx((0.4, 0.0))
    assert ahead["dbs"] == pytest.approx((0.0, 0.1 / 3**0.5))
    assert leads({"equal": [0.4]}) == {}


def test_the_table_fits_80_columns():
    seen = {"samples_per_s": 12345.6, "imbalance": 0.0123, "overhead_ms": 123.4}
    seen |= {"overhead_share": 0.123, "changes": 12, "recovery_steps": 30.0}
    out = StringIO()
    Console(file=out, width=200).print(table_of({"proportional@10": seen}, {"proportional@10": [0.85, 0.87, 0.91]}))
    assert "0.877 ±0.018" in out.getvalue()
    assert max(len(line.rstrip()) for line in out.getvalue().splitlines()) <= 80


def test_the_fastest_and_the_slowest_are_swapped():
    assert swapped([0.4, 0.8, 0.1, 0.2]) == [0.4, 0.1, 0.8, 0.2]
    assert swapped([0.8, 0.4, 0.2, 0.2]) == [0.2, 0.4, 0.8, 0.2]
    assert swapped([0.5, 0.5]) == [0.5, 0.5]


def test_names_and_cadences():
    assert _made("dbs") == ("dbs", {"every": 5})
    assert _made("dbs@7") == ("dbs", {"every": 7})
    assert _made("balanced") == ("balanced", {})


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"controllers": "equal,best"}, "no controller 'best'"),
        ({"steps": 11}, "11 steps in 7 rounds: give 12 steps or more"),
        ({"rounds": 0}, "give 12 steps or more, in 1 round or more"),
        ({"swap_every": 9}, "--swap-every is 9: give 10 steps or more"),
        ({"quotas": "0.8,x"}, "--quotas is '0.8,x'"),
        ({"quotas": "0.8"}, "two processes or more"),
        ({"quotas": "0.8,0"}, "A quota is a number of cores"),
    ],
)
def test_a_mistake_is_answered_by_a_sentence(given, told, capsys):
    assert main(**given) == 2
    assert told in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(("steps", "rounds"), [(12, 1), (30, 2), (36, 3), (210, 7)])
def test_few_steps_are_made_in_fewer_rounds_and_refused_quotas_are_a_sentence(steps, rounds, monkeypatch, capsys):
    asked = []

    def refuse(orders, limit):
        asked.append((orders["steps"], orders["rounds"]))
        raise QuotasRefused("CPU quotas cannot be set here.")

    monkeypatch.setattr(bench_cluster, "run_cluster", refuse)
    assert main(steps=steps) == 2
    assert asked == [(steps, rounds)]
    assert capsys.readouterr().out == "error: CPU quotas cannot be set here.\n"


@pytest.mark.slow
def test_a_quick_run(tmp_path):
    try:
        home = find_cgroup_root()
    except QuotasRefused as refused:
        pytest.skip(str(refused))
    path = tmp_path / "cluster.json"
    command = [sys.executable, "experiments/bench_cluster.py", "--quick", "--swap-every", "15"]
    kept = os.environ | {"XLA_FLAGS": quick_compiles.FLAGS}
    bench = subprocess.Popen(
        [*command, "--batch-size", "64", "--json", str(path)], cwd=ROOT, env=kept | {"PYTHONPATH": str(ROOT)},
        start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        said, _ = bench.communicate(timeout=240)
    finally:
        bench.terminate()
        bench.wait(timeout=20)
    assert bench.returncode == 0, said
    found = json.loads(path.read_text())
    assert found["ideal_samples_per_s"] > 0
    for key in ("samples_per_s", "efficiency", "use", "imbalance", "overhead_share", "recovery_steps"):
        assert set(found[key]) == {"equal", "balanced"}
    for name in ("equal", "balanced"):
        (efficiency,) = found["details"]["efficiency_by_round"][name]
        assert 0 < found["efficiency"][name] == pytest.approx(efficiency)
        assert found["recovery_steps"][name] <= found["details"]["swap_every"]
    assert found["lead"] == pytest.approx({"equal": found["efficiency"]["balanced"] - found["efficiency"]["equal"]})
    left = subprocess.run(["ps", "-o", "args=", "-s", str(bench.pid)], capture_output=True, text=True).stdout
    assert left == ""
    assert not list(home.path.rglob(f"hetjax-{bench.pid}-*"))
