"""Usage errors of the launcher: a sentence and exit code 2, before anything is started."""

import socket

import pytest

from hetjax.__main__ import main
from hetjax.launch import launcher
from hetjax.launch.quotas import ADVICE, QuotasRefused

ERRORS = {
    "nothing to run": ([], None),
    "There is no program 'nowhere.py'": ([], ["nowhere.py"]),
    "--processes is 0": (["--processes", "0"], ["true"]),
    "--quotas gives 3 quotas for 2 processes": (["--quotas", "1,1,1"], ["true"]),
    "--quotas is '1,x': expected cores": (["--quotas", "1,x"], ["true"]),
    "A quota is a number of cores from 0.001 up, such as 0.5; got 0.0": (["--quotas", "1,0"], ["true"]),
    "such as 0.5; got nan": (["--quotas", "1,nan"], ["true"]),
    "--quotas gives a process 4000 cores": (["--quotas", "4000,1"], ["true"]),
    "--disturb at step 5 gives a process 4000 cores": (["--disturb", "5:1,4000"], ["true"]),
    "--disturb has '30'": (["--disturb", "30"], ["true"]),
    "--disturb has 'x:1,1'": (["--disturb", "x:1,1"], ["true"]),
    "--disturb has ''": (["--disturb", "3:1,1;"], ["true"]),
    "--disturb at step 30 gives 1 quotas for 2": (["--disturb", "30:1"], ["true"]),
    "in increasing order": (["--disturb", "30:1,1;20:1,1"], ["true"]),
    "--devices gives 3 entries for 2 processes": (["--devices", "cpu/cpu/gpu"], ["true"]),
    "devices is 'gpu+'": (["--devices", "gpu+/cpu"], ["true"]),
    "devices is empty": (["--devices", "cpu/"], ["true"]),
    "The key in nowhere cannot be read": (["--key", "nowhere"], ["true"]),
    "--restart is -1": (["--restart=-1"], ["true"]),
    "--port is 70000": (["--port", "70000"], ["true"]),
    "The host 'no.such.host.invalid' is not known": (["--bind", "no.such.host.invalid"], ["true"]),
    "cannot listen on 192.0.2.77": (["--bind", "192.0.2.77"], ["true"]),
    "--silent-limit is 0.5": (["--silent-limit", "0.5"], ["true"]),
    "--grace is 0.0": (["--grace", "0"], ["true"]),
}


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch):
    def refuse(*_):
        raise AssertionError("something was started")

    monkeypatch.setattr(launcher, "Guard", refuse)
    monkeypatch.setattr(launcher, "Supervisor", refuse)


@pytest.mark.parametrize("message", ERRORS)
def test_a_sentence_and_exit_code_2(message, capsys):
    flags, program = ERRORS[message]
    assert main(["launch", *flags, *(["--", *program] if program is not None else [])]) == 2
    assert message in capsys.readouterr().err


def test_a_port_in_use(capsys):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert main(["launch", "--port", str(port), "--", "true"]) == 2
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in capsys.readouterr().err


def test_an_unknown_flag(capsys):
    with pytest.raises(SystemExit) as error:
        main(["launch", "--nonsense", "--", "true"])
    assert error.value.code == 2


def test_refused_quotas_come_with_an_alternative(capsys, monkeypatch):
    def refuse():
        raise QuotasRefused(f"CPU quotas cannot be set here: Permission denied. {ADVICE}")

    monkeypatch.setattr(launcher, "find_cgroup_root", refuse)
    assert main(["launch", "--quotas", "0.8,0.4", "--", "true", "--steps", "3"]) == 2
    message = capsys.readouterr().err
    assert "systemd-run --user --scope -p Delegate=yes" in message
    assert "`python true --steps 3 --speeds 0.8,0.4`" in message


def test_more_processes_than_gpus(capsys, monkeypatch):
    monkeypatch.setattr(launcher, "visible_gpus", lambda environment: 1)
    assert main(["launch", "--", "true"]) == 2
    assert "2 processes need a GPU each, and there are 1" in capsys.readouterr().err
