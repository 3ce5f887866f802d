"""Every command and code example in README.md runs; long trainings are shortened."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import quick_compiles

from hetjax.__main__ import main as hetjax_main
from hetjax.cli import train
from hetjax.cli.training import configs
from hetjax.launch import launcher
from hetjax.launch import options as launch_flags
from hetjax.presets import PRESETS
from hetjax.sync import REGISTRY

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = [
    command.strip()
    for block in re.findall(r"```bash\n(.*?)```", README, re.DOTALL)
    for line in block.splitlines()
    for command in line.split("&&")
]
TRAIN = [shlex.split(c)[2:] for c in COMMANDS if c.startswith("python experiments/train.py ")]
SHORT = ["--steps", "1", "--batch-size", "32", "--model", "mlp", "--out", "runs/digits-cnn"]


def run(*command, cwd, flags=""):
    env = {**os.environ, "XLA_FLAGS": f"{quick_compiles.FLAGS} {flags}"}
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=200, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
def test_the_default_run_and_what_follows_it(tmp_path, monkeypatch, capsys):
    assert "python experiments/train.py" in COMMANDS
    code, printed = run(sys.executable, ROOT / "experiments" / "train.py", *SHORT, cwd=tmp_path)
    assert code == 0, printed
    assert "test accuracy" in printed
    metrics = (tmp_path / "runs" / "digits-cnn" / "balanced" / "metrics.jsonl").read_text()
    assert '"counts": [8, 8, 8, 8]' in metrics  # four simulated devices by default
    monkeypatch.chdir(tmp_path)
    assert ["--resume"] in TRAIN
    assert train.main(["--resume"]) == 0
    (report,) = [shlex.split(c) for c in COMMANDS if c.startswith("python -m hetjax report")]
    assert hetjax_main(report[3:]) == 0
    assert (tmp_path / "runs" / "digits-cnn" / "report.html").is_file()


@pytest.mark.slow
def test_eight_devices_by_xla_flags(tmp_path):
    (command,) = [shlex.split(c) for c in COMMANDS if "XLA_FLAGS" in c]
    flags = command[0].removeprefix("XLA_FLAGS=")
    code, printed = run(sys.executable, ROOT / command[2], *SHORT, "--strategy", "equal", cwd=tmp_path, flags=flags)
    assert code == 0, printed
    assert '"counts": [4, 4, 4, 4, 4, 4, 4, 4]' in (tmp_path / "runs" / "digits-cnn" / "metrics.jsonl").read_text()


@pytest.mark.slow
def test_the_other_commands(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    cuts = [shlex.split(c)[3:] for c in COMMANDS if c.startswith("python -m hetjax partition")]
    assert ["--recut" in cut for cut in cuts] == [False, True]
    for cut in cuts:
        assert hetjax_main(cut) == 0
    for flags in TRAIN:
        if flags == ["--help"]:
            with pytest.raises(SystemExit):
                train.main(flags)
        elif flags[0] == "--config":  # one step of each runs in tests/experiments/test_configs.py
            assert flags[1] in configs.names()
        elif flags[0] == "--strategy":
            assert flags[2] == "--epochs"
            assert train.main([*flags[:2], *SHORT]) == 0
        elif flags[0] in ("--sync", "--partition"):
            assert train.main([*flags, *SHORT]) == 0
        else:
            assert flags == ["--resume"]
    assert "python -m hetjax check" in COMMANDS  # run in tests/report/test_commands.py


@pytest.mark.slow
def test_the_launcher_commands(tmp_path, monkeypatch):
    """All are parsed; the one with restarts runs, shortened."""
    started = []
    monkeypatch.setattr(launcher, "launch", lambda options, program: started.append((options, program)) or 0)
    monkeypatch.chdir(ROOT)
    commands = [shlex.split(c) for c in COMMANDS if c.startswith("python -m hetjax launch")]
    for command in commands:
        assert hetjax_main(command[3:]) == 0
    for options, program in started:
        launch_flags.check(options)
        assert launch_flags.command_of(program)[0] == sys.executable
        train.read_config(program[1:])
    (quotas,) = [options for options, _ in started if options.quotas]
    assert launch_flags.quotas_of(quotas) == (0.8, 0.4, 0.2, 0.2)
    assert [d.cores_P for d in launch_flags.disturbances_of(quotas)] == [(0.2, 0.4, 0.2, 0.8)]
    (command,) = [command for command in commands if "--elastic" in command]
    code, printed = run(sys.executable, *command[1:], *SHORT[:-1], tmp_path / "run", cwd=ROOT)
    assert code == 0, printed
    assert "[0] balanced: 2 workers" in printed
    assert "test accuracy" in printed


def test_the_commands_for_clusters():
    """Their flags are parsed; the variables of Open MPI and Slurm are tested in tests/fleet/test_distributed.py."""
    lines = [shlex.split(c) for c in COMMANDS if c.startswith(("srun", "mpirun", "ssh"))]
    assert [line[0] for line in lines] == ["srun", "mpirun", "ssh", "ssh"]
    for line in lines:
        start = next(i for i, word in enumerate(line) if word.endswith("train.py"))
        config = train.read_config(line[start + 1 :])
        if line[0] == "ssh":
            assert config.processes.coordinator == "host0:29500"
            assert (config.processes.processes, line[1]) == (2, f"host{config.processes.process}")


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("pip")])
@pytest.mark.slow
def test_the_package_can_be_installed(command):
    code, printed = run(sys.executable, "-m", *shlex.split(command), "--dry-run", "--no-deps", cwd=ROOT)
    if code and "No matching distribution found for setuptools" in printed:
        pytest.skip("no package index available")
    assert code == 0, printed
    assert "does not provide the extra" not in printed


@pytest.mark.slow
def test_pytest_finds_this_test():
    assert "pytest" in COMMANDS
    code, printed = run(sys.executable, "-m", "pytest", "--collect-only", Path(__file__), cwd=ROOT)
    assert code == 0
    assert "test_readme.py" in printed


def test_the_library_examples_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    first, loop, second = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len([line for line in first.splitlines() if line.strip()]) <= 10
    names = {}
    exec(compile(first, "README.md", "exec"), names)
    assert "'samples_per_s'" in capsys.readouterr().out
    exec(compile(loop, "README.md", "exec"), dict(names))
    assert "'loss'" in capsys.readouterr().out
    exec(compile(second, "README.md", "exec"), names)
    with pytest.raises(ValueError, match="Nothing left to train"):  # the last checkpoint is that of the end
        exec(compile(second, "README.md", "exec"), names)


def test_the_table_lists_all_strategies():
    rows = re.findall(r"^\| `(\w[\w-]*)` \| (\w+) \| (\w+) \| ([\w-]+) \| (.*) \|$", README, re.MULTILINE)
    controller = lambda s: s.controller if REGISTRY[s.sync].stepped else "none"
    assert rows == [(name, controller(s), s.partition, s.sync, s.idea) for name, s in PRESETS.items()]


def test_linked_files_exist():
    for path in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / path).is_file(), path
    assert (ROOT / "docs" / "balanced.png").stat().st_size < 200_000
