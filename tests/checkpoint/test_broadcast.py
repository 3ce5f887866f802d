"""Only process 0 reads checkpoints: all processes get its result or its error. Processes are simulated in turn."""

import jax
import numpy as np
import pytest
from fake_link import act_as
from fake_trainer import FakeTrainer
from saved_states import assert_trees_equal

from hetjax import checkpoint
from hetjax.state import State


@pytest.fixture
def as_process(monkeypatch):
    """Act as one process of two; what process 0 broadcasts is stored for process 1."""
    sent = []

    def act_as_process(process):
        received = iter(list(sent))
        broadcast = lambda content: sent.append(content) or content if process == 0 else next(received)
        act_as(monkeypatch, process, gathered=lambda value: [value], broadcast=broadcast)

    return act_as_process


def state_of(value, step):
    params = {"w": np.full((2, 3), value, np.float32), "half": np.full(3, value, jax.numpy.bfloat16)}
    return State(params, None, {"empty": np.zeros((0, 2), np.int32)}, None, step, 10 * step)


def test_all_processes_get_what_process_0_reads(tmp_path, as_process):
    checkpoint.save(tmp_path, state_of(1.5, 4), FakeTrainer({"memory": "x"}), {"seconds": 2.0})
    as_process(0)
    first = checkpoint.restore_latest(tmp_path, state_of(0, 0), FakeTrainer())
    as_process(1)
    trainer = FakeTrainer()
    second = checkpoint.restore_latest(tmp_path / "another disk", state_of(0, 0), trainer)
    for found in (first, second):
        assert (found.state.step, found.state.cursor, found.extra) == (4, 40, {"seconds": 2.0})
        assert_trees_equal(found.state.core, state_of(1.5, 4).core)
    assert trainer.recalled == {"memory": "x"}


def test_all_processes_learn_that_there_is_no_checkpoint(tmp_path, as_process):
    for process in (0, 1):
        as_process(process)
        assert checkpoint.restore_latest(tmp_path, state_of(0, 0), FakeTrainer()) is None


def test_all_processes_raise_the_error_of_process_0(tmp_path, as_process):
    path = checkpoint.save(tmp_path, state_of(1, 4), FakeTrainer())
    (path / "run.json").unlink()
    for process in (0, 1):
        as_process(process)
        with pytest.raises(ValueError, match=r"run\.json is missing since it was written"):
            checkpoint.restore(path, state_of(0, 0), FakeTrainer())
