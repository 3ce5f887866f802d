"""Damage is found before anything is used, and the checkpoint before it is; failures leave the earlier ones whole."""

import errno
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import fake_trainer
import numpy as np
import pytest
from fake_trainer import FakeTrainer

from hetjax import checkpoint
from hetjax.history import Record
from hetjax.reduce.update import State

ROOT = str(Path(checkpoint.__file__).parents[2])


def state_at(step, size=3):
    return State({"w": np.full(size, step, np.float32)}, None, {"m": np.zeros(2, np.float32)}, None, step, step * 10)


def save_steps(folder, *steps, keep=3):
    return [checkpoint.save(folder, state_at(step), FakeTrainer(), {"step": step}, keep) for step in steps]


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def newest(folder):
    return checkpoint.restore_latest(folder, state_at(0), FakeTrainer()).state.step


def record_of(step, save=False):
    nothing = np.zeros(1)
    return Record(step, 0, 0.0, {}, nothing, nothing, nothing, 0.1, 0.1, 1, False, "", save=save)


def flip(path, rng):
    content = bytearray(path.read_bytes())
    content[rng.integers(len(content))] ^= 1 << rng.integers(8)
    path.write_bytes(content)


def truncate(path, rng):
    path.write_bytes(path.read_bytes()[: rng.integers(path.stat().st_size)])


def remove(path, rng):
    path.unlink()


def add(path, rng):
    (path.parent / "more").write_text("x")


@pytest.mark.parametrize("damage", [flip, truncate, remove, add])
def test_damage_to_any_file_is_found_and_the_one_before_is_used(damage, tmp_path, caplog):
    rng = np.random.default_rng(7)
    _, new = save_steps(tmp_path, 10, 20)
    assert newest(tmp_path) == 20
    files = sorted(path.relative_to(new) for path in new.rglob("*") if path.is_file() and path.stat().st_size)
    assert len(files) > 5
    for name in files:
        kept = tmp_path / "kept"
        shutil.copytree(new, kept)
        damage(new / name, rng)
        with pytest.raises(checkpoint.Damaged):
            checkpoint.restore(new, state_at(0), FakeTrainer())
        caplog.clear()
        assert newest(tmp_path) == 10
        assert "Trying the checkpoint before it" in caplog.text
        assert str(new) in caplog.text
        shutil.rmtree(new)
        kept.rename(new)
    assert newest(tmp_path) == 20


def test_the_file_is_named(tmp_path):
    (path,) = save_steps(tmp_path, 1)
    (path / "run.json").write_text("{}")
    with pytest.raises(checkpoint.Damaged, match=r"run\.json has changed since it was written"):
        checkpoint.restore(path, state_at(0), FakeTrainer())
    (path / "manifest.json").unlink()
    with pytest.raises(checkpoint.Damaged, match="no whole checkpoint"):
        checkpoint.restore(path, state_at(0), FakeTrainer())


def test_where_none_is_whole_nothing_is_begun_anew(tmp_path):
    assert checkpoint.restore_latest(tmp_path / "none", state_at(0), FakeTrainer()) is None
    for path in save_steps(tmp_path, 1, 2):
        (path / "manifest.json").unlink()
    with pytest.raises(ValueError, match=r"None of the 2 checkpoints in .* is whole"):
        newest(tmp_path)


def test_the_last_n_are_kept_and_the_newest_is_found(tmp_path):
    assert checkpoint.latest(tmp_path) is None
    save_steps(tmp_path, 3, 20, 100, 123_456_789, keep=2)
    assert names(tmp_path) == ["step_00000100", "step_123456789"]
    assert checkpoint.latest(tmp_path).name == "step_123456789"


def test_a_damaged_one_does_not_take_the_place_of_a_good_one(tmp_path):
    _, new = save_steps(tmp_path, 10, 20)
    flip(new / "run.json", np.random.default_rng(0))
    save_steps(tmp_path, 15, keep=1)
    assert newest(tmp_path) == 15
    assert names(tmp_path) == ["aside_step_00000020", "step_00000015"]
    save_steps(tmp_path, 25, keep=1)  # the run is past what was set aside
    assert names(tmp_path) == ["step_00000025"]


@pytest.mark.parametrize("stage", ["_seal", "_set_aside"])
def test_what_was_not_finished_is_not_there(stage, tmp_path, monkeypatch):
    save_steps(tmp_path, 10, 20)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.folder, stage, lambda *a: (_ for _ in ()).throw(OSError("broken off")))
        with pytest.raises(OSError, match="broken off"):
            save_steps(tmp_path, 20)
    assert names(tmp_path) == ["step_00000010", "step_00000020"]
    assert newest(tmp_path) == 20
    (tmp_path / "draft_00000030").mkdir()  # of a program that was killed
    assert newest(tmp_path) == 20
    checkpoint.Saver(tmp_path, FakeTrainer()).close()
    assert names(tmp_path) == ["step_00000010", "step_00000020"]


