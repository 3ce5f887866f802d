"""The cluster bench: its metrics on steps computed by hand, what it rejects, and a quick run."""

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
    _parse_controller,
    efficiency_by_round,
    figures,
    finite,
    joined,
    leads,
    main,
    noise_ceiling,
    pairs,
    recovery,
    table_of,
    unrest,
    use_by_round,
)
from benches.breakdown import breakdown, table
from benches.cluster_worker import fresh, swapped
from benches.torch_cluster import MODES, figures_of_torch
from benches.torch_cluster import SKIP as SKIP_IN_TORCH
from rich.console import Console

from hetjax.launch.quotas import QuotasRefused, find_cgroup_root

ROOT = Path(__file__).parents[2]


def run_of(times_TxW, step_times_T, counts_W=(30, 10)):
    times, steps = np.array(times_TxW, float), np.array(step_times_T, float)
    warm_up = np.full((SKIP, times.shape[1]), 9.0)
    return {
        "times": np.concatenate([warm_up, times]).tolist(),
        "step_times": [9.0] * SKIP + steps.tolist(),
        "counts": [list(counts_W)] * (SKIP + len(steps)),
        "changed": [True] * SKIP + [False] * (len(steps) - 1) + [True],
        "recompiles": 0,
    }


def test_figures_skip_the_first_steps():
    found = figures(run_of([[1.0, 3.0], [2.0, 1.0]], [3.5, 2.5]), batch=40)
    assert found["samples_per_s"] == pytest.approx(80 / 6)
    assert found["imbalance"] == pytest.approx((2.0 - 1.5) / 1.75)
    assert found["overhead_ms"] == pytest.approx(500)
    assert found["overhead_share"] == pytest.approx((0.5 / 3.5 + 0.5 / 2.5) / 2)
    assert found["changes"] == 1


def test_rounds_are_joined_without_the_first_step_of_the_further_ones():
    one, two = run_of([[1.0, 3.0]], [3.5]), {**run_of([[2.0, 1.0]], [2.5]), "recompiles": 2}
    short = {key: value if key == "recompiles" else value[-2:] for key, value in two.items()}
    whole = joined([one, short])
    assert whole["step_times"] == [*one["step_times"], 2.5]
    assert whole["times"] == [*one["times"], [2.0, 1.0]]
    assert whole["changed"] == [*one["changed"], *short["changed"]]
    assert whole["recompiles"] == 2


def test_pairs_compare_both_runs_in_units_of_the_ideals_around_them():
    """In the second round the machine is twice as slow while the second run has its turn."""
    quiet = lambda seconds: {"controller": "balanced", "quiet": run_of([[1.0, 1.0]], [seconds])}
    solo = lambda rate: {"solo": [rate, rate]}
    second = [solo(10.0), quiet(4.0), solo(10.0), {**quiet(2.0), "quiet": {"step_times": [9.0, 8.0]}}, solo(0.0)]
    first = {"balanced": [0.25, 0.75]}
    found = pairs(second, first, batch=40)
    assert found == {
        "balanced": [pytest.approx(100 * (40 / 4 / 20 / 0.25 - 1)), pytest.approx(100 * (5 / 10 / 0.75 - 1))]
    }


def test_the_noise_ceiling_is_that_of_shares_that_equalize_mean_times():
    """Worker 0 is alternately 50% slower and faster. Worker 1 is constant, with half the samples it could take."""
    run = run_of([[1.5, 0.5], [0.5, 0.5]], [2.0, 2.0])
    assert noise_ceiling(run, overhead_share=0.1) == pytest.approx(0.9 * ((1.25 / 1.5) + (0.75 / 1.0)) / 2)


