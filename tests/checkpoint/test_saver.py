"""The saver: when it saves, what the training loop waits for, and what a failing disk does."""

import errno
import os
import subprocess
import sys
import threading
from pathlib import Path

import fake_trainer
import numpy as np
import pytest
from fake_trainer import FakeTrainer
from saved_states import names, newest_step, record_of, state_at

from hetjax import checkpoint
from hetjax.state import State

ROOT = str(Path(checkpoint.__file__).parents[2])


def test_saves_by_steps_and_by_seconds(tmp_path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(checkpoint.saver.time, "monotonic", lambda: now[0])
    trainer = FakeTrainer()
    saver = checkpoint.Saver(tmp_path, trainer, steps=10, seconds=60, keep=9)
    saved = []
    monkeypatch.setattr(saver, "_write", lambda snapshot, step: saved.append(step))
    answered = 0
    for step in range(1, 31):
        now[0] += 9  # a step takes nine seconds
        saver(record_of(step, save=trainer.asked > answered), state_at(step))
        answered = trainer.asked if step in saved else answered
    saver.save(record_of(30), state_at(30))  # no second save of the same state
    saver.close()
    assert saved == [8, 10, 18, 20, 28, 30]  # requested 63 s after the last save, done one step later


@pytest.mark.parametrize("wrong", [{"steps": 0}, {"steps": 1.5}, {"seconds": -1.0}, {"keep": 0}, {"keep": True}])
def test_invalid_numbers_are_refused(wrong, tmp_path):
    with pytest.raises((ValueError, TypeError), match="of the checkpoints is"):
        checkpoint.Saver(tmp_path, FakeTrainer(), **wrong)


def test_the_loop_does_not_wait_for_the_disk_but_a_second_save_does(tmp_path, monkeypatch):
    proceed, waiting, written = threading.Event(), threading.Event(), []

    def slow(folder, snapshot):
        assert proceed.wait(60)
        written.append(snapshot.run["step"])

    monkeypatch.setattr(checkpoint.saver, "write_snapshot", slow)
    saver = checkpoint.Saver(tmp_path, FakeTrainer(), steps=2)
    saver(record_of(2), state_at(2))
    saver(record_of(3), state_at(3))
    assert written == []
    wait = saver._wait
    monkeypatch.setattr(saver, "_wait", lambda: (waiting.set(), wait()))
    second = threading.Thread(target=saver, args=(record_of(4), state_at(4)))
    second.start()
    assert waiting.wait(60)
    assert second.is_alive()
    assert written == []
    proceed.set()
    second.join(60)
    saver.close()
    assert written == [2, 4]
    assert saver.last.name == "step_00000004"


def test_a_hanging_disk_is_reported_after_a_limit(tmp_path, monkeypatch):
    proceed = threading.Event()
    monkeypatch.setattr(checkpoint.saver, "write_snapshot", lambda folder, snapshot: proceed.wait(60))
    saver = checkpoint.Saver(tmp_path, FakeTrainer(), steps=1, wait_limit=0.05)
    saver(record_of(1), state_at(1))
    with pytest.raises(TimeoutError, match="did not finish within 0 s: check that disk"):
        saver.close()
    proceed.set()
    saver._writing.join(60)


def test_an_error_of_the_disk_is_raised_in_the_next_step_or_at_the_end(tmp_path, monkeypatch, caplog):
    def full(folder, snapshot):
        raise OSError(errno.ENOSPC, "No space left on device")

    saver = checkpoint.Saver(tmp_path, FakeTrainer(), steps=2)
    saver(record_of(2), state_at(2))
    saver.close()
    monkeypatch.setattr(checkpoint.saver, "write_snapshot", full)
    saver(record_of(4), state_at(4))
    saver._writing.join()
    with pytest.raises(
        OSError, match=r"step 4 could not be written to .*No space left.*Earlier checkpoints are intact"
    ):
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
    saver.__exit__(KeyError)  # another error is propagating
    assert "step 12" in caplog.text
    assert names(tmp_path) == ["step_00000002"]
    assert newest_step(tmp_path) == 2


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
def test_a_full_disk(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=600k", "tmpfs", disk], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"mounting is not allowed: {mounted.stderr.decode()}")
    try:
        saver = checkpoint.Saver(disk, FakeTrainer(), steps=1, keep=5)
        noise = np.random.default_rng(0).normal(size=200_000).astype(np.float32)  # cannot be compressed
        saver(record_of(1), state_at(1))
        saver(record_of(2), State({"w": noise}, None, {"m": np.zeros(2, np.float32)}, None, 2, 20))
        with pytest.raises(OSError, match=r"step 2 could not be written to .*: No space left on device\. Earlier"):
            saver.close()
        assert names(disk) == ["step_00000001"]
        assert newest_step(disk) == 1
        saver(record_of(3), state_at(3))  # a small one fits
        saver.close()
        assert newest_step(disk) == 3
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
from hetjax.state import State
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


def test_a_failed_write_prints_nothing_but_the_error(tmp_path):
    """The program's limit on file sizes is below the size of its arrays."""
    command = [sys.executable, "-c", FAILING, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=os.environ | {"PYTHONPATH": ROOT})
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    for step, line in enumerate(lines, 1):
        assert line.startswith(f"The checkpoint of step {step} could not be written to {tmp_path}: File too large.")
    assert len(lines) == 3
    assert names(tmp_path) == []


def test_an_unwritable_folder_is_refused_before_training(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"Checkpoints cannot be written to .*Give a writable folder"):
        checkpoint.Saver(tmp_path / "file" / "checkpoints", FakeTrainer())
    if os.geteuid() != 0:
        (tmp_path / "closed").mkdir(mode=0o500)
        with pytest.raises(OSError, match="Permission denied"):
            checkpoint.Saver(tmp_path / "closed", FakeTrainer())
