"""Generations as JSON values."""

import json

import pytest

from hetjax.fleet.generations import Generation, Member

MEMBERS = (Member(0, "tcp://a:1", "ipc://@x", "boot", {"kinds": ["cpu"]}), Member(4, "tcp://b:1"))


def test_a_generation_survives_json():
    generation = Generation(3, b"12345678", MEMBERS, "Member 2 left.")
    assert Generation.from_json(json.loads(json.dumps(generation.to_json()))) == generation
    assert generation.numbers == (0, 4)


@pytest.mark.parametrize("values", [{}, {"members": 3}, {"members": [{}]}, {"members": [7]}, {"number": "x"}])
def test_other_values_are_refused(values):
    complete = {**Generation(1, b"", ()).to_json(), **values} if values else values
    with pytest.raises(ValueError):
        Generation.from_json(complete)
