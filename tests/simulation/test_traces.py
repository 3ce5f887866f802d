"""Trace files: speeds by step, and errors that name the file and the entry."""

import json

import numpy as np
import pytest

from hetjax.simulation.traces import read_trace


def written(folder, content):
    path = folder / "trace.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_changes_apply_from_their_step_on(tmp_path):
    changes = [{"step": 10, "speeds": [1, 0.1]}, {"step": 20, "startup": [0.0, 0.5]}]
    trace = read_trace(written(tmp_path, {"speeds": [1, 0.5], "startup": 0.01, "changes": changes}))
    for step, speeds, startup in [
        (0, [1, 0.5], [0.01, 0.01]),
        (9, [1, 0.5], [0.01, 0.01]),
        (10, [1, 0.1], [0.01, 0.01]),
        (20, [1, 0.1], [0, 0.5]),
        (999, [1, 0.1], [0, 0.5]),
    ]:
        np.testing.assert_array_equal(trace(step), (speeds, startup))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "is not JSON"),
        ([1, 2], "is not a trace"),
        ({"speeds": [1, 0]}, "speeds: Simulated speeds must be positive"),
        ({"speeds": ["fast"]}, "speeds is .*; expected numbers"),
        ({"speeds": ["1"]}, "speeds is .*; expected numbers"),
        ({"speeds": [True]}, "speeds is .*; expected numbers"),
        ({"speeds": [1], "startup": True}, "startup is True; expected numbers"),
        ({"speeds": [1, 10**400]}, "speeds: int too large"),
        pytest.param("[" * 100_000 + "]" * 100_000, "nested too deeply", id="deep"),
        ({"speeds": [1], "changes": 5}, "changes is 5; expected a list"),
        ({"speeds": [1], "changes": [{"step": True}]}, r"changes\[0\] is"),
        ({"speeds": [1], "change": []}, "holds change"),
        ({"speeds": [1], "changes": [{"speeds": [1]}]}, r"changes\[0\] is"),
        ({"speeds": [1], "changes": [{"step": 5}, {"step": 5}]}, "steps must increase"),
        ({"speeds": [1], "changes": [{"step": 5, "speeds": [1, 1]}]}, "a different number of speeds"),
    ],
)
def test_a_broken_trace_is_refused(content, words, tmp_path):
    with pytest.raises(ValueError, match=f"trace.json.*{words}"):
        read_trace(written(tmp_path, content))


def test_an_unreadable_trace_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="There is no trace file"):
        read_trace(tmp_path / "none.json")
    with pytest.raises(OSError, match="cannot be read"):
        read_trace(tmp_path)