def test_an_error_of_the_disk_is_raised_in_the_next_step_or_at_the_end(tmp_path, monkeypatch, caplog):
    def full(folder, snapshot):
        raise OSError(errno.ENOSPC, "No space left on device")

    trainer = FakeTrainer()
    saver = checkpoint.Saver(tmp_path, trainer, steps=2)
    saver(record_of(2), state_at(2))
    saver.close()
    monkeypatch.setattr(checkpoint.saver, "fill", full)
    saver(record_of(4), state_at(4))
    saver._writing.join()
    with pytest.raises(OSError, match=r"step 4 could not be written to .*No space left.*Earlier checkpoints are as"):
        saver(record_of(5), state_at(5))
    saver(record_of(6), state_at(6))
    saver.end(None)
    assert "checkpoint of step 6 could not be written" in caplog.text
    with pytest.raises(OSError, match="step 6"):
        saver.close()
    saver(record_of(8), state_at(8))
    with pytest.raises(OSError, match="step 8"):  # by the next save, which waits
        saver(record_of(10), state_at(10))
    saver(record_of(12), state_at(12))
    saver.__exit__(KeyError)  # another error is on its way
    assert "step 12" in caplog.text
    assert names(tmp_path) == ["step_00000002"]
    assert newest(tmp_path) == 2


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
def test_a_full_disk(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=600k", "tmpfs", disk], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"no mounting here: {mounted.stderr.decode()}")
    try:
        saver = checkpoint.Saver(disk, FakeTrainer(), steps=1, keep=5)
        noise = np.random.default_rng(0).normal(size=200_000).astype(np.float32)  # what cannot be compressed
        saver(record_of(1), state_at(1))
        saver(record_of(2), State({"w": noise}, None, {"m": np.zeros(2, np.float32)}, None, 2, 20))
        with pytest.raises(OSError, match=r"step 2 could not be written to .*: No space left on device\. Earlier"):
            saver.close()
        assert names(disk) == ["step_00000001"]
        assert newest(disk) == 1
        saver(record_of(3), state_at(3))  # there is room for a small one
        saver.close()
        assert newest(disk) == 3
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        with pytest.raises(OSError, match=r"Checkpoints cannot be written to .*: Read-only file system"):
            checkpoint.Saver(disk, FakeTrainer())
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


FAILING = f"""
import resource, sys
from dataclasses import replace
import numpy as np
sys.path.insert(0, {str(Path(fake_trainer.__file__).parent)!r})
from fake_trainer import FakeTrainer
from hetjax import checkpoint
from hetjax.reduce.update import State
rng = np.random.default_rng(0)
state = State([rng.normal(size=100_000).astype(np.float32) for _ in range(8)], None, None, None, 1)
saver = checkpoint.Saver(sys.argv[1], FakeTrainer())
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, resource.RLIM_INFINITY))
for step in range(1, 4):
    try:
        saver.save(None, replace(state, step=step))
        saver.close()
    except OSError as error:
        print(error)
"""


def test_a_write_that_fails_is_one_sentence(tmp_path):
    """Files of this program may not grow as large as its arrays. Nothing is said but what is raised."""
    command = [sys.executable, "-c", FAILING, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=os.environ | {"PYTHONPATH": ROOT})
    assert done.stderr == ""
    for step, line in enumerate(done.stdout.splitlines(), 1):
        assert line.startswith(f"The checkpoint of step {step} could not be written to {tmp_path}: File too large.")
    assert len(done.stdout.splitlines()) == 3
    assert names(tmp_path) == []


def test_a_folder_that_cannot_be_written_to_is_refused_before_training(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"Checkpoints cannot be written to .*Give a folder"):
        checkpoint.Saver(tmp_path / "file" / "checkpoints", FakeTrainer())
    if os.geteuid() != 0:
        (tmp_path / "closed").mkdir(mode=0o500)
        with pytest.raises(OSError, match="Permission denied"):
            checkpoint.Saver(tmp_path / "closed", FakeTrainer())


@pytest.mark.parametrize("wrong", [{"steps": 0}, {"steps": 1.5}, {"seconds": -1.0}, {"keep": 0}, {"keep": True}])
def test_senseless_numbers_are_refused(wrong, tmp_path):
    with pytest.raises((ValueError, TypeError), match="of the checkpoints is"):
        checkpoint.Saver(tmp_path, FakeTrainer(), **wrong)


def test_the_loop_does_not_wait_for_the_disk_but_a_second_save_does(tmp_path, monkeypatch):
    go, written = threading.Event(), []

    def slow(folder, snapshot):
        assert go.wait(60)
        written.append(snapshot.run["step"])

    monkeypatch.setattr(checkpoint.saver, "fill", slow)
    saver = checkpoint.Saver(tmp_path, FakeTrainer(), steps=2)
    saver(record_of(2), state_at(2))
    saver(record_of(3), state_at(3))
    assert written == []
    second = threading.Thread(target=saver, args=(record_of(4), state_at(4)))
    second.start()
    second.join(0.2)
    assert second.is_alive()
    assert written == []
    go.set()
    second.join(60)
    saver.close()
    assert written == [2, 4]
    assert saver.last.name == "step_00000004"


def test_a_disk_that_hangs_is_not_waited_for_without_end(tmp_path, monkeypatch):
    go = threading.Event()
    monkeypatch.setattr(checkpoint.saver, "fill", lambda folder, snapshot: go.wait(60))
    saver = checkpoint.Saver(tmp_path, FakeTrainer(), steps=1, wait_limit=0.05)
    saver(record_of(1), state_at(1))
    with pytest.raises(TimeoutError, match="has not ended after 0 s: look at that disk"):
        saver.close()
    go.set()
    saver._writing.join(60)


def test_by_steps_and_by_seconds(tmp_path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(checkpoint.saver.time, "monotonic", lambda: now[0])
    trainer = FakeTrainer()
    saver = checkpoint.Saver(tmp_path, trainer, steps=10, seconds=60, keep=9)
    begun = []
    monkeypatch.setattr(saver, "_write", lambda snapshot, step: begun.append(step))
    asked = 0
    for step in range(1, 31):
        now[0] += 9  # a step takes nine seconds
        saver(record_of(step, save=trainer.asked > asked), state_at(step))
        asked = trainer.asked if step in begun else asked
    saver.save(record_of(30), state_at(30))  # at the end: it was saved just now
    saver.close()
    assert begun == [8, 10, 18, 20, 28, 30]  # 63 s after the last one it is asked for, and comes a step later
