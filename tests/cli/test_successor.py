"""Who writes the run folder of an elastic fleet: one process after the other, without a gap."""

from types import SimpleNamespace

import numpy as np

from hetjax import processes
from hetjax.cli.training.configs import Config
from hetjax.cli.training.output import Successor
from hetjax.history import Record
from hetjax.report import read_run


def record(step, seconds, changed=False):
    return Record(step, 0, 1.0 / step, {}, np.array([4]), np.array([4]), np.array([0.1]), 0.5, seconds, 4 * step,
                  changed, "")  # fmt: skip


def test_every_step_is_written_once_by_whoever_comes_first(tmp_path, monkeypatch):
    """Process 1 joins at step 4, by its clock at 0.5 s, and comes first in steps 6 to 9; then process 0 does again."""
    first, writers = [0], {}
    monkeypatch.setattr(processes, "elastic", lambda: 2)
    for step in range(1, 14):
        first[0] = int(6 <= step < 10)
        for process in (0, 1):
            monkeypatch.setattr(processes, "first", lambda process=process: first[0] == process)
            if process == 1 and step < 4:
                continue
            if process not in writers:
                writers[process] = Successor(Config(), "run", tmp_path, 0)
            seconds = 0.5 * step if process == 0 else 0.5 * (step - 3)
            writers[process](record(step, seconds, changed=step == 8), SimpleNamespace(cursor=4 * step))
    run = read_run(tmp_path)
    assert run.step_S.tolist() == list(range(1, 14))
    np.testing.assert_allclose(run.seconds_S, 0.5 * np.arange(1, 14))
    assert run.samples_S.tolist() == [4 * step for step in range(1, 14)]
    assert writers[0].plan_changes == 1


def test_a_process_that_comes_first_only_at_the_end_writes_what_is_missing(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "elastic", lambda: 2)
    monkeypatch.setattr(processes, "first", lambda: True)
    lost = Successor(Config(), "run", tmp_path, 0)
    lost(record(1, 0.5), SimpleNamespace(cursor=4))
    monkeypatch.setattr(processes, "first", lambda: False)
    other = Successor(Config(), "run", tmp_path, 0)
    for step in (1, 2, 3):
        other(record(step, 0.5 * step), SimpleNamespace(cursor=4 * step))
    monkeypatch.setattr(processes, "first", lambda: True)
    other.succeed(ends=True)
    other.tracker.summary({"steps": 3})
    other.tracker.close()
    run = read_run(tmp_path)
    assert run.step_S.tolist() == [1, 2, 3]
    assert run.summary == {"steps": 3}
