"""`hetjax train` on tiny models: files written, resuming, error messages."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from fake_link import act_as
from flax import nnx
from jax.errors import JaxRuntimeError

from hetjax import report
from hetjax.cli import train
from hetjax.cli.training import configs, setup
from hetjax.environment import PROGRAMS
from hetjax.fleet import distributed
from hetjax.fleet.agree import Disagreement
from hetjax.fleet.rendezvous import free_port
from hetjax.report import read_run

PROGRAM = Path(__file__).parents[2] / "experiments" / "train.py"
TINY = ["--model", "mlp", "--width", "8", "--batch-size", "64", "--devices", "2"]
SUMMARY = {
    "strategy",
    "controller",
    "partition",
    "sync",
    "engine",
    "workers",
    "steps",
    "samples",
    "wall_s",
    "samples_per_s",
    "ideal_samples_per_s",
    "efficiency",
    "final_loss",
    "test_accuracy",
    "plan_changes",
    "recompiles_after_warmup",
    "data_wait_share",
}
IMPORT = b"from hetjax.cli.training.configs import *\n"
ROW = {"step", "epoch", "loss", "counts", "times", "step_time", "samples_per_s", "changed", "reason"}


def summary(folder):
    return json.loads((folder / "summary.json").read_text())


def test_one_run_fills_its_folder(tmp_path, capsys):
    assert train.main([*TINY, "--steps", "3", "--controller", "balanced", "--out", str(tmp_path)]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {
        "config.json", "metrics.jsonl", "summary.json", "log.txt", "checkpoints", "run.png", "run.svg", "report.html",
    }  # fmt: skip
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert all(row.keys() >= ROW and sum(row["counts"]) == 64 for row in rows)
    assert summary(tmp_path).keys() >= SUMMARY
    assert (summary(tmp_path)["steps"], summary(tmp_path)["samples"], summary(tmp_path)["workers"]) == (3, 192, 2)
    assert json.loads((tmp_path / "config.json").read_text())["width"] == 8
    printed = capsys.readouterr().out
    assert "test accuracy" in printed
    assert str(tmp_path / "run.png") in printed
    backend = f"JAX {jax.__version__}, backend cpu"
    assert f"balanced: {backend}, compiling for 2 workers\n" in printed
    assert f"{backend}." in (tmp_path / "log.txt").read_text()


@pytest.mark.slow
def test_without_a_strategy_equal_and_balanced_are_compared(tmp_path, capsys):
    flags = [*TINY, "--steps", "4", "--speeds", "1,0.5", "--row-time", "0.05", "--out", str(tmp_path)]
    assert train.main(flags) == 0
    equal, balanced = (read_run(tmp_path / name) for name in ("equal", "balanced"))
    np.testing.assert_allclose(equal.loss_S, balanced.loss_S, rtol=1e-5)
    assert np.all(equal.counts_SxW == 32)
    assert equal.ideal == balanced.ideal == pytest.approx(1.5 / 0.05e-3)
    assert (tmp_path / "report.html").is_file()
    assert "as fast as equal, and the same training" in " ".join(capsys.readouterr().out.split())


@pytest.mark.slow
def test_a_profile_holds_the_phases_by_name(tmp_path, no_figures):
    flags = [*TINY, "--steps", "14", "--strategy", "equal", "--profile", "2", "--out", str(tmp_path)]
    assert train.main(flags) == 0
    (trace,) = (tmp_path / "profile").rglob("*.xplane.pb")
    assert all(f"hetjax.{name}".encode() in trace.read_bytes() for name in ("step", "local", "reduce", "report"))
    assert "profile" not in json.loads((tmp_path / "config.json").read_text())  # a resumed run has none


def losses(folder):
    return read_run(folder).loss_S


@pytest.fixture
def whole(tmp_path, no_figures):
    """The losses of an uninterrupted run over two epochs."""
    assert (
        train.main(
            [*TINY, "--batch-size", "500", "--epochs", "2", "--strategy", "equal", "--out", str(tmp_path / "whole")]
        )
        == 0
    )
    return losses(tmp_path / "whole")


@pytest.mark.slow
def test_a_stopped_and_resumed_run_equals_an_uninterrupted_one(tmp_path, whole, monkeypatch, capsys):
    folder = tmp_path / "stopped"
    follow = report.Follow.__call__

    def kill_in_step_2(self, record, state):
        follow(self, record, state)
        if record.step == 2 and isinstance(self.tracker, report.Composite):
            os.kill(os.getpid(), signal.SIGTERM)

    flags = [*TINY, "--batch-size", "500", "--epochs", "2", "--strategy", "equal", "--out", str(folder)]
    with monkeypatch.context() as patched:
        patched.setattr(report.Follow, "__call__", kill_in_step_2)
        assert train.main(flags) == 130
    done = len(losses(folder))
    assert 2 <= done < len(whole) == 6
    assert f"--resume --out {folder}" in " ".join(capsys.readouterr().out.split())
    assert train.main(["--resume", "--out", str(folder), "--devices", "3", "--strategy", "balanced"]) == 0
    np.testing.assert_allclose(losses(folder), whole, rtol=1e-4)
    run = read_run(folder)
    assert run.samples_S[-1] == 2 * 1438
    assert np.all(np.diff(run.seconds_S) > 0)
    assert summary(folder)["steps"] == 6
    assert train.main(["--resume", "--out", str(folder)]) == 0  # finished: nothing runs again
    assert "already finished" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--sync", "hogbatch", "--controller", "dbs"], "nothing to plan"),
        (["--mega-batch", "512"], "'mega_batch' is an option of the sync adaptive-sgd"),
        (["--dead-zone", "2"], "'dead_zone' is an option of the sync adaptive-hogbatch"),
        (["--sync", "daso", "--between", "steps"], "--between steps has no effect because there is only one process"),
        (["--controller", "oracle"], "true cost of every step"),
        (["--controller", "nonsense"], "There is no controller 'nonsense'"),
        (["--controller", "balanced", "--partition", "proportional"], "cuts the data into shards once per epoch"),
        (["--strategy", "equal", "--every", "5"], "has no cadence of its own"),
        (["--dataset", "mnist"], "There is no dataset 'mnist'"),
        (["--dataset", "idx:/nowhere"], "There is no folder /nowhere"),
        (["--dataset", "text"], "The mlp needs inputs with labels"),
        (["--steps", "3", "--epochs", "1"], "give one of them"),
        (["--steps", "0"], "--steps is 0"),
        (["--speeds", "1,fast"], "--speeds is '1,fast'"),
        (["--speeds", "1,0"], "must be positive"),
        (["--speeds", "1,1", "--devices", "3"], "Speeds were given for 2 workers, but there are 3"),
        (["--devices", "9"], "9 devices were requested, but there are 8"),
        (["--devices", "1000"], "1,000 devices were requested, but this CPU can be split into"),
        (["--devices", "9" * 25], "devices were requested, but this CPU can be split into"),
        (["--clip", "nan"], "--clip is nan: expected a finite number above 0"),
        (["--clip", "0"], "--clip is 0.0"),
        (["--clip=-1"], "--clip is -1.0"),
        (["--learning-rate=-1"], "--learning-rate is -1.0: expected a finite number of at least 0"),
        (["--learning-rate", "inf"], "--learning-rate is inf"),
        (["--weight-decay=-1"], "--weight-decay is -1.0"),
        (["--ema", "nan"], "--ema is nan"),
        (["--dropout", "nan"], "--dropout is nan"),
        (["--seed", "1" * 23], "--seed is 11111111111111111111111: expected a whole number"),
        (["--seed=-1"], "--seed is -1"),
        (["--width", "0"], "--width is 0"),
        (["--width", "1000000000"], "The parameters of the mlp would take"),
        (["--batch-size", "99999999999"], "--batch-size is 99999999999: expected a whole number"),
        (["--batch-size", "5000"], "batch_size is 5,000, but the source has 1,438 samples"),
        (["--steps", "1" * 30], "--steps is 1111"),
        (["--epochs", "2147483647"], "The number of steps is"),
        (["--compute-dtype", "T4=int8"], "compute_dtype is 'int8': expected one of float32"),
        (["--compute-dtype", "T4=float16,T4=float32"], "expected each kind of device once"),
        (["--compute-dtype", "bfloat16", "--dtype", "bfloat16"], "--dtype bfloat16 sets the precision of the layers"),
        (["--keep", "0"], "--keep is 0"),
        (["--max-skips", "0"], "--max-skips is 0: expected a whole number"),
        (["--save-steps=-1"], "--save-steps is -1"),
        (["--out", ""], "--out is empty"),
        (["--out", __file__], "which is a file: expected a folder"),
        (["--strategy", "adaptive-hogbatch", "--dead-zone=-1"], "dead_zone is -1"),
        (["--strategy", "hogbatch", "--rate-cap", "nan"], "rate_cap is nan"),
        (["--trace", "/nowhere.json"], "There is no trace file /nowhere.json"),
        (["--capacity", "1"], "The workers can take"),
        (["--norm", "batch"], "The mlp has no option 'norm'"),
        (["--config", "nonsense"], "There is no experiment 'nonsense'"),
        (["--resume"], "There is no run to resume"),
        (["--coordinator", "node0:9", "--processes", "2", "--process", "1", "--start-limit", "0"], "is 0.0 s: give"),
    ],
)  # fmt: skip
def test_a_user_error_exits_with_2_and_a_message(flags, sentence, tmp_path, capsys):
    assert train.main(["--model", "mlp", "--out", str(tmp_path / "run"), *flags]) == 2
    message = " ".join(capsys.readouterr().err.split())
    assert sentence in message
    assert "Traceback" not in message


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"CONFIG = Config(\n", "c.py, line 1: SyntaxError: '(' was never closed"),
        (b"\n\nCONFIG = Config()", "c.py, line 3: NameError: name 'Config' is not defined"),
        (b"x = '\xe9'", "c.py, line 1: SyntaxError"),
        (b"raise SystemExit(0)", "c.py, line 1: SystemExit"),
        (b"import nothing_like_it", "line 1: ModuleNotFoundError"),
        (IMPORT + b"CONFIG = Config(data=DataFlags(batch_size='x'))", "c.py: batch_size is 'x', expected int"),
        (IMPORT + b"CONFIG = Config(data=DataFlags(batch_size=True))", "batch_size is True, expected int"),
        (IMPORT + b"CONFIG = Config(model=ModelFlags(model='x'))", "expected 'mlp' or 'cnn' or"),
        (IMPORT + b"CONFIG = Config(workers=WorkerFlags(speeds=5))", "speeds is 5, expected str or None"),
    ],
)  # fmt: skip
def test_the_error_of_an_invalid_config_file_names_file_and_line(content, sentence, tmp_path, capsys):
    (tmp_path / "c.py").write_bytes(content)
    assert train.main(["--config", str(tmp_path / "c.py")]) == 2
    assert sentence in " ".join(capsys.readouterr().err.split())


NESTED = pytest.param(b"[" * 100_000, id="nested")


@pytest.mark.parametrize("content", [b"{", b"[]", b'{"batch_size": "x"}', b"\xff", NESTED, b'{"trace": 5}'])
def test_the_error_of_a_damaged_run_configuration_names_the_file(content, tmp_path, capsys):
    (tmp_path / "config.json").write_bytes(content)
    assert train.main(["--resume", "--out", str(tmp_path)]) == 2
    assert "config.json is not a run configuration" in " ".join(capsys.readouterr().err.split())


def test_every_named_configuration_survives_writing_and_reading(tmp_path):
    for name in configs.names():
        config = configs.named(name)
        report.write_json(tmp_path / "config.json", config.flat())
        assert configs.saved(tmp_path / "config.json", configs.Config()).flat() == {
            **config.flat(), "config": None,
        }  # fmt: skip


@pytest.mark.parametrize(
    ("error", "code", "advice"),
    [
        (MemoryError("1 TiB"), 2, ""),
        (JaxRuntimeError("RESOURCE_EXHAUSTED: No memory.\nMore."), 2, " Lower --width, --batch-size or --devices."),
        (TimeoutError("Node 1 did not join."), 1, ""),
        (Disagreement("They no longer agree."), 1, ""),
    ],
)
def test_a_failed_run_prints_one_line_and_exits_with_1_if_a_restart_may_help(
    error, code, advice, tmp_path, monkeypatch, capsys
):
    def fail(*_):
        raise error

    monkeypatch.setattr(train, "run", fail)
    assert train.main(["--out", str(tmp_path)]) == code
    assert capsys.readouterr().err == f"error: {str(error).splitlines()[0]}{advice}\n"


def test_an_unreachable_coordinator_is_an_error_after_the_start_limit(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"])  # the program adds to it
    monkeypatch.setattr(distributed, "_SILENT", 0.1)
    address = f"127.0.0.1:{free_port('127.0.0.1')}"
    flags = ["--coordinator", address, "--processes", "2", "--process", "1", "--start-limit", "0.5"]
    assert train.main([*flags, "--out", str(tmp_path)]) == 1
    waits, error = capsys.readouterr().err.splitlines()
    assert waits == f"Process 1 waits for process 0 at {address}, for at most 0.5 s."
    assert f"The coordinator {address} cannot be reached" in error


@pytest.mark.slow
def test_training_with_a_warm_persistent_cache_of_jax(tmp_path, monkeypatch):
    """Programs from that cache cannot be serialized, so each device must compile its own."""
    monkeypatch.delenv(PROGRAMS, raising=False)
    cache = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "jax"), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    for out in ("cold", "warm"):
        command = [sys.executable, str(PROGRAM), *TINY, "--steps", "6", "--out", str(tmp_path / out)]
        done = subprocess.run(command, env={**os.environ, **cache}, capture_output=True, text=True, timeout=280)
        assert done.returncode == 0, done.stderr
    cold, warm = (read_run(tmp_path / out / "balanced").loss_S for out in ("cold", "warm"))
    np.testing.assert_allclose(warm, cold, rtol=1e-5)


def test_processes_with_different_flags_are_rejected(tmp_path, monkeypatch, capsys):
    """Except for flags such as --devices, which may differ."""
    other = lambda value: {**value, "learning_rate": 0.5} if isinstance(value, dict) else value
    act_as(monkeypatch, 0, gathered=lambda value: [value, other(value)])
    assert train.main([*TINY, "--strategy", "equal", "--out", str(tmp_path)]) == 2
    assert "Process 1 differs from process 0 in its learning rate: 0.5 instead of None" in capsys.readouterr().err
    assert {"devices", "capacity", "out"} <= set(train.PER_PROCESS_FLAGS) <= configs.Config().flat().keys()


def test_the_last_of_several_processes_simulates_no_speeds(monkeypatch):
    monkeypatch.setattr(setup, "devices_from_environment", lambda: None)
    assert setup.find_devices(configs.Config())[0] is not None
    monkeypatch.setenv("HETJAX_PROCESSES", "1")
    assert setup.find_devices(configs.Config())[0] is None


@pytest.mark.slow
def test_a_run_restarted_before_its_first_step_does_not_resume_the_run_it_replaces(tmp_path, monkeypatch, no_figures):
    """The launcher adds --resume and its start time; an older configuration belongs to another run."""
    assert train.main([*TINY, "--steps", "1", "--strategy", "equal", "--out", str(tmp_path)]) == 0
    written = (tmp_path / "config.json").stat().st_mtime
    again = ["--resume", "--batch-size", "32", "--out", str(tmp_path)]
    monkeypatch.setenv("HETJAX_RESTART", "1")
    monkeypatch.setenv("HETJAX_STARTED", str(written + 1))
    config = train.read_config(again)
    assert (config.output.resume, config.data.batch_size, config.model.model) == (False, 32, "cnn")
    monkeypatch.setenv("HETJAX_STARTED", str(written - 1))
    with pytest.raises(ValueError, match="was started with batch_size=64"):
        train.read_config(again)


@pytest.mark.parametrize(
    ("flags", "folder"),
    [
        ([], "digits-cnn"),
        (["--dataset", "idx:/data", "--model", "mlp"], "idx-mlp"),
        (["--strategy", "dbs"], "digits-cnn-dbs"),
        (["--controller", "fixed:4,2,1,1", "--sync", "decentralized"], "digits-cnn-fixed-decentralized"),
        (["--partition", "submodular"], "digits-cnn-submodular"),
        (["--config", "digits_slowdown"], "digits_slowdown-balanced"),
        (["--config", "digits_slowdown", "--strategy", "dbs"], "digits_slowdown-dbs"),
        (["--strategy", "dbs", "--out", "mine"], "mine"),
    ],
)
def test_runs_of_other_methods_have_folders_of_their_own(flags, folder):
    assert train.read_config(flags).folder == Path(folder if "--out" in flags else Path("runs") / folder)


@pytest.mark.slow
def test_runs_of_two_strategies_are_kept_compared_and_resumed_without_a_folder(tmp_path, monkeypatch, no_figures):
    monkeypatch.chdir(tmp_path)
    for strategy in ("equal", "dbs"):
        assert train.main([*TINY, "--strategy", strategy, "--steps", "1"]) == 0
    assert [path.parent.name for path in sorted(Path("runs").glob("*/summary.json"))] == [
        "digits-mlp-dbs", "digits-mlp-equal",
    ]  # fmt: skip
    assert train.main([*TINY, "--strategy", "dbs", "--steps", "2", "--resume"]) == 0
    assert [read_run(Path("runs") / f"digits-mlp-{name}").steps for name in ("equal", "dbs")] == [1, 2]


def files(folder):
    """Contents of all files that a run is resumed from or reported from."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != "log.txt"}


