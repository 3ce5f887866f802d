"""Several processes and one disk: what the first one reads, or fails to, all get. Processes are played one by one."""

import jax
import numpy as np
import pytest
from fake_trainer import FakeTrainer

from hetjax import checkpoint
from hetjax.checkpoint import resume
from hetjax.reduce.update import State


@pytest.fixture
def as_process(monkeypatch):
    """Be one process of two: what process 0 sends is kept, and is what process 1 receives."""
    sent = []

    def be(process):
        received = iter(list(sent))
        monkeypatch.setattr(jax, "process_count", lambda: 2)
        monkeypatch.setattr(jax, "process_index", lambda: process)
        take = lambda content: sent.append(content) or content if process == 0 else next(received)
        monkeypatch.setattr(resume, "from_first", take)
        monkeypatch.setattr(resume, "gather", lambda value: [value])

    return be


def state_of(value, step):
    params = {"w": np.full((2, 3), value, np.float32), "half": np.full(3, value, jax.numpy.bfloat16)}
    return State(params, None, {"empty": np.zeros((0, 2), np.int32)}, None, step, 10 * step)


def test_all_get_what_the_first_one_reads(tmp_path, as_process):
    checkpoint.save(tmp_path, state_of(1.5, 4), FakeTrainer({"law": "x"}), {"seconds": 2.0})
    as_process(0)
    first = checkpoint.restore_latest(tmp_path, state_of(0, 0), FakeTrainer())
    as_process(1)
    trainer = FakeTrainer()
    second = checkpoint.restore_latest(tmp_path / "another disk", state_of(0, 0), trainer)
    for found in (first, second):
        assert (found.state.step, found.state.cursor, found.extra) == (4, 40, {"seconds": 2.0})
        for mine, saved in zip(jax.tree.leaves(found.state.core), jax.tree.leaves(state_of(1.5, 4).core), strict=True):
            assert mine.dtype == saved.dtype
            np.testing.assert_array_equal(mine, saved)
    assert trainer.recalled == {"law": "x"}


def test_all_learn_that_there_is_nothing(tmp_path, as_process):
    for process in (0, 1):
        as_process(process)
        assert checkpoint.restore_latest(tmp_path, state_of(0, 0), FakeTrainer()) is None


def test_the_error_of_the_first_one_is_everybodys(tmp_path, as_process):
    path = checkpoint.save(tmp_path, state_of(1, 4), FakeTrainer())
    (path / "run.json").unlink()
    for process in (0, 1):
        as_process(process)
        with pytest.raises(ValueError, match=r"run\.json is missing since it was written"):
            checkpoint.restore(path, state_of(0, 0), FakeTrainer())
