"""What a checkpoint says is checked when it is read: one that says nonsense is passed over, a newer format refused."""

import json

import jax
import numpy as np
import pytest
from fake_trainer import FakeTrainer
from tiny_problem import trainer_for

from hetjax import checkpoint
from hetjax.reduce.update import State

KEYS = ("step", "cursor", "replicas", "kinds", "arrays", "more", "trainer", "extra")
ABSENT = object()


def state_at(step):
    more = {"kept": (np.ones(2, np.float32), None), "like": {"w": np.zeros(3, np.float32)}}
    return State({"w": np.full(3, step, np.float32)}, None, {"m": np.zeros(2, np.float32)}, None, step, step, more=more)


def rewrite(path, *keys_and_value):
    """Change one value of run.json, so that only its content gives it away: the manifest is made anew."""
    *keys, last, value = keys_and_value
    run = place = json.loads((path / "run.json").read_text())
    for key in keys:
        place = place[key]
    if value is ABSENT:
        del place[last]
    else:
        place[last] = value
    reseal(path, json.dumps(run))


def reseal(path, text):
    (path / "run.json").write_text(text)
    (path / "manifest.json").unlink()
    checkpoint.folder._seal(path)


@pytest.fixture
def two(tmp_path, caplog):
    """Two checkpoints; `check(words)` finds that the second is named and the first is used."""
    _, new = (checkpoint.save(tmp_path, state_at(step), FakeTrainer({"seed": 0})) for step in (10, 20))

    def check(words):
        with pytest.raises(checkpoint.Damaged, match=words):
            checkpoint.restore(new, state_at(0), FakeTrainer())
        caplog.clear()
        assert checkpoint.restore_latest(tmp_path, state_at(0), FakeTrainer()).state.step == 10
        assert f"{new}" in caplog.text
        assert "Trying the checkpoint before it." in caplog.text

    return new, check


def test_the_format_is_numbered_and_a_checkpoint_without_a_number_is_read(two):
    new, _ = two
    assert json.loads((new / "run.json").read_text())["format"] == checkpoint.FORMAT == 1
    rewrite(new, "format", ABSENT)
    found = checkpoint.restore(new, state_at(0), FakeTrainer())
    assert found.state.step == 20
    for mine, saved in zip(jax.tree.leaves(found.state), jax.tree.leaves(state_at(20)), strict=True):
        np.testing.assert_array_equal(mine, saved)


def test_a_newer_format_is_refused_and_no_older_checkpoint_used_instead(two, tmp_path):
    rewrite(two[0], "format", checkpoint.FORMAT + 1)
    for restore, place in ((checkpoint.restore, two[0]), (checkpoint.restore_latest, tmp_path)):
        with pytest.raises(checkpoint.NewerFormat, match=r"step_00000020 .* it has format 2 .* Update hetjax"):
            restore(place, state_at(0), FakeTrainer())


@pytest.mark.parametrize("key", KEYS)
def test_a_missing_key_is_named(two, key):
    new, check = two
    rewrite(new, key, ABSENT)
    check(f"cannot be read: run.json lacks {key}")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("step", "x"), "step is 'x', expected a whole number of at least 0"),
        (("step", 2.5), "step is 2.5"),
        (("step", True), "step is True"),
        (("cursor", -5), "cursor is -5"),
        (("cursor", None), "cursor is None"),
        (("replicas", [1]), "replicas is"),
        (("format", "1"), "format is '1'"),
        (("kinds", [["float32"]]), "kinds is"),
        (("kinds", 0, ["float32", [-1]]), "kinds is"),
        (("kinds", 0, ["float32", [7]]), "an array is float32.*expected float32"),
        (("kinds", 0, ["int8", [3]]), "an array is float32.*expected int8"),
        (("kinds", 0, ["no type", [3]]), "cannot be read"),
        (("kinds", []), "names 2 arrays and describes 0"),
        (("arrays", "w"), "arrays is 'w', expected a list of names"),
        (("more", {"dict": [1]}), "more is"),
        (("more", -1), "more is -1"),
        (("more", {"like": "nothing", "first": 0}), "more is"),
        (("more", {"set": []}), "more is"),
        (("more", 99), "incomplete or malformed .IndexError"),
        (("more", {"like": "params", "first": 99}), "incomplete or malformed .IndexError"),
        (("trainer", []), "trainer is"),
        (("trainer", {"seed": 1.5}), "trainer.seed is 1.5"),
        (("trainer", {"batch_size": -1}), "trainer.batch_size is -1"),
        (("trainer", {"sync": "x"}), "trainer.sync is 'x'"),
        (("trainer", {"order": {"samples": 3}}), "trainer.order is"),
        (("extra", 1), "extra is 1"),
    ],
)
def test_a_value_that_makes_no_sense_is_named(two, change, words):
    new, check = two
    rewrite(new, *change)
    check(words)


@pytest.mark.parametrize("text", ["[1]", "not JSON", "[" * 100_000])
def test_no_object_at_all(two, text):
    new, check = two
    reseal(new, text)
    check("cannot be read")


@pytest.mark.parametrize("make", [lambda path: path.mkdir(), lambda path: path.write_text("[" * 100_000)])
def test_a_manifest_that_is_none(two, make):
    new, check = two
    (new / "manifest.json").unlink()
    make(new / "manifest.json")
    check("no whole checkpoint: its manifest.json is missing or broken")


@pytest.mark.parametrize("keys", [("sync",), ("order",), ("batch_size",), ("controller", "workers")])
def test_what_a_trainer_misses_is_taken_from_the_checkpoint_before(tmp_path, keys, caplog):
    trainer, source, fresh = trainer_for(jax.devices()[:2])
    with trainer, checkpoint.Saver(tmp_path, trainer, steps=2) as saver:
        trainer.fit(fresh, source, steps=4, hooks=[saver])
    rewrite(saver.last, "trainer", *keys, ABSENT)
    trainer, _, fresh = trainer_for(jax.devices()[:2])
    assert checkpoint.restore_latest(tmp_path, fresh, trainer).state.step == 2
    assert f"{saver.last} is incomplete or malformed (KeyError: '{keys[-1]}')." in caplog.text
    rewrite(checkpoint.latest(tmp_path).with_name("step_00000002"), "trainer", *keys, ABSENT)
    with pytest.raises(checkpoint.Damaged, match="None of the 2 checkpoints"):
        checkpoint.restore_latest(tmp_path, fresh, trainer)
