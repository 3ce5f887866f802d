"""Trackers: what was logged can be read back, also after a kill."""

import json
import sys
import types

import jax.numpy as jnp
import numpy as np
import pytest

from hetjax.report import Composite, JsonlTracker, TensorBoardTracker
from hetjax.report.trackers import WandbTracker, plain, scalars

ROW = {
    "epoch": 0,
    "loss": np.float32(0.5),
    "counts": np.array([3, 1]),
    "times": np.array([0.1, np.nan]),
    "changed": np.bool_(True),
    "reason": "first plan",
    "metrics": {"accuracy": jnp.float32(0.25)},
}


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def refuse(name):
    raise AssertionError(f"{name} is not JSON")


def test_a_row_comes_back_as_json(tmp_path):
    tracker = JsonlTracker(tmp_path)
    tracker.log(7, ROW)
    written = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse)  # before close: flushed
    assert written == {
        "step": 7,
        "epoch": 0,
        "loss": 0.5,
        "counts": [3, 1],
        "times": [0.1, None],
        "changed": True,
        "reason": "first plan",
        "metrics": {"accuracy": 0.25},
    }
    tracker.summary({"efficiency": np.float64(0.9), "ideal_samples_per_s": float("inf")})
    tracker.close()
    assert json.loads((tmp_path / "summary.json").read_text()) == {"efficiency": 0.9, "ideal_samples_per_s": None}


def test_a_resumed_run_continues_where_it_was(tmp_path):
    tracker = JsonlTracker(tmp_path)
    for step in range(1, 7):
        tracker.log(step, {"loss": step})
    tracker.summary({"steps": 6})
    tracker.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "los')  # killed here
    tracker = JsonlTracker(tmp_path, done=3)
    tracker.log(4, {"loss": 40})
    assert not (tmp_path / "summary.json").exists()
    tracker.close()
    assert [(row["step"], row["loss"]) for row in lines(tmp_path)] == [(1, 1), (2, 2), (3, 3), (4, 40)]


def test_a_run_that_comes_to_no_row_leaves_the_earlier_one_as_it_was(tmp_path):
    tracker = JsonlTracker(tmp_path)
    tracker.log(1, {"loss": 5})
    tracker.summary({"steps": 1})
    tracker.close()
    JsonlTracker(tmp_path).close()
    assert lines(tmp_path) == [{"step": 1, "loss": 5}]
    assert json.loads((tmp_path / "summary.json").read_text()) == {"steps": 1}


def test_a_new_run_does_not_keep_the_old_one(tmp_path):
    for loss in (5, 6):
        tracker = JsonlTracker(tmp_path)
        for step in range(3):  # whatever its steps are called
            tracker.log(step, {"loss": loss})
        tracker.close()
    assert [row["loss"] for row in lines(tmp_path)] == [6, 6, 6]


def test_composite_tells_all_in_order():
    told = []

    class Listener:
        def __init__(self, name):
            self.name = name

        def log(self, step, row):
            told.append((self.name, step, row["loss"]))

        def summary(self, values):
            told.append((self.name, values))

        def close(self):
            told.append((self.name, "closed"))

    both = Composite(Listener("a"), Listener("b"))
    both.log(1, {"loss": 2})
    both.summary({"x": 1})
    both.close()
    assert told == [("a", 1, 2), ("b", 1, 2), ("a", {"x": 1}), ("b", {"x": 1}), ("a", "closed"), ("b", "closed")]


def test_scalars_name_workers_and_leave_out_what_is_no_number():
    assert dict(scalars(ROW)) == {
        "epoch": 0,
        "loss": 0.5,
        "counts/worker 0": 3,
        "counts/worker 1": 1,
        "times/worker 0": 0.1,
        "changed": 1,
        "metrics/accuracy": 0.25,
    }


def test_plain_leaves_json_alone():
    value = {"a": [1, 2.5, "x", None, True, {"b": []}]}
    assert plain(value) == value


def test_tensorboard_gets_every_number(tmp_path):
    pytest.importorskip("tensorboardX", reason="needs the extra 'track'")
    tracker = TensorBoardTracker(tmp_path)
    tracker.log(3, ROW)
    tracker.summary({"efficiency": 0.9, "engine": "chunked"})
    tracker.close()
    content = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    for name in (b"loss", b"counts/worker_1", b"metrics/accuracy", b"summary/efficiency", b"chunked"):
        assert name in content, name


def test_a_missing_package_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(ImportError, match=r"hetjax\[track\]"):
        TensorBoardTracker(tmp_path)
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ImportError, match="pip install wandb"):
        WandbTracker("project")


def test_wandb_is_told_through_its_own_interface(monkeypatch):
    """Against a stand-in: the real package wants an account or a daemon."""
    calls = []
    run = types.SimpleNamespace(
        log=lambda values, step: calls.append((step, values)), summary={}, finish=lambda: calls.append("finished")
    )
    stand_in = types.ModuleType("wandb")
    stand_in.init = lambda **options: calls.append(options) or run
    monkeypatch.setitem(sys.modules, "wandb", stand_in)
    tracker = WandbTracker("hetjax", name="try", config={"speeds": np.array([1.0, 0.5])})
    tracker.log(2, {"loss": 0.5, "reason": "why"})
    tracker.summary({"efficiency": 0.9})
    tracker.close()
    assert calls[0] == {"project": "hetjax", "name": "try", "config": {"speeds": [1.0, 0.5]}, "dir": None}
    assert calls[1:] == [(2, {"loss": 0.5}), "finished"]
    assert run.summary == {"efficiency": 0.9}
