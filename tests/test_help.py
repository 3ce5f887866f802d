"""The help of every command fits a terminal of 80 columns and shows no placeholder of the parser."""

import pytest

from hetjax.__main__ import COMMANDS, main


@pytest.mark.parametrize("command", [None, *COMMANDS])
def test_help_is_readable(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as ended:
        main(["--help"] if command is None else [command, "--help"])
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    assert printed.startswith("usage: hetjax ")
    assert max(map(len, printed.splitlines())) <= 80
    for placeholder in ("None", "default: )", "default: False"):
        assert placeholder not in printed


@pytest.mark.parametrize("command", COMMANDS)
def test_the_list_of_commands_names_every_command(command, capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    assert command in capsys.readouterr().out
