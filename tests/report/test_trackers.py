"""Trackers: logged rows can be read back, also after a kill."""

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


def test_a_row_is_written_as_strict_json(tmp_path):
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


def test_a_resumed_run_keeps_the_rows_before_it_and_replaces_later_ones(tmp_path):
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


def test_a_run_without_rows_leaves_the_files_of_an_earlier_run_unchanged(tmp_path):
    tracker = JsonlTracker(tmp_path)
    tracker.log(1, {"loss": 5})
    tracker.summary({"steps": 1})
    tracker.close()
    JsonlTracker(tmp_path).close()
    assert lines(tmp_path) == [{"step": 1, "loss": 5}]
    assert json.loads((tmp_path / "summary.json").read_text()) == {"steps": 1}


def test_a_new_run_replaces_the_rows_of_an_earlier_one(tmp_path):
    for loss in (5, 6):
        tracker = JsonlTracker(tmp_path)
        for step in range(3):
            tracker.log(step, {"loss": loss})
        tracker.close()
    assert [row["loss"] for row in lines(tmp_path)] == [6, 6, 6]


def test_composite_calls_its_trackers_in_order():
    calls = []

    class Listener:
        def __init__(self, name):
            self.name = name

        def log(self, step, row):
            calls.append((self.name, step, row["loss"]))

        def summary(self, values):
            calls.append((self.name, values))

        def close(self):
            calls.append((self.name, "closed"))

    both = Composite(Listener("a"), Listener("b"))
    both.log(1, {"loss": 2})
    both.summary({"x": 1})
    both.close()
    assert calls == [("a", 1, 2), ("b", 1, 2), ("a", {"x": 1}), ("b", {"x": 1}), ("a", "closed"), ("b", "closed")]


def test_scalars_are_named_by_worker_and_skip_text_and_nan():
    assert dict(scalars(ROW)) == {
        "epoch": 0,
        "loss": 0.5,
        "counts/worker 0": 3,
        "counts/worker 1": 1,
        "times/worker 0": 0.1,
        "changed": 1,
        "metrics/accuracy": 0.25,
    }


def test_plain_does_not_change_json_values():
    value = {"a": [1, 2.5, "x", None, True, {"b": []}]}
    assert plain(value) == value


def test_tensorboard_gets_every_number_and_the_summary(tmp_path):
    pytest.importorskip("tensorboardX", reason="needs the extra 'track'")
    tracker = TensorBoardTracker(tmp_path)
    tracker.log(3, ROW)
    tracker.summary({"efficiency": 0.9, "engine": "chunked"})
    tracker.close()
    content = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    for name in (b"loss", b"counts/worker_1", b"metrics/accuracy", b"summary/efficiency", b"chunked"):
        assert name in content, name


def test_the_error_for_a_missing_package_names_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(ImportError, match=r"hetjax\[track\]"):
        TensorBoardTracker(tmp_path)
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ImportError, match="pip install wandb"):
        WandbTracker("project")


def test_wandb_gets_numbers_summary_and_finish(monkeypatch):
    """With a fake module, because the real one needs an account or a daemon."""
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
