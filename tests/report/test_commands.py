"""The commands check and report of `python -m hetjax`."""

import os
import subprocess
import sys
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from fake_run import write_fake_run
from rich.console import Console

from hetjax.__main__ import main
from hetjax.cli.check import fleet_table, sentences
from hetjax.devices.workers import Worker, Workers


@pytest.mark.slow
@pytest.mark.parametrize(("options", "workers"), [([], 4), (["--devices", "2", "--parameters", "70000"], 2)])
def test_check_describes_the_devices_and_verifies_their_results(options, workers):
    # A process of its own, in which JAX has not fixed the number of devices yet.
    env = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES")}
    command = [sys.executable, "-m", "hetjax", "check", *options]
    printed = subprocess.run(command, env=env, check=True, timeout=280, capture_output=True, text=True).stdout
    assert f"{workers} workers in 1 process" in printed
    assert f"cpu:{workers - 1}" in printed
    for word in ("GiB", "Engine chunked", "Ladder for cpu", "Sums travel by mesh", "samples/s",
                 "beyond its slowest local phase", "agree"):  # fmt: skip
        assert word in printed
    assert "70,000 parameters" in printed or not options


def test_check_refuses_a_model_without_parameters(capsys):
    assert main(["check", "--parameters", "0"]) == 2
    assert "parameters is 0: expected a whole number of at least 1" in capsys.readouterr().err


def test_the_fleet_fits_80_columns_and_names_who_is_benched():
    kinds = ["cuda:NVIDIA A100-SXM4-80GB", "cuda:Tesla T4", "cpu:cpu"]
    members = [Worker(k, kind.partition(":")[0], kind, f"cuda:{k}", 80 * 2**30) for k, kind in enumerate(kinds)]
    workers = Workers(tuple(members), ())
    found = {
        "transport": "host",
        "rates_W": np.array([120_345.6, 20_000.0, np.nan]),
        "samples_per_s": 130_000.0,
        "exchange_seconds": 0.0123,
        "parameters": 4321,
        "benched": {2: "without it a step takes 4.0 instead of 5.0 ms"},
    }
    console = Console(width=80, record=True, file=StringIO())
    console.print(fleet_table(workers, found))
    lines = console.export_text().splitlines()
    assert len(lines) == 4
    assert all(len(line) <= 80 for line in lines)
    assert lines[1].split() == ["0", "0", "cuda:0", "NVIDIA", "A100-SXM4-80GB", "80.0", "GiB", "120,346", "yes"]
    assert lines[3].split()[-2:] == ["-", "benched"]
    text = " ".join(sentences(workers, found))
    assert "All others together reach r = 0.17 times the rate of the fastest worker" in text
    assert "at most 1 + r = 1.17 times as fast as it alone." in text
    assert "Sums travel by host, between processes over ZeroMQ." in text
    assert "Exchange and update of 4,321 parameters take 12.3 ms of a step, beyond its slowest local phase." in text
    assert "Worker 2 would be benched: without it a step takes 4.0 instead of 5.0 ms." in text


def test_report_prints_the_paths_it_wrote(tmp_path, capsys):
    write_fake_run(tmp_path / "a")
    assert main(["report", str(tmp_path)]) == 0
    paths = [Path(path) for path in capsys.readouterr().out.split()]
    assert [path.name for path in paths] == ["run.png", "run.svg", "report.html"]
    assert all(path.is_file() for path in paths)


def test_report_on_a_folder_without_a_run_exits_with_2(tmp_path, capsys):
    assert main(["report", str(tmp_path)]) == 2
    assert "There is no metrics.jsonl" in capsys.readouterr().err
