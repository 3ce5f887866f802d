"""The help of every command fits a terminal of 80 columns and shows no placeholder of the parser."""

import runpy
import sys
from pathlib import Path

import pytest

from hetjax.__main__ import COMMANDS, main

EXPERIMENTS = Path(__file__).parents[1] / "experiments"
PLACEHOLDERS = ("{None}", "default: None", "default: )", "default: False", "default: ''")


@pytest.mark.parametrize("command", [None, *COMMANDS])
def test_help_is_readable(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as ended:
        main(["--help"] if command is None else [command, "--help"])
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    assert printed.startswith("usage: hetjax ")
    assert max(map(len, printed.splitlines())) <= 80
    assert not [placeholder for placeholder in PLACEHOLDERS if placeholder in printed]


@pytest.mark.parametrize("program", sorted(EXPERIMENTS.glob("*.py")), ids=lambda path: path.stem)
def test_help_of_an_experiment_is_readable(program, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys, "argv", [program.name, "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(program), run_name="__main__")
    assert ended.value.code == 0
    usage, *printed = capsys.readouterr().out.splitlines()
    assert max(map(len, printed)) <= 80
    assert not [placeholder for placeholder in PLACEHOLDERS if placeholder in "".join([usage, *printed])]


@pytest.mark.parametrize("command", COMMANDS)
def test_the_list_of_commands_names_every_command(command, capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    assert command in capsys.readouterr().out
