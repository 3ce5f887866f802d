"""Strategies: presets, axes that override them, and refused combinations."""

import functools
import warnings

import jax
import optax
import pytest

from hetjax import Step, Trainer, sync
from hetjax.planning import controllers
from hetjax.planning.controllers import REGISTRY
from hetjax.presets import CONTROLLERS, PRESETS, choose, options_of


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_preset_builds_what_it_names(name):
    chosen, preset = choose(name), PRESETS[name]
    assert chosen.name == name
    assert (chosen.controller.name, chosen.partition, chosen.sync.name) == (
        preset.controller,
        preset.partition,
        preset.sync,
    )
    assert preset.idea


def test_every_controller_but_the_oracle_can_be_chosen():
    assert set(CONTROLLERS) == set(REGISTRY) - {"oracle"}
    names = [name if name != "fixed" else "fixed:1,2" for name in CONTROLLERS]
    assert {choose(controller=name).controller.name for name in names} == set(CONTROLLERS)


def test_an_axis_overrides_the_preset():
    chosen = choose("dbs", partition="global", engine="masked", every=5, faithful=True)
    assert (chosen.name, chosen.partition, chosen.engine.name) == ("dbs", "global", "masked")
    assert (chosen.controller.every, chosen.controller.faithful) == (5, True)
    assert choose("dbs", controller="dp").controller.name == "dp"


def test_fixed_blocks_go_with_fixed_counts():
    chosen = choose(partition="submodular")
    assert (chosen.name, chosen.controller.name, chosen.sync.name) == ("static", "static", "allreduce")
    chosen = choose("rcd-sgd")
    assert (chosen.controller.name, chosen.partition, chosen.sync.name) == ("static", "submodular", "decentralized")
    assert chosen.sync.mix_every == 2


def test_options_of_the_sync_come_from_its_signature():
    made = choose(sync="decentralized", faithful=True, sync_options={"mix_every": 3, "topology": None}).sync
    assert (made.name, made.mix_every, made.faithful, made.topology) == ("decentralized", 3, True, "ring")
    assert options_of(sync.Decentralized) == ["topology", "mix_every", "matcha_budget", "faithful"]
    assert {"dead_zone", "staleness_bound", "replay"} <= set(options_of(sync.AdaptiveHogbatch))


def test_asynchronous_syncs_plan_nothing():
    chosen = choose(sync="adaptive-hogbatch", faithful=True, sync_options={"staleness_bound": 2, "rate_cap": 3.0})
    made = chosen.sync
    assert (chosen.name, made.stepped) == ("adaptive-hogbatch", False)
    assert (made.name, made.staleness_bound, made.dead_zone, made.rate_cap) == ("adaptive-hogbatch", 2, 0, 3.0)
    assert choose("balanced").sync.stepped


REFUSED = [
    ({"strategy": "daso", "controller": "dbs", "partition": "proportional"}, "parts of the global order"),
    ({"strategy": "best"}, "There is no strategy 'best'"),
    ({"controller": "balanced", "partition": "proportional"}, "once per epoch"),
    ({"controller": "balanced", "partition": "submodular"}, "a fixed block"),
    ({"strategy": "dbs", "partition": "submodular"}, "a fixed block"),
    ({"engine": "fast"}, "Unknown engine 'fast'"),
    ({"sync": "hogbatch", "controller": "balanced"}, "nothing to plan"),
    ({"strategy": "dbs", "sync": "hogbatch"}, "gives every worker its own"),
    ({"strategy": "adaptive-sgd", "engine": "looped"}, "every worker runs alone"),
    ({"sync": "telepathy"}, "There is no sync 'telepathy'"),
    ({"sync": 5}, "sync is 5"),
    ({"controller": "oracle"}, "true cost of every step"),
]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        *REFUSED,
        ({"controller": "dbs", "partition": "proportional", "every": 5}, "once per epoch"),
        ({"controller": "balanced", "faithful": True}, "weighs all samples alike"),
        ({"controller": "balanced", "every": 5}, "no cadence"),
        ({"strategy": "daso", "controller": "balanced", "faithful": True}, "equal workers in equal nodes"),
        ({"sync_options": {"mix_every": 2}}, "option of the sync decentralized, not of 'allreduce'"),
        ({"strategy": "adaptive-sgd", "sync_options": {"staleness_bound": 2}}, "not of 'adaptive-sgd'"),
    ],
)
def test_bad_combinations_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        choose(**options)


