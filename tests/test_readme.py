"""Every command and code example in README.md runs; long trainings are shortened."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import quick_compiles
from page_blocks import blocks, check_command, commands

from hetjax.__main__ import main
from hetjax.cli.train import read_config
from hetjax.launch import launcher
from hetjax.launch import options as launch_flags
from hetjax.presets import PRESETS

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = commands(README)
TRAIN = [words[2:] for words in COMMANDS if words[:2] == ["hetjax", "train"] and words[2:]]
SHORT = ["--steps", "1", "--batch-size", "32", "--model", "mlp", "--out", "runs/digits-cnn"]


def run(*command, cwd):
    env = {**os.environ, "XLA_FLAGS": quick_compiles.FLAGS}
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=280, check=False)
    return done.returncode, done.stdout + done.stderr


def test_the_set_up_commands_stand_on_lines_of_their_own():
    lines = README.splitlines()
    assert "pip install -e . && python experiments/train.py" in lines
    assert 'pip install -e ".[test]" && pytest' in lines


@pytest.mark.slow
def test_the_default_run_and_what_follows_it(tmp_path, monkeypatch):
    code, printed = run(sys.executable, ROOT / "experiments" / "train.py", *SHORT, cwd=tmp_path)
    assert code == 0, printed
    assert "test accuracy" in printed
    metrics = (tmp_path / "runs" / "digits-cnn" / "balanced" / "metrics.jsonl").read_text()
    assert '"counts": [8, 8, 8, 8]' in metrics  # four simulated devices by default
    monkeypatch.chdir(tmp_path)
    assert ["--resume"] in TRAIN
    assert main(["train", "--resume"]) == 0
    (strategy,) = [flags for flags in TRAIN if flags[0] == "--strategy" and "--epochs" in flags]
    folder = str(read_config(strategy).folder)
    assert main(["train", *strategy[:2], *SHORT[:-1], folder]) == 0
    (report,) = [words[1:] for words in COMMANDS if words[:2] == ["hetjax", "report"]]
    assert report[1:] == [str(read_config([]).folder), folder]  # what the commands above have written
    assert main(report) == 0
    assert (tmp_path / "runs" / "report.html").is_file()


def test_the_other_commands_are_run_elsewhere():
    assert ["--config", "digits_slowdown"] in TRAIN  # in tests/experiments/test_configs.py
    assert ["hetjax", "check"] in COMMANDS  # in tests/report/test_commands.py


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_command_exists_with_its_flags(command):
    check_command(command)


@pytest.mark.slow
def test_the_launcher_commands(tmp_path, monkeypatch):
    """All are checked; the one with restarts runs, shortened."""
    started = []
    monkeypatch.setattr(launcher, "launch", lambda options, program: started.append((options, program)) or 0)
    launches = [words for words in COMMANDS if words[:2] == ["hetjax", "launch"]]
    for command in launches:
        assert main(command[1:]) == 0
    for options, program in started:
        launch_flags.check(options)
        assert launch_flags.command_of(program)[:3] == [sys.executable, "-m", "hetjax"]
    (command,) = [command for command in launches if "--elastic" in command]
    command = [sys.executable, "-m", *command, *SHORT[:-1], tmp_path / "run"]
    code, printed = run(*command, cwd=ROOT)
    assert code == 0, printed
    assert "balanced  step 1/1" in printed
    assert "test accuracy" in printed


@pytest.mark.parametrize("command", [words for words in COMMANDS if words[0] == "pip"], ids=" ".join)
@pytest.mark.slow
def test_the_package_can_be_installed(command):
    code, printed = run(sys.executable, "-m", *command, "--dry-run", "--no-deps", cwd=ROOT)
    if code and "No matching distribution found for setuptools" in printed:
        pytest.skip("no package index available")
    assert code == 0, printed
    assert "does not provide the extra" not in printed


@pytest.mark.slow
def test_pytest_finds_this_test():
    assert ["pytest"] in COMMANDS
    code, printed = run(sys.executable, "-m", "pytest", "--collect-only", Path(__file__), cwd=ROOT)
    assert code == 0
    assert "test_readme.py" in printed


def test_the_library_examples_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    trainer, loop = blocks(README, "python")
    count = lambda block: len([line for line in block.splitlines() if line.strip()])
    assert count(trainer) <= 12
    assert count(loop) <= 8
    names = {}
    exec(compile(trainer, "README.md", "exec"), names)
    assert " samples/s" in capsys.readouterr().out
    exec(compile(loop, "README.md", "exec"), names)
    assert "'loss'" in capsys.readouterr().out


def test_the_table_lists_all_strategies():
    rows = re.findall(r"^\| (`.*`) \| .* \|$", README, re.MULTILINE)
    assert sorted(re.findall(r"`([\w-]+)`", " ".join(rows))) == sorted(PRESETS)


def test_linked_files_exist_and_it_is_short():
    for path in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / path).is_file(), path
    assert len(README.split()) < 950
