"""Entries of per-worker lists belong to members: after a loss, the survivors of an elastic run keep theirs."""

import jax
import numpy as np
import pytest
from tiny_problem import trainer_for

from hetjax import Chunked, Simulation
from hetjax.devices.workers import Workers
from hetjax.engines.specs import per_worker
from hetjax.fleet.membership import kept_entries
from hetjax.simulation.speeds import constant
from hetjax.sync.topology import topology


def lost(processes, *members):
    return {"HETJAX_PROCESSES": str(processes), "HETJAX_LOST": ",".join(map(str, members))}


@pytest.fixture
def two_of_three(monkeypatch):
    """The environment of an elastic run that lost process 1 of 3."""
    for name, value in lost(2, 1).items():
        monkeypatch.setenv(name, value)


def test_entries_follow_the_members():
    assert kept_entries(3, 2, lost(2, 1)) == [0, 2]
    assert kept_entries(3, 1, lost(1, 0, 1)) == [2]
    assert kept_entries(6, 4, lost(2, 0)) == [2, 3, 4, 5]  # two workers in each process
    assert kept_entries(3, 3, {}) == kept_entries(3, 2, {}) == [0, 1, 2]


def test_a_list_that_does_not_match_the_launched_processes_is_unchanged():
    assert kept_entries(1, 2, lost(2, 1)) == [0]  # one number for all
    assert kept_entries(2, 2, lost(2, 1)) == [0, 1]  # for the current workers
    assert kept_entries(4, 2, lost(2, 1)) == [0, 1, 2, 3]  # the caller rejects its length
    assert kept_entries(6, 3, lost(2, 1)) == [0, 1, 2, 3, 4, 5]


def test_speeds_capacity_and_max_rows_of_the_survivors(two_of_three):
    devices, ladder = jax.devices()[:2], Chunked(max_rows=[9, 1, 4], rungs=[4, 16])
    assert per_worker("capacity", [10, 20, 30], 1, Workers.of(devices)).tolist() == [10, 30]
    for speeds in ([1, 0.5, 0.7], Simulation(constant([1, 0.5, 0.7], [0.1, 0.2, 0.3]))):
        trainer, source, state = trainer_for(devices, speeds=speeds, capacity=[9, 1, 7], engine=ladder)
        assert trainer.simulation.trace(0)[0].tolist() == [1, 0.7]
    trainer.simulation.row_time = 1e-5
    with trainer:
        _, history = trainer.fit(state, source, steps=1)
    assert history.records[0].counts_W.tolist() == [9, 7]


def test_lists_of_a_wrong_length_are_rejected(two_of_three):
    with pytest.raises(ValueError, match="Speeds were given for 4 workers, but there are 2"):
        trainer_for(jax.devices()[:2], speeds=[1, 0.5, 0.7, 1])
    with pytest.raises(ValueError, match="capacity lists 4 numbers for 2 workers"):
        per_worker("capacity", [1, 2, 3, 4], 1, Workers.of(jax.devices()[:2]))


def test_a_mixing_matrix_drops_the_lost_worker():
    kept = lambda entries, workers: kept_entries(entries, workers, lost(3, 1))
    chain = np.array([[0.6, 0.2, 0, 0.2], [0.2, 0.4, 0.4, 0], [0, 0.4, 0.4, 0.2], [0.2, 0, 0.2, 0.6]])
    found, _ = topology(chain, 3, kept)
    np.testing.assert_allclose(found, [[0.8, 0, 0.2], [0, 0.8, 0.2], [0.2, 0.2, 0.6]])
    star = np.array([[2, 1, 0], [1, 1, 1], [0, 1, 2]]) / 3
    with pytest.raises(ValueError, match="without the lost workers, never brings all workers together"):
        topology(star, 2, lambda entries, workers: kept_entries(entries, workers, lost(2, 1)))