def test_workers_on_the_bench_do_not_count_in_the_noise_ceiling():
    """Worker 2 is always on the bench, worker 1 in the last two steps."""
    two, none = run_of([[1.5, 0.5], [0.5, 0.5]], [2.0, 2.0]), [None]
    three = two | {"times": [[*row, *none] for row in two["times"]], "counts": [[30, 10, 0]] * len(two["counts"])}
    assert noise_ceiling(three, 0.1) == pytest.approx(noise_ceiling(two, 0.1))
    alone = {
        "times": [*three["times"], [1.0, None, None], [1.0, None, None]],
        "counts": [*three["counts"], *[[30, 0, 0]] * 2],
    }
    assert noise_ceiling(alone, 0.0) == pytest.approx(((1.25 / 1.5) + (0.75 / 1.0) + 1 + 1) / 4)
    found = figures(three | {"step_times": two["step_times"]}, batch=40)
    assert found == pytest.approx(figures(two, batch=40))


def test_no_controller_benches_if_asked():
    settings = {"controllers": [("balanced", "balanced", {}), ("equal", "equal", {})]}
    benches = lambda no: [controller.benches for controller in fresh(settings | {"no_bench": no}).values()]
    assert (benches(False), benches(True)) == ([True, False], [False, False])


def test_what_is_not_finite_is_null_in_the_results():
    given = {"a": float("nan"), "b": [1.0, (float("inf"), 2)], "c": {"d": np.float64("nan"), "e": "nan"}}
    assert finite(given) == {"a": None, "b": [1.0, [None, 2]], "c": {"d": None, "e": "nan"}}


def test_unrest_is_one_under_noise_and_larger_if_a_worker_slows_down():
    rng = np.random.default_rng(3)
    common = np.linspace(1.0, 2.0, 210)[:, None]  # a slower machine does not change relative speeds
    times = common * np.exp(rng.normal(0, 0.1, (210, 4)))
    quiet = run_of(times, times.max(axis=1), (8, 4, 2, 2))
    assert unrest(quiet) == pytest.approx(1.0, abs=0.5)
    times[105:, 1] *= 1.2
    assert unrest(run_of(times, times.max(axis=1), (8, 4, 2, 2))) > 5


def test_unrest_by_hand():
    """Log times of worker 0 relative to the mean: 1, 3 in every block except the last, where they are 5, 7."""
    own = np.array([1.0, 3.0] * 6 + [5.0, 7.0])
    times = np.exp(np.stack([own, -own], axis=1))
    between = 2 * np.var([2.0] * 6 + [6.0], ddof=1)  # means of two
    assert unrest(run_of(times, times.max(axis=1), (1, 1))) == pytest.approx(between / 2.0)


def test_recovery_counts_the_steps_until_one_is_within_15_percent():
    quiet, swaps = [1.0] * 20, [[3.0, 3.0, 1.2, 1.1] + [1.0] * 16, [3.0, 1.0] + [1.0] * 18, [2.0] * 20]
    assert recovery({"step_times": [*quiet, *(t for swap in swaps for t in swap)]}, every=20, swaps=3) == 3.0


def test_efficiency_is_relative_to_the_ideal_around_each_round():
    one = {"step_times": [9.0] * SKIP + [2.0, 2.0]}
    two = {"step_times": [9.0, 2.0, 3.0, 4.0]}  # its first step overlaps with nothing
    assert efficiency_by_round([one, two], 60, [40.0, 30.0]) == pytest.approx([30 / 40, 20 / 30])


def test_use_is_the_rate_over_the_sum_of_the_workers_rates():
    """60 samples in 2 s and 20 in 1 s are 50 per second; the step took 2.5 s. A step without timings is ignored."""
    untimed = [[np.nan, np.nan]]
    one = {"counts": [[60, 20]] * (SKIP + 2), "times": [[9, 9]] * SKIP + [[2, 1]] + untimed}
    one["step_times"] = [9.0] * SKIP + [2.5, 7.0]
    two = {"counts": [[60, 20]] * 3, "times": untimed + [[4, 2]] * 2, "step_times": [9.0, 5.0, 5.0]}
    assert use_by_round([one, two]) == pytest.approx([32 / 50, 16 / 25])


def test_leads_are_differences_within_the_same_rounds():
    by_round = {"equal": [0.4, 0.3, 0.5], "balanced": [0.8, 0.7, 0.9], "dbs": [0.9, 0.6, 0.9]}
    ahead = leads(by_round)
    assert ahead["equal"] == pytest.approx((0.4, 0.0))
    assert ahead["dbs"] == pytest.approx((0.0, 0.1 / 3**0.5))
    assert leads({"equal": [0.4]}) == {}