@pytest.mark.parametrize(
    "method",
    [
        pytest.param(["--strategy", "equal"], id="one run"),
        pytest.param([], id="a comparison"),
    ],
)
@pytest.mark.slow
def test_a_run_that_fails_before_its_first_step_leaves_the_earlier_one_unchanged(method, tmp_path, monkeypatch):
    """A restarted run does not resume the earlier one either; the first step of a new run replaces it."""
    run = [*TINY, *method, "--out", str(tmp_path)]
    assert train.main([*run, "--steps", "3"]) == 0
    before = files(tmp_path)
    assert any("step_00000003" in str(path) for path in before)
    for wrong in (["--capacity", "1"], ["--wandb", "nowhere"], ["--save-steps", "0"], ["--seed", "1"]):
        with monkeypatch.context() as patched:
            patched.setitem(sys.modules, "wandb", None)  # as if it were not installed
            if "--seed" in wrong:
                patched.setattr(train.Trainer, "fit", disk_full)  # just before the first step
            assert train.main([*run, *wrong]) == 2
        assert files(tmp_path) == before
    monkeypatch.setenv("HETJAX_RESTART", "1")
    monkeypatch.setenv("HETJAX_STARTED", str(time.time()))
    assert train.main([*run, "--steps", "2", "--resume"]) == 0
    after = files(tmp_path)
    assert any("step_00000002" in str(path) for path in after)
    assert not any("step_00000003" in str(path) or "replaced" in str(path) for path in after)
    last = tmp_path if method else tmp_path / "balanced"
    assert json.loads((last / "summary.json").read_text())["steps"] == 2
    assert len((last / "metrics.jsonl").read_text().splitlines()) == 2


