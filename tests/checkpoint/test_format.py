"""The contents of a checkpoint are validated when read: invalid ones are skipped, newer formats refused."""

import json
import shutil

import jax
import numpy as np
import pytest
from fake_trainer import FakeTrainer
from saved_states import assert_trees_equal
from tiny_problem import trainer_for

from hetjax import checkpoint
from hetjax.state import State

KEYS = ("step", "cursor", "replicas", "kinds", "arrays", "more", "trainer", "extra")
ABSENT = object()


def state_at(step):
    more = {"kept": (np.ones(2, np.float32), None), "like": {"w": np.zeros(3, np.float32)}}
    return State({"w": np.full(3, step, np.float32)}, None, {"m": np.zeros(2, np.float32)}, None, step, step, more=more)


def rewrite(path, *keys_and_value):
    """Change one value of run.json and the manifest with it, so that the digests match."""
    *keys, last, value = keys_and_value
    run = parent = json.loads((path / "run.json").read_text())
    for key in keys:
        parent = parent[key]
    if value is ABSENT:
        del parent[last]
    else:
        parent[last] = value
    reseal(path, json.dumps(run))


def reseal(path, text):
    (path / "run.json").write_text(text)
    (path / "manifest.json").unlink()
    checkpoint.folder._seal(path)


@pytest.fixture(scope="module")
def two_saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    for step in (10, 20):
        checkpoint.save(folder, state_at(step), FakeTrainer({"seed": 0}))
    return folder


@pytest.fixture
def two(two_saved, tmp_path, caplog):
    """A copy of two checkpoints; `check(words)` expects the second to be reported and the first to be restored."""
    folder = tmp_path / "checkpoints"
    shutil.copytree(two_saved, folder)
    new = folder / "step_00000020"

    def check(words):
        with pytest.raises(checkpoint.Damaged, match=words):
            checkpoint.restore(new, state_at(0), FakeTrainer())
        caplog.clear()
        assert checkpoint.restore_latest(folder, state_at(0), FakeTrainer()).state.step == 10
        assert f"{new}" in caplog.text
        assert "Trying the previous checkpoint." in caplog.text

    return new, check


def test_a_checkpoint_without_a_format_number_can_be_read(two):
    new, _ = two
    assert json.loads((new / "run.json").read_text())["format"] == checkpoint.FORMAT == 1
    rewrite(new, "format", ABSENT)
    restored = checkpoint.restore(new, state_at(0), FakeTrainer()).state
    assert restored.step == 20
    assert_trees_equal((restored.core, restored.more), (state_at(20).core, state_at(20).more))


def test_a_newer_format_is_refused_not_skipped(two):
    new, _ = two
    rewrite(new, "format", checkpoint.FORMAT + 1)
    for restore, path in ((checkpoint.restore, new), (checkpoint.restore_latest, new.parent)):
        with pytest.raises(checkpoint.NewerFormat, match=r"step_00000020 .* it has format 2 .* Update hetjax"):
            restore(path, state_at(0), FakeTrainer())


@pytest.mark.parametrize("key", KEYS)
def test_a_missing_key_is_named(two, key):
    new, check = two
    rewrite(new, key, ABSENT)
    check(f"cannot be read: run.json lacks {key}")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("step", "x"), "step is 'x', expected a non-negative integer"),
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
def test_an_invalid_value_is_named(two, change, words):
    new, check = two
    rewrite(new, *change)
    check(words)


@pytest.mark.parametrize("text", ["[1]", "not JSON", "[" * 100_000])
def test_a_file_that_is_no_object(two, text):
    new, check = two
    reseal(new, text)
    check("cannot be read")


@pytest.mark.parametrize("make", [lambda path: path.mkdir(), lambda path: path.write_text("[" * 100_000)])
def test_a_broken_manifest(two, make):
    new, check = two
    (new / "manifest.json").unlink()
    make(new / "manifest.json")
    check("not a complete checkpoint: its manifest.json is missing or broken")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Checkpoints of steps 2 and 4 of a real trainer."""
    folder = tmp_path_factory.mktemp("trained")
    trainer, source, fresh = trainer_for(jax.devices()[:2])
    with trainer, checkpoint.Saver(folder, trainer, steps=2) as saver:
        trainer.fit(fresh, source, steps=4, hooks=[saver])
    return folder


@pytest.mark.parametrize("keys", [("sync",), ("order",), ("batch_size",), ("controller", "workers")])
def test_a_checkpoint_that_lacks_what_the_trainer_needs_is_skipped(trained, tmp_path, keys, caplog):
    folder = tmp_path / "checkpoints"
    shutil.copytree(trained, folder)
    first, second = folder / "step_00000002", folder / "step_00000004"
    rewrite(second, "trainer", *keys, ABSENT)
    trainer, _, fresh = trainer_for(jax.devices()[:2])
    assert checkpoint.restore_latest(folder, fresh, trainer).state.step == 2
    assert f"{second} is incomplete or malformed (KeyError: '{keys[-1]}')." in caplog.text
    rewrite(first, "trainer", *keys, ABSENT)
    with pytest.raises(checkpoint.Damaged, match="None of the 2 checkpoints"):
        checkpoint.restore_latest(folder, fresh, trainer)