def test_the_table_fits_80_columns():
    row = {"samples_per_s": 12345.6, "imbalance": 0.0123, "overhead_ms": 123.4}
    row |= {"overhead_share": 0.123, "changes": 12, "recovery_steps": 30.0}
    out = StringIO()
    Console(file=out, width=200).print(table_of({"proportional@10": row}, {"proportional@10": [0.85, 0.87, 0.91]}))
    assert "0.877 ±0.018" in out.getvalue()
    assert max(len(line.rstrip()) for line in out.getvalue().splitlines()) <= 80


def test_the_fastest_and_the_slowest_are_swapped():
    assert swapped([0.4, 0.8, 0.1, 0.2]) == [0.4, 0.1, 0.8, 0.2]
    assert swapped([0.8, 0.4, 0.2, 0.2]) == [0.2, 0.4, 0.8, 0.2]
    assert swapped([0.5, 0.5]) == [0.5, 0.5]


@pytest.mark.parametrize("other", [0.2, None])  # None: it had no samples
def test_the_time_outside_belongs_to_the_process_that_was_slowest_in_a_step(other):
    phases_P = [
        [{"send": 0.5, "reduce": 0.5}, {"send": 0.003, "cut": 0.001, "gather": 0.002, "reduce": 0.008, "place": 0.001}],
        [{}, {"send": 0.1, "reduce": 0.1}],
    ]
    run = {"times": [[9, 9], [0.3, other]], "step_times": [9, 0.312], "phases": phases_P}
    found = breakdown(run, skip=1)
    assert found["outside_ms"] == pytest.approx(12) == pytest.approx(sum(found["by_cause"].values()))
    assert found["by_cause"]["send"] == pytest.approx(3)
    assert found["by_cause"]["cut"] == pytest.approx(1)
    assert found["by_cause"]["rest of the exchange"] == pytest.approx(2)
    assert found["by_cause"]["host, before and after"] == pytest.approx(3)
    assert found["by_process"][1]["send"] == pytest.approx(100)
    assert table(found).row_count == len(found["by_cause"]) + 1


def test_rounds_of_phases_are_joined_like_their_steps():
    one = {"counts": [1, 2], "times": [1, 2], "step_times": [1, 2], "changed": [], "recompiles": 0}
    first, later = one | {"phases": [["a", "b"], ["c", "d"]]}, one | {"phases": [["e", "f"], ["g", "h"]]}
    assert joined([first, later])["phases"] == [["a", "b", "f"], ["c", "d", "h"]]


def test_figures_of_torch_are_relative_to_the_rates_around_each_turn():
    steps = [9.0] * SKIP_IN_TORCH + [0.5] * 4
    times = [[9.0, 9.0]] * SKIP_IN_TORCH + [[0.4, 0.3]] * 4
    turn = [{"step_times": steps, "times": times, "solo": [100, 60], "solo_after": [80, 80]} for _ in MODES]
    for row in figures_of_torch([turn, turn], batch=64).values():
        assert row["samples_per_s"] == pytest.approx(128)
        assert row["efficiency_by_round"] == pytest.approx([0.8, 0.8])
        assert row["overhead_ms"] == pytest.approx(100)


