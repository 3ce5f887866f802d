"""Checkpoints of `hetjax train`: stopped, damaged, extended and NaN runs; nothing unpickled."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from sample_log import Numbered, check_epochs, log_samples

from hetjax import checkpoint, report
from hetjax.cli import train
from hetjax.cli.training import setup
from hetjax.environment import PROGRAMS
from hetjax.planning.controllers.baselines import Equal
from hetjax.report import read_run
from hetjax.sampling.order import Sampler
from hetjax.thinning import Thinning

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_figures")]

PROGRAM = Path(__file__).parents[2] / "experiments" / "train.py"
SAMPLES, BATCH = 143, 30  # five steps an epoch


@pytest.fixture
def tiny(tmp_path):
    """Flags of a tiny problem; `poisoned` is the index of a sample with an infinite gradient."""

    def flags(poisoned=None):
        rng = np.random.default_rng(0)
        x, y = rng.normal(size=(SAMPLES + 9, 6)).astype(np.float32), np.arange(SAMPLES + 9) % 3
        if poisoned is not None:
            x[poisoned] = 3e38
        path = tmp_path / "data.npz"
        np.savez(path, x_train=x[:SAMPLES], y_train=y[:SAMPLES], x_test=x[SAMPLES:], y_test=y[SAMPLES:])
        return [
            "--dataset", f"npz:{path}", "--model", "mlp", "--width", "8", "--dropout", "0.1", "--optimizer", "sgd",
            "--learning-rate", "0.05", "--batch-size", str(BATCH),
        ]  # fmt: skip

    return flags


@pytest.fixture
def numbered_samples(monkeypatch):
    """Record in every row of the metrics which samples were computed."""
    make = setup.make_task_of

    def telling_task(config):
        task = make(config)
        loss_fn = log_samples(task.model.loss_fn, len(task.train))
        return replace(task, train=Numbered(task.train), model=replace(task.model, loss_fn=loss_fn))

    monkeypatch.setattr(setup, "make_task_of", telling_task)


@pytest.fixture
def end_in_step(monkeypatch):
    """Send SIGTERM once the row of the given step is written; None: never."""
    follow, when = report.Follow.__call__, [None]

    def follow_and_stop(self, record, state):
        follow(self, record, state)
        if record.step == when[0] and isinstance(self.tracker, report.Composite):
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(report.Follow, "__call__", follow_and_stop)
    return lambda step: when.__setitem__(0, step)


def rows(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def steps_saved(folder):
    return [int(path.name.removeprefix("step_")) for path in checkpoint.folder.stored(folder / "checkpoints")]


def test_stopped_inside_an_epoch_of_shards_and_resumed_on_other_workers(
    tmp_path, tiny, numbered_samples, end_in_step, capsys
):
    end_in_step(7)
    flags = [*tiny(), "--devices", "3", "--epochs", "3", "--strategy", "dbs", "--out", str(tmp_path)]
    assert train.main(flags) == 130
    end_in_step(None)
    assert "everything is saved" in " ".join(capsys.readouterr().out.split())
    (stopped,) = steps_saved(tmp_path)
    assert 7 <= stopped <= 9
    assert train.main(["--resume", "--out", str(tmp_path), "--devices", "2", "--save-steps", "2", "--keep", "3"]) == 0
    written = rows(tmp_path)
    assert [row["step"] for row in written] == list(range(1, 16))
    assert [len(row["counts"]) for row in written] == [3] * stopped + [2] * (15 - stopped)
    assert check_epochs([(row["metrics"], sum(row["counts"])) for row in written], SAMPLES) == 3
    assert steps_saved(tmp_path) == [12, 14, 15]
    run_json = json.loads((tmp_path / "checkpoints" / "step_00000015" / "run.json").read_text())
    assert run_json["extra"]["config"] == json.loads((tmp_path / "config.json").read_text())


def test_a_damaged_checkpoint_is_skipped_with_a_warning(tmp_path, tiny, end_in_step, capsys):
    flags = [*tiny(), "--devices", "2", "--epochs", "2", "--strategy", "equal", "--save-steps", "2"]
    assert train.main([*flags, "--out", str(tmp_path / "whole")]) == 0
    end_in_step(5)
    folder = tmp_path / "run"
    assert train.main([*flags, "--out", str(folder)]) == 130
    end_in_step(None)
    before, last = steps_saved(folder)
    victim = folder / "checkpoints" / f"step_{last:08d}" / "run.json"
    victim.write_bytes(victim.read_bytes().replace(b'"cursor": ', b'"cursor": 1', 1))
    capsys.readouterr()
    assert train.main(["--resume", "--out", str(folder), "--devices", "1"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "run.json has changed since it was written" in printed
    assert f"resuming after step {before}" in printed
    np.testing.assert_allclose(read_run(folder).loss_S, read_run(tmp_path / "whole").loss_S, rtol=1e-4)


def test_a_second_run_in_the_same_folder_is_refused_and_changes_nothing(tmp_path, tiny, monkeypatch):
    """Also a comparison, whose runs have subfolders, and a run of several processes."""
    flags = [*tiny(), "--devices", "1", "--steps", "4", "--out", str(tmp_path / "run")]
    several = ["-m", "hetjax", "launch", "--processes", "2", "--"]
    second, follow = [], report.Follow.__call__

    def follow_and_start_others(self, record, state):
        follow(self, record, state)
        if record.step == 2:
            before = sorted(tmp_path.rglob("*"))
            environment = os.environ | {"PYTHONPATH": str(PROGRAM.parents[1])}
            for launch, more in (([], ["--strategy", "balanced"]), ([], []), (several, ["--strategy", "equal"])):
                command = [sys.executable, *launch, str(PROGRAM), *flags, *more]
                second.append(subprocess.run(command, capture_output=True, text=True, env=environment, timeout=280))
            assert sorted(tmp_path.rglob("*")) == before

    monkeypatch.setattr(report.Follow, "__call__", follow_and_start_others)
    assert train.main([*flags, "--strategy", "equal"]) == 0
    for done in second:
        assert done.returncode == 2, done.stderr
        assert f"{tmp_path / 'run'} is in use by another program: process {os.getpid()} on host" in done.stderr
        assert "Traceback" not in done.stderr
    assert [row["step"] for row in rows(tmp_path / "run")] == [1, 2, 3, 4]
    assert not list(tmp_path.rglob(".lock"))


@pytest.mark.parametrize("length", ["steps", "epochs"])
def test_a_finished_run_can_be_extended(length, tmp_path, tiny, capsys):
    """Steps and epochs are totals: the extended run equals an uninterrupted one."""
    flags = [*tiny(), "--devices", "2", "--strategy", "equal", "--schedule", "constant"]
    short, long = {"steps": (4, 12), "epochs": (1, 3)}[length]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert train.main([*flags, f"--{length}", str(long), "--out", str(whole)]) == 0
    assert train.main([*flags, f"--{length}", str(short), "--out", str(parts)]) == 0
    resume = ["--resume", "--out", str(parts), "--devices", "2"]
    assert train.main([*resume, f"--{length}", str(long)]) == 0
    assert "already finished" not in capsys.readouterr().out
    np.testing.assert_allclose(read_run(parts).loss_S, read_run(whole).loss_S, rtol=1e-5)
    extended, uninterrupted = (json.loads((folder / "summary.json").read_text()) for folder in (parts, whole))
    for key in ("steps", "samples", "last_step", "cursor"):
        assert extended[key] == uninterrupted[key]
    for more in ([], [f"--{length}", str(long)], [f"--{length}", str(short)]):
        assert train.main([*resume, *more]) == 0
        assert "already finished" in capsys.readouterr().out


def test_extending_a_cosine_schedule_gives_a_warning(tmp_path, tiny, capsys):
    flags = [*tiny(), "--devices", "1", "--strategy", "equal", "--out", str(tmp_path / "run")]
    assert train.main([*flags, "--steps", "2"]) == 0
    assert train.main([*flags, "--steps", "4", "--resume"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "Steps 1 to 2 followed the cosine schedule for --steps 2" in printed
    assert len(rows(tmp_path / "run")) == 4


def test_infinity_stops_the_run_with_step_and_worker_and_keeps_the_last_good_checkpoint(tmp_path, tiny, capsys):
    poisoned = int(Sampler(SAMPLES, BATCH).indices(0, 4 * BATCH - 1, 4 * BATCH)[0])  # the last one of step 4
    folder = tmp_path / "run"
    flags = [*tiny(poisoned), "--devices", "2", "--epochs", "3", "--strategy", "equal", "--save-steps", "3"]
    assert train.main([*flags, "--out", str(folder)]) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert "Step 4: the loss or gradient of worker 1 was NaN or infinite" in error
    assert f"The last good checkpoint is {folder / 'checkpoints'}/step_00000003." in error
    assert steps_saved(folder) == [3]
    assert train.main(["--resume", "--out", str(folder), "--on-nonfinite", "skip"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "resuming after step 3" in printed
    assert printed.count("its update was skipped") == 3  # once an epoch
    assert len(rows(folder)) == 15


def test_infinity_in_the_first_step_does_not_name_the_checkpoints_of_an_earlier_run(tmp_path, tiny, capsys):
    flags = ["--devices", "1", "--strategy", "equal", "--steps", "2", "--out", str(tmp_path / "run")]
    assert train.main([*tiny(), *flags]) == 0
    poisoned = int(Sampler(SAMPLES, BATCH).indices(0, 0, 1)[0])
    assert train.main([*tiny(poisoned), *flags]) == 2
    assert "There is no earlier checkpoint." in " ".join(capsys.readouterr().err.split())
    assert steps_saved(tmp_path / "run") == [2]


def test_an_unwritable_checkpoint_folder_is_a_user_error(tmp_path, tiny, capsys):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").write_text("in the way")
    assert (
        train.main([*tiny(), "--devices", "1", "--steps", "1", "--strategy", "equal", "--out", str(tmp_path / "run")])
        == 2
    )
    error = capsys.readouterr().err
    assert "Checkpoints cannot be written to" in error
    assert "Traceback" not in error


@pytest.fixture
def events():
    """Audit events (name, arguments) during the test; Python cannot remove an audit hook again."""
    seen, listening = [], [True]

    def hook(event, arguments):
        if listening[0] and event in ("open", "pickle.find_class", "os.mkdir", "os.rename", "os.remove", "os.rmdir"):
            seen.append((event, arguments))

    sys.addaudithook(hook)
    yield seen
    listening[0] = False


def changes_a_path(event, arguments):
    """Whether the event writes, creates, renames or removes a path; names relative to an open folder do not count."""
    if event == "open":
        return bool((arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
    return event != "pickle.find_class" and os.path.isabs(arguments[0])


def test_a_run_unpickles_nothing_and_writes_only_to_its_folder(tmp_path, tiny, events, monkeypatch):
    for name in ("elsewhere", "home", "tmp", "run"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr(report, "report", report.page.report)  # draw the figures too
    monkeypatch.delenv(PROGRAMS, raising=False)  # the program store, which is pickled, is optional
    flags = [*tiny(), "--devices", "1", "--strategy", "equal", "--engine", "masked", "--save-steps", "2"]
    events.clear()
    assert train.main([*flags, "--steps", "3", "--out", str(tmp_path / "run")]) == 0
    (tmp_path / "run" / "summary.json").unlink()
    assert train.main(["--resume", "--out", str(tmp_path / "run"), "--steps", "4"]) == 0
    assert not [arguments for event, arguments in events if event == "pickle.find_class"]
    touched = [str(arguments[0]) for event, arguments in events if changes_a_path(event, arguments)]
    outside = {path for path in touched if not path.startswith(str(tmp_path / "run")) and path != os.devnull}
    assert not outside
    assert sum(path.startswith(str(tmp_path / "run")) for path in touched) > 10
    for name in ("elsewhere", "home", "tmp"):
        assert not list((tmp_path / name).iterdir())


def test_the_summary_does_not_depend_on_thinning(tmp_path, tiny, end_in_step, monkeypatch):
    """Stopped, resumed and thinned to four rows, its totals are those of the whole run."""
    monkeypatch.setattr(Thinning.__init__, "__defaults__", (4,))
    monkeypatch.setattr(report, "JsonlTracker", partial(report.JsonlTracker, limit=4))
    plan, calls = Equal.plan, iter(range(100))

    def changing(self, batch, limits, epoch=0):
        return replace(plan(self, batch, limits, epoch), changed=next(calls) % 2 == 1)

    monkeypatch.setattr(Equal, "plan", changing)
    folder = tmp_path / "run"
    flags = [*tiny(), "--strategy", "equal", "--devices", "2", "--steps", "12", "--out", str(folder)]
    end_in_step(6)
    assert train.main(flags) == 130
    before = rows(folder)[-1]["seconds"]
    end_in_step(None)
    assert train.main(["--resume", "--out", str(folder)]) == 0
    kept = [row["step"] for row in rows(folder)]
    assert len(kept) <= 4
    assert (kept[0], kept[-1]) == (1, 12)
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["steps"], summary["samples"]) == (12, 2 * SAMPLES + 2 * BATCH)
    assert summary["plan_changes"] == rows(folder)[-1]["plan_changes"] in (5, 6)  # stopping may drop a plan made ahead
    assert summary["wall_s"] == pytest.approx(rows(folder)[-1]["seconds"])
    assert summary["wall_s"] > before
    assert summary["final_loss"] == pytest.approx(rows(folder)[-1]["loss"])
