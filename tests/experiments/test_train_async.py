"""The main job without a barrier, from its flags to its run folder: what is written, stopped and resumed."""

import json
import os
import signal
import threading
import time

import numpy as np
import pytest
import train

from hetjax.report import ReportFiles, read_run

pytestmark = pytest.mark.slow

TINY = ["--model", "mlp", "--width", "8", "--batch-size", "64", "--devices", "2", "--smallest-batch", "16"]


def read(path):
    return json.loads(path.read_text())


@pytest.fixture
def no_pictures(monkeypatch, tmp_path):
    """Pictures take longer than these runs, and have tests of their own."""
    drawn = ReportFiles((tmp_path / "run.png",), tmp_path / "report.html")
    monkeypatch.setattr(train.watch, "report", lambda *_, **__: drawn)


def test_a_run_fills_its_folder_and_shows_its_workers(tmp_path, capsys):
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
    told = capsys.readouterr().out
    assert "accuracy" in told
    assert "updates " in told
    assert "utilization per worker" in (tmp_path / "report.html").read_text()


def test_a_replay_is_the_same_run_again(tmp_path, no_pictures):
    runs = []
    for name in ("one", "two"):
        flags = [*TINY, "--strategy", "adaptive-hogbatch", "--replay", "3", "--speeds", "1,8", "--epochs", "1"]
        assert train.main([*flags, "--out", str(tmp_path / name)]) == 0
        runs.append(read_run(tmp_path / name))
    np.testing.assert_array_equal(runs[0].loss_S, runs[1].loss_S)
    np.testing.assert_array_equal(runs[0].counts_SxW, runs[1].counts_SxW)


def test_ctrl_c_leaves_a_checkpoint_within_two_seconds_and_the_run_goes_on(tmp_path, capsys, no_pictures):
    """The slow worker's phases last a minute: nobody waits for them."""
    asked = []

    def press():
        while not (tmp_path / "metrics.jsonl").exists() or not (tmp_path / "metrics.jsonl").stat().st_size:
            time.sleep(0.02)
        asked.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=press, daemon=True).start()
    flags = [
        *TINY,
        "--sync",
        "hogbatch",
        "--epochs",
        "3",
        "--speeds",
        "0.0002,1",
        "--row-time",
        "1",
        "--out",
        str(tmp_path),
    ]
    assert train.main([*flags, "--batches", "16,64"]) == 130
    assert time.monotonic() - asked[0] < 2
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