def test_names_and_periods_of_controllers():
    assert _parse_controller("dbs") == ("dbs@5", "dbs", {"every": 5})  # not DBS as published: the table says so
    assert _parse_controller("dbs@7") == ("dbs@7", "dbs", {"every": 7})
    assert _parse_controller("balanced") == ("balanced", "balanced", {})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"controllers": "equal,best"}, "no controller 'best'"),
        ({"steps": 11}, "11 steps in 7 rounds: give 12 steps or more"),
        ({"rounds": 0}, "give 12 steps or more, in 1 round or more"),
        ({"swap_every": 9}, "--swap-every is 9: give 10 steps or more"),
        ({"quotas": "0.8,x"}, "--quotas is '0.8,x'"),
        ({"quotas": "0.8"}, "two processes or more"),
        ({"against": "hidden=5"}, "--against is 'hidden=5': give transport=, update= or wire="),
        ({"against": "transport=mesh,transport=host"}, "once each"),
        ({"against": "update="}, "--against is 'update='"),
        ({"quotas": "0.8,0"}, "A quota is a number of cores"),
        ({"wire": "foo"}, "--wire is 'foo': give auto, float32, bfloat16 or int8."),
        ({"delay": 3}, "--delay is 3: give 0 or 1."),
        ({"transport": "pigeon"}, "--transport is 'pigeon': give auto, mesh or host."),
        ({"against": "wire=foo"}, "--wire is 'foo'"),
        ({"wire": "int8", "update": "replicated"}, "--wire and --delay need the transport host"),
        ({"delay": 1, "against": "transport=mesh"}, "--wire and --delay need the transport host"),
        ({"breakdown": True, "delay": 1}, "the exchange runs beside them: give one of the two."),
        ({"with_torch": True, "torch_python": "/no/python"}, "--with-torch needs PyTorch, which /no/python cannot"),
        ({"with_torch": True, "torch_python": "/bin/false"}, 'Install it with `pip install -e ".[bench]"`'),
    ],
)
def test_invalid_arguments_are_rejected_with_a_message(given, message, capsys):
    assert main(**given) == 2
    assert message in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(("steps", "rounds"), [(12, 1), (30, 2), (36, 3), (210, 7)])
def test_few_steps_reduce_the_rounds_and_refused_quotas_are_reported(steps, rounds, monkeypatch, capsys):
    requested = []

    def refuse(settings, limit):
        requested.append((settings["steps"], settings["rounds"]))
        raise QuotasRefused("CPU quotas cannot be set here.")

    monkeypatch.setattr(bench_cluster, "run_cluster", refuse)
    assert main(steps=steps) == 2
    assert requested == [(steps, rounds)]
    assert capsys.readouterr().out == "error: CPU quotas cannot be set here.\n"


@pytest.mark.slow
def test_a_quick_run(tmp_path):
    try:
        home = find_cgroup_root()
    except QuotasRefused as refused:
        pytest.skip(str(refused))
    path = tmp_path / "cluster.json"
    command = [sys.executable, "experiments/bench_cluster.py", "--quick", "--swap-every", "15", "--breakdown"]
    environment = os.environ | {"XLA_FLAGS": quick_compiles.FLAGS}
    bench = subprocess.Popen(
        [*command, "--batch-size", "64", "--json", str(path)], cwd=ROOT, env=environment | {"PYTHONPATH": str(ROOT)},
        start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        output, _ = bench.communicate(timeout=280)
    finally:
        bench.terminate()
        bench.wait(timeout=20)
    assert bench.returncode == 0, output
    results = json.loads(path.read_text())
    assert results["ideal_samples_per_s"] > 0
    for key in ("samples_per_s", "efficiency", "use", "imbalance", "overhead_share", "recovery_steps"):
        assert set(results[key]) == {"equal", "balanced"}
    for name in ("equal", "balanced"):
        (efficiency,) = results["details"]["efficiency_by_round"][name]
        assert 0 < results["efficiency"][name] == pytest.approx(efficiency)
        assert results["recovery_steps"][name] <= results["details"]["swap_every"]
    assert results["lead"] == pytest.approx(
        {"equal": results["efficiency"]["balanced"] - results["efficiency"]["equal"]}
    )
    causes = results["breakdown"]["equal"]["by_cause"]
    assert causes["send"] > 0
    assert causes["update"] > 0
    assert all(map(np.isfinite, results["breakdown"]["balanced"]["by_cause"].values()))  # also with one on the bench
    leftover = subprocess.run(["ps", "-o", "args=", "-s", str(bench.pid)], capture_output=True, text=True).stdout
    assert leftover == ""
    assert not list(home.path.rglob(f"hetjax-{bench.pid}-*"))