def disk_full(*_, **__):
    raise OSError("The disk is full.")


def test_kinds_of_device_compute_in_their_dtype(tmp_path, monkeypatch, no_figures):
    """The layers keep no dtype of their own, which would undo it."""
    seen, apply = set(), nnx.Linear.__call__

    def called(layer, x):
        out = apply(layer, x)
        seen.add(str(out.dtype))
        return out

    monkeypatch.setattr(nnx.Linear, "__call__", called)
    flags = ["--steps", "1", "--strategy", "equal", "--devices", "1", "--compute-dtype", "cpu=bfloat16,T4=float16"]
    assert train.main([*TINY, *flags, "--out", str(tmp_path)]) == 0
    assert "bfloat16" in seen
    assert json.loads((tmp_path / "config.json").read_text())["compute_dtype"] == "cpu=bfloat16,T4=float16"


@pytest.mark.slow
def test_a_resumed_run_must_be_the_same_training(tmp_path, capsys, no_figures):
    assert train.main([*TINY, "--steps", "1", "--strategy", "equal", "--out", str(tmp_path)]) == 0
    assert train.main(["--resume", "--out", str(tmp_path), "--learning-rate", "0.5"]) == 2
    assert "was started with learning_rate=None and cannot continue with 0.5" in " ".join(
        capsys.readouterr().err.split()
    )


def test_help_fits_80_columns_and_offers_only_usable_controllers(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        train.main(["--help"])
    printed = capsys.readouterr().out
    assert "equal, static, balanced, dp, edp, dbs," in printed
    assert max(map(len, printed.splitlines())) <= 80
    assert "oracle" not in printed.replace("|", " ").split()