@pytest.mark.parametrize(("options", "words"), REFUSED)
def test_the_constructors_refuse_the_same(options, words):
    loss_fn = lambda params, batch, keys: batch["x"] * params
    made = functools.partial(Trainer, loss_fn, optax.sgd(0.1), batch_size=8, devices=jax.devices()[:2])
    with pytest.raises(ValueError, match=words):
        made(**options)
    if "partition" not in options and "hogbatch" not in str(options) and "adaptive" not in str(options):
        with pytest.raises(ValueError, match=words):
            Step(*made.args, **made.keywords, **options)


@pytest.mark.parametrize("strategy", ["dp", "edp", "dbs", "rcd-sgd"])
def test_a_step_refuses_a_strategy_that_divides_the_data_set(strategy):
    """It never sees the data set: without the partition it would be another method under the same name."""
    loss_fn = lambda params, batch, keys: batch["x"] * params
    options = {"batch_size": 8, "devices": jax.devices()[:2]}
    with pytest.raises(ValueError, match=f"'{strategy}' divides the data set.* hetjax.Trainer with it.*controller="):
        Step(loss_fn, optax.sgd(0.1), strategy=strategy, **options)
    preset = PRESETS[strategy]
    with Step(loss_fn, optax.sgd(0.1), controller=preset.controller, sync=preset.sync, **options) as step:
        assert (step.controller.name, step.sync.name) == (preset.controller, preset.sync)


def test_former_names_are_accepted_with_a_warning_at_the_users_line():
    loss_fn = lambda params, batch, keys: batch["x"] * params
    made = functools.partial(Trainer, loss_fn, optax.sgd(0.1), batch_size=8, devices=jax.devices()[:2])
    with pytest.warns(DeprecationWarning, match="sync='decentralised' is a former name.*use 'decentralized'") as caught:
        assert made(sync="decentralised").sync.name == "decentralized"
    for former, name in (("psum", "mesh"), ("hub", "host")):
        with pytest.warns(DeprecationWarning, match=f"transport='{former}'.*use '{name}'") as more:
            assert made(transport=former).step.options.transport == name
        caught.list.extend(more.list)
    assert [warning.filename for warning in caught.list] == [__file__] * 3
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made(transport="host", sync="decentralized")


def test_objects_are_checked_like_names():
    every_five = controllers.make("dbs", every=5)
    with pytest.raises(ValueError, match="once per epoch"):
        choose(controller=every_five, partition="proportional")
    with pytest.raises(ValueError, match="counts all samples alike"):
        choose(controller=controllers.make("dbs", faithful=True), sync="daso")
    with pytest.raises(ValueError, match="'balanced' divides samples by speed, but DASO as published"):
        choose(controller="balanced", sync=sync.Daso(faithful=True))
    assert choose(controller="fixed:2,2", sync=sync.Daso(faithful=True)).controller.name == "fixed"
    assert choose("daso", sync=sync.Daso(faithful=True)).controller.name == "equal"


@pytest.mark.parametrize("sync", ["decentralized", "daso"])
def test_only_one_set_of_parameters_is_updated_in_slices(sync):
    loss_fn = lambda params, batch, keys: batch["x"] * params
    with pytest.raises(ValueError, match=f"'sharded' needs the sync 'allreduce'.*{sync!r} they differ"):
        Trainer(
            loss_fn, optax.sgd(0.1), batch_size=8, devices=jax.devices()[:2], sync=sync, update="sharded",
            transport="host",
        )  # fmt: skip
