"""Strategies: presets that exist, axes that override them, and combinations that are refused."""

import pytest

from hetjax.plan.controllers import REGISTRY
from hetjax.strategies import CONTROLLERS, PRESETS, resolve


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_preset_makes_its_controller(name):
    said, strategy = resolve(name)
    assert said == name
    assert strategy.make_controller().name == strategy.controller
    assert strategy.idea


def test_every_controller_but_the_oracle_can_be_asked_for():
    assert set(CONTROLLERS) == set(REGISTRY) - {"oracle"}
    assert {resolve(controller=name)[1].controller for name in CONTROLLERS} == set(CONTROLLERS)


def test_an_axis_wins_over_the_preset():
    name, strategy = resolve("dbs", partition="global", engine="masked", every=5, faithful=True)
    assert (name, strategy.partition, strategy.engine) == ("dbs", "global", "masked")
    assert strategy.options == {"every": 5, "faithful": True}
    assert resolve("dbs", controller="dp")[1].controller == "dp"


def test_fixed_blocks_go_with_fixed_counts():
    name, strategy = resolve(partition="submodular")
    assert (name, strategy.controller, strategy.sync) == ("static", "static", "allreduce")
    _, strategy = resolve("rcd-sgd")
    assert (strategy.controller, strategy.partition, strategy.sync) == ("static", "submodular", "decentralised")
    assert strategy.make_sync().mix_every == 2


def test_options_of_the_sync():
    _, strategy = resolve(sync="decentralised", faithful=True, sync_options={"mix_every": 3, "topology": None})
    assert strategy.sync_options == {"mix_every": 3, "faithful": True}
    made = strategy.make_sync()
    assert (made.name, made.mix_every, made.faithful, made.topology) == ("decentralised", 3, True, "ring")


def test_syncs_without_a_barrier_plan_nothing():
    name, strategy = resolve(
        sync="adaptive-hogbatch", faithful=True, sync_options={"staleness_bound": 2, "rate_cap": 3.0}
    )
    assert (name, strategy.asynchronous) == ("adaptive-hogbatch", True)
    made = strategy.make_sync(schedule=lambda step: 1.0)
    assert (made.name, made.staleness_bound, made.dead_zone, made.rate_cap) == ("adaptive-hogbatch", 2, 0, 3.0)
    assert not resolve("balanced")[1].asynchronous


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        ({"preset": "daso", "controller": "dbs", "partition": "proportional"}, "parts of the global order"),
        ({"preset": "best"}, "There is no strategy 'best'"),
        ({"controller": "balanced", "partition": "proportional"}, "once an epoch"),
        ({"controller": "dbs", "partition": "proportional", "every": 5}, "once an epoch"),
        ({"controller": "balanced", "faithful": True}, "weighs all samples alike"),
        ({"controller": "balanced", "every": 5}, "no cadence"),
        ({"sync_options": {"mix_every": 2}}, "option of the sync decentralised, not of 'allreduce'"),
        ({"engine": "fast"}, "There is no engine 'fast'"),
        ({"controller": "balanced", "partition": "submodular"}, "for good"),
        ({"preset": "dbs", "partition": "submodular"}, "for good"),
        ({"sync": "hogbatch", "controller": "balanced"}, "nothing to plan"),
        ({"preset": "dbs", "sync": "hogbatch"}, "gives every worker its own"),
        ({"preset": "adaptive-sgd", "engine": "looped"}, "every worker runs alone"),
        ({"preset": "adaptive-sgd", "sync_options": {"staleness_bound": 2}}, "not of 'adaptive-sgd'"),
    ],
)
def test_what_makes_no_sense_is_refused(asked, sentence):
    with pytest.raises(ValueError, match=sentence):
        resolve(**asked)
