"""One program at a time writes to a folder: others are refused, naming it; the lock of a killed one is released."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from contextlib import contextmanager, suppress

import pytest
from fake_link import act_as
from fake_trainer import FakeTrainer
from saved_states import names, state_at

from hetjax import checkpoint
from hetjax.checkpoint import lock

# Holds a folder until it is killed; "orphan": the holder ends and leaves a child.
HOLDING = """
import os, runpy, signal, sys
runpy.run_path(sys.argv[1])["FolderLock"](sys.argv[2]).hold()
if sys.argv[3] == "orphan" and os.fork():
    os._exit(0)
print("held", os.getpid(), flush=True)
signal.pause()
"""


@contextmanager
def held_by_another(folder, how="alone"):
    """Another process holds the folder, or has left a child behind; killed at the end."""
    command = [sys.executable, "-c", HOLDING, lock.__file__, str(folder), how]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as program:
        pid = int(program.stdout.readline().split()[1])
        try:
            yield program
        finally:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def test_a_folder_in_use_is_refused_and_left_unchanged(tmp_path):
    (tmp_path / "draft_00000001").mkdir()
    with held_by_another(tmp_path) as program:
        for use in (
            lambda: checkpoint.Saver(tmp_path, FakeTrainer()),
            lambda: checkpoint.save(tmp_path, state_at(1), FakeTrainer()),
        ):
            with pytest.raises(checkpoint.InUse, match=rf"process {program.pid} on host .*, since 20.*: .*python"):
                use()
        assert names(tmp_path) == [".lock", "draft_00000001"]


def test_the_lock_of_a_killed_process_is_released(tmp_path):
    with held_by_another(tmp_path) as program:
        program.kill()
        program.wait()
        assert names(tmp_path) == [".lock"]
        with checkpoint.Saver(tmp_path, FakeTrainer()):
            assert json.loads((tmp_path / ".lock").read_text())["pid"] == os.getpid()
    assert names(tmp_path) == []


def test_a_child_that_outlives_the_holder_does_not_keep_the_lock(tmp_path):
    with held_by_another(tmp_path, "orphan") as program:
        program.wait()
        checkpoint.save(tmp_path, state_at(1), FakeTrainer())
    assert names(tmp_path) == ["step_00000001"]


def test_one_process_may_have_several_savers(tmp_path):
    """As in a notebook when a cell is run again."""
    first = checkpoint.Saver(tmp_path, FakeTrainer())
    second = checkpoint.Saver(tmp_path, FakeTrainer())
    second.close()
    first.save(None, state_at(1))
    first.close()
    with held_by_another(tmp_path), pytest.raises(checkpoint.InUse):
        checkpoint.Saver(tmp_path, FakeTrainer())
    checkpoint.save(tmp_path, state_at(2), FakeTrainer())
    assert names(tmp_path) == ["step_00000001", "step_00000002"]


def test_a_removed_folder_that_another_program_took_is_not_written_to(tmp_path):
    folder = tmp_path / "run"
    saver = checkpoint.Saver(folder, FakeTrainer())
    shutil.rmtree(folder)
    saver.save(None, state_at(1))
    saver._finish()
    assert names(folder) == [".lock", "step_00000001"]  # locked again
    shutil.rmtree(folder)
    with held_by_another(folder):
        saver.save(None, state_at(2))
        with pytest.raises(checkpoint.InUse):
            saver.close()
        assert names(folder) == [".lock"]


def test_only_process_0_locks(tmp_path, monkeypatch):
    act_as(monkeypatch, 1)
    with held_by_another(tmp_path), checkpoint.Saver(tmp_path, FakeTrainer()):
        pass


def test_a_file_system_without_locks_gives_a_warning(tmp_path, monkeypatch, caplog):
    def refused(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(lock.fcntl, "lockf", refused)
    with checkpoint.Saver(tmp_path, FakeTrainer()) as saver:
        saver.save(None, state_at(1))
    assert saver.last.is_dir()
    assert "cannot be locked (No locks available)" in caplog.text


def test_a_folder_created_for_the_lock_is_removed_with_it(tmp_path):
    with checkpoint.FolderLock(tmp_path / "new"):
        assert names(tmp_path / "new") == [".lock"]
    assert names(tmp_path) == []
