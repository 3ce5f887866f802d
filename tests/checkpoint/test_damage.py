"""Damage is detected before anything is used, and the previous checkpoint is restored instead."""

import shutil

import numpy as np
import pytest
from fake_trainer import FakeTrainer
from saved_states import names, newest_step, save_steps, state_at

from hetjax import checkpoint


def flip_bit(path, rng):
    content = bytearray(path.read_bytes())
    content[rng.integers(len(content))] ^= 1 << rng.integers(8)
    path.write_bytes(content)


def truncate(path, rng):
    path.write_bytes(path.read_bytes()[: rng.integers(path.stat().st_size)])


def remove(path, rng):
    path.unlink()


def add_file(path, rng):
    (path.parent / "more").write_text("x")


@pytest.fixture(scope="module")
def two_saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    save_steps(folder, 10, 20)
    return folder


@pytest.mark.parametrize("damage", [flip_bit, truncate, remove, add_file])
def test_damage_to_any_file_is_detected(damage, two_saved, tmp_path, caplog):
    rng = np.random.default_rng(7)
    folder = tmp_path / "checkpoints"
    shutil.copytree(two_saved, folder)
    assert newest_step(folder) == 20
    new = folder / "step_00000020"
    files = sorted(path.relative_to(new) for path in new.rglob("*") if path.is_file() and path.stat().st_size)
    assert len(files) > 5
    for name in files:
        damage(new / name, rng)
        with pytest.raises(checkpoint.Damaged):
            checkpoint.restore(new, state_at(0), FakeTrainer())
        caplog.clear()
        assert newest_step(folder) == 10
        assert "Trying the previous checkpoint" in caplog.text
        assert str(new) in caplog.text
        shutil.rmtree(new)
        shutil.copytree(two_saved / new.name, new)
    assert newest_step(folder) == 20


def test_the_damaged_file_is_named(tmp_path):
    (path,) = save_steps(tmp_path, 1)
    (path / "run.json").write_text("{}")
    with pytest.raises(checkpoint.Damaged, match=r"run\.json has changed since it was written"):
        checkpoint.restore(path, state_at(0), FakeTrainer())
    (path / "manifest.json").unlink()
    with pytest.raises(checkpoint.Damaged, match="not a complete checkpoint"):
        checkpoint.restore(path, state_at(0), FakeTrainer())


def test_a_run_does_not_start_over_if_no_checkpoint_is_intact(tmp_path):
    assert checkpoint.restore_latest(tmp_path / "none", state_at(0), FakeTrainer()) is None
    for path in save_steps(tmp_path, 1, 2):
        (path / "manifest.json").unlink()
    with pytest.raises(ValueError, match=r"None of the 2 checkpoints in .* is intact"):
        newest_step(tmp_path)


def test_the_last_n_are_kept_and_the_newest_is_found(tmp_path):
    assert checkpoint.latest(tmp_path) is None
    save_steps(tmp_path, 3, 20, 100, 123_456_789, keep=2)
    assert names(tmp_path) == ["step_00000100", "step_123456789"]
    assert checkpoint.latest(tmp_path).name == "step_123456789"


def test_a_damaged_checkpoint_does_not_displace_an_intact_one(tmp_path):
    _, new = save_steps(tmp_path, 10, 20)
    flip_bit(new / "run.json", np.random.default_rng(0))
    save_steps(tmp_path, 15, keep=1)
    assert newest_step(tmp_path) == 15
    assert names(tmp_path) == ["aside_step_00000020", "step_00000015"]
    save_steps(tmp_path, 25, keep=1)  # the run has passed what was set aside
    assert names(tmp_path) == ["step_00000025"]


@pytest.mark.parametrize("stage", ["_seal", "_set_aside"])
def test_an_unfinished_checkpoint_is_ignored_and_removed(stage, two_saved, tmp_path, monkeypatch):
    folder = tmp_path / "checkpoints"
    shutil.copytree(two_saved, folder)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.folder, stage, lambda *a: (_ for _ in ()).throw(OSError("broken off")))
        with pytest.raises(OSError, match="broken off"):
            save_steps(folder, 20)
    assert names(folder) == ["step_00000010", "step_00000020"]
    assert newest_step(folder) == 20
    (folder / "draft_00000030").mkdir()  # of a program that was killed
    assert newest_step(folder) == 20
    checkpoint.Saver(folder, FakeTrainer()).close()
    assert names(folder) == ["step_00000010", "step_00000020"]
