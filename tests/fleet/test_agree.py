"""Options of one process that do not fit are an error in all processes, with the same sentence."""

import jax
import pytest
from fake_link import act_as
from tiny_problem import trainer_for

from hetjax.fleet.agree import problems_shared

WRONG = "memory lists 3 numbers for 2 workers: give one number, or one per worker."


def test_the_problem_of_one_process_is_raised_in_all(monkeypatch):
    act_as(monkeypatch, 0, gathered=lambda own: [own, WRONG])
    with pytest.raises(ValueError, match=f"^Process 1: {WRONG}$"), problems_shared():
        pass
    act_as(monkeypatch, 1, gathered=lambda own: [None, own])
    with pytest.raises(ValueError, match=f"^Process 1: {WRONG}$"), problems_shared():
        raise ValueError(WRONG)


def test_a_problem_of_all_processes_is_named_once(monkeypatch):
    act_as(monkeypatch, 0, gathered=lambda own: [own, own])
    with problems_shared():
        pass
    with pytest.raises(ValueError, match=f"^{WRONG}$"), problems_shared():
        raise ValueError(WRONG)


def test_lists_of_a_wrong_length_are_refused_on_all_sides(monkeypatch):
    """Otherwise a process with a good list would wait for the others."""
    act_as(monkeypatch, 0, gathered=lambda own: [own, WRONG] if own is None else [own, own])
    with pytest.raises(ValueError, match=f"^Process 1: {WRONG}$"):
        trainer_for(jax.devices()[:1])
    for options in ({"memory": [1, 2, 3]}, {"capacity": [9, 9, 9]}, {"speeds": [1, 1, 1]}):
        with pytest.raises(ValueError, match=r" 3 .*2"):
            trainer_for(jax.devices()[:1], **options)
