"""Asynchronous training by command line: run folder, replay, and stopping and resuming."""

import json
import os
import signal
import threading
import time

import numpy as np
import pytest

from hetjax.cli import train
from hetjax.report import ReportFiles, read_run

pytestmark = pytest.mark.slow

TINY = ["--model", "mlp", "--width", "8", "--batch-size", "64", "--devices", "2", "--smallest-batch", "16"]


def read(path):
    return json.loads(path.read_text())


@pytest.fixture
def no_plots(monkeypatch, tmp_path):
    """Plots take longer than these runs, and have their own tests."""
    files = ReportFiles((tmp_path / "run.png",), tmp_path / "report.html")
    monkeypatch.setattr(train.report, "report", lambda *_, **__: files)


def test_a_run_fills_its_folder_and_prints_its_summary(tmp_path, capsys):
    assert train.main([*TINY, "--sync", "adaptive-hogbatch", "--epochs", "2", "--out", str(tmp_path)]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {
        "config.json", "metrics.jsonl", "summary.json", "log.txt", "checkpoints", "run.png", "run.svg", "report.html",
    }  # fmt: skip
    summary, run = read(tmp_path / "summary.json"), read_run(tmp_path)
    assert (summary["sync"], summary["controller"]) == ("adaptive-hogbatch", "none")
    assert (summary["samples"], summary["recompiles_after_warmup"], run.step_S[-1]) == (2 * 1438, 0, 2 * 23)
    assert run.asynchronous
    assert sum(summary["update_share"]) == pytest.approx(1)
    assert sum(summary["staleness"].values()) == summary["updates"] == np.nansum(run.updates_SxW)
    assert all(0 < share <= 1.01 for share in summary["utilization"])
    printed = capsys.readouterr().out
    assert "accuracy" in printed
    assert "updates " in printed
    assert "utilization per worker" in (tmp_path / "report.html").read_text()


def test_a_replay_repeats_the_run(tmp_path, no_plots):
    runs = []
    for name in ("one", "two"):
        flags = [*TINY, "--strategy", "adaptive-hogbatch", "--replay", "3", "--speeds", "1,8", "--epochs", "1"]
        assert train.main([*flags, "--out", str(tmp_path / name)]) == 0
        runs.append(read_run(tmp_path / name))
    np.testing.assert_array_equal(runs[0].loss_S, runs[1].loss_S)
    np.testing.assert_array_equal(runs[0].counts_SxW, runs[1].counts_SxW)


def test_ctrl_c_saves_a_checkpoint_without_waiting_for_phases_and_the_run_can_be_resumed(tmp_path, capsys, no_plots):
    """A phase of the slow worker takes hours."""

    def interrupt():
        metrics = tmp_path / "metrics.jsonl"
        while not metrics.exists() or not metrics.stat().st_size:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    flags = [*TINY, "--sync", "hogbatch", "--epochs", "3", "--batches", "16,64"]
    assert train.main([*flags, "--speeds", "0.000001,1", "--row-time", "1", "--out", str(tmp_path)]) == 130
    assert f"--resume --out {tmp_path}" in " ".join(capsys.readouterr().out.split())
    (saved,) = (tmp_path / "checkpoints").iterdir()
    assert read(saved / "run.json")["trainer"]["sync"]["state"]["undone"] != []
    assert train.main(["--resume", "--out", str(tmp_path), "--speeds", "1,1", "--row-time", "0.02"]) == 0
    run = read_run(tmp_path)
    assert run.step_S[-1] == 3 * 23
    assert run.samples_S[-1] == 3 * 1438
    summary = read(tmp_path / "summary.json")  # of both parts
    assert summary["samples"] == 3 * 1438
    assert summary["updates"] == sum(summary["staleness"].values()) == np.nansum(run.updates_SxW)
    np.testing.assert_allclose(summary["update_share"], np.nansum(run.updates_SxW, axis=0) / summary["updates"])
