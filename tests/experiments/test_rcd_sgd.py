"""The RCD-SGD study: its arithmetic by hand, and two rows of its table."""

import json

import numpy as np
import pytest
from studies import rcd_sgd
from studies.rcd_sgd import Args, Curve

from hetjax.sync import AllReduce, Decentralized

pytestmark = pytest.mark.slow


def test_where_a_curve_reaches_the_target():
    curve = Curve([10, 20, 30], [1.0, 2.0, 3.0], [0.5, 0.3, 0.1], [0.0] * 3, [4.0, 8.0, 12.0], 0.0)
    assert curve.reached(0.2, "step") == pytest.approx(25)  # halfway from 0.3 to 0.1
    assert curve.reached(0.2, "sent_mb") == pytest.approx(10)
    assert curve.reached(0.6, "seconds") == 1
    assert str(curve.reached(0.05, "step")) == "nan"


def test_how_often_a_worker_sends():
    assert rcd_sgd.sent(Decentralized("ring", 2), 4, 10, 0) == 2 * 5  # to both neighbors, in steps 0, 2, 4, 6, 8
    assert rcd_sgd.sent(Decentralized("complete", 3), 4, 10, 0) == 1.5 * 4
    assert rcd_sgd.sent(AllReduce(), 4, 10, 0) == 1.5 * 10
    drawn = rcd_sgd.sent(Decentralized("ring", 1, matcha_budget=0.5), 4, 1000, 0)
    assert 900 < drawn < 1100  # two matchings, each in half of the steps


def test_two_rows_of_the_table(tmp_path, monkeypatch):
    chosen = [row for row in rcd_sgd.setups(Args()) if (row.name, row.every) in (("random", 2), ("graph-cut", 2))]
    monkeypatch.setattr(rcd_sgd, "setups", lambda args: chosen)
    found = tmp_path / "found.json"
    rows = rcd_sgd.main(Args(speeds="1,0.5", seeds=1, epochs=1, batch_size=256, row_time=0.01, target=2.25, json=found))
    assert [(row["line"], row["every"]) for row in rows] == [("random", 2), ("graph-cut", 2)]
    assert rows[0]["against_random"] == 1
    for row in rows:
        assert 1 <= row["steps"] <= 6
        assert row["link_seconds"] > row["seconds"] > 0
        assert 0 <= row["accuracy"] <= 1
    kept = json.loads(found.read_text())
    assert kept["rows"] == rows
    assert kept["curves"]["random, F=2"][0]["step"][-1] == 6


def test_a_missed_target_is_null_in_the_file(tmp_path, monkeypatch):
    curve = {"step": [1], "seconds": [1.0], "loss": [0.5], "accuracy": [0.4], "sent_mb": [1.0], "overruns": 0.0}
    monkeypatch.setattr(rcd_sgd, "measure", lambda args, console: {"random, F=1": [curve]})
    rcd_sgd.main(Args(seeds=1, target=0.1, json=tmp_path / "found.json"))
    (row,) = json.loads((tmp_path / "found.json").read_text(), parse_constant=pytest.fail)["rows"]
    assert (row["steps"], row["against_random"], row["accuracy"]) == (None, None, 0.4)


def test_the_table_has_all_blocks_and_rules():
    named = {(row.name, row.every) for row in rcd_sgd.setups(Args())}
    kinds = ("random", "class-balanced", "facility-location", "graph-cut")
    assert {(kind, every) for kind in kinds for every in (1, 2)} <= named
    assert {(f"{kinds[2]}, {rule}", 2) for rule in ("min-block", "per-rate", "fill")} <= named
    quick = rcd_sgd.setups(Args(quick=True))
    assert len(quick) == 12
    assert (quick[0].name, quick[0].every) == ("even", 1)  # where the paper starts
    assert [row.name for row in quick if row.matcha] == ["random, MATCHA", "facility-location, MATCHA"]


def test_even_blocks_are_of_equal_size_and_matcha_is_compared_with_random_blocks_under_matcha():
    task = rcd_sgd.make_task("digits", "mlp", seed=0, hidden=(4,), dropout=0.0)
    blocks = rcd_sgd.setups(Args())[0].blocks(task, np.array([4.0, 2.0, 1.0, 1.0]), 0)
    assert np.ptp(np.bincount(blocks.owner_D)) <= 1
    curve = lambda steps: {
        "step": [0, steps], "seconds": [0.0, 1.0], "loss": [1.0, 0.0], "accuracy": [0.0] * 2, "sent_mb": [0.0, 1.0],
        "overruns": 0.0,
    }  # fmt: skip
    found = {"random, F=2": [curve(10)], "random, MATCHA, F=2": [curve(40)], "graph-cut, MATCHA, F=2": [curve(20)]}
    rows = rcd_sgd.summary(Args(target=0.1), found)
    assert [row["against_random"] for row in rows] == [1, 1, 0.5]
