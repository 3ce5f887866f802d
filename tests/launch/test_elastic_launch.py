"""The launcher of an elastic run: who is lost is reported, others go on, hung ones are killed, new ones are started."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from launching import HEARTBEAT, until

from hetjax.fleet.rendezvous import free_port

pytestmark = pytest.mark.slow
MEMBER = """
sys.path.insert(0, os.environ["PYTHONPATH"])
from hetjax.fleet.registration import Fenced, Registration, RunStopped
joins = "HETJAX_JOIN" in os.environ
member = Registration(os.environ["HETJAX_RENDEZVOUS"], address="tcp://none", joins=joins)
mark = lambda name: open(f"{name}-{member.number}", "w").close()
asked = []
for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, lambda number, frame: asked.append(number))
if joins:
    member.ready()
generation = 0
while not (os.path.exists("end") or signal.SIGUSR1 in asked):
    try:
        newest = member.wait_newer(generation, 0.01)
    except TimeoutError:
        if signal.SIGTERM in asked:
            member.close(finished=False)
            sys.exit(0)
        continue
    generation = newest.number
    member.confirm(generation, 0)
    member.enter(generation)
    if newest.stop:
        member.wait_confirmed(generation, 60.0)
        member.close(finished=False)
        sys.exit(3)
    mark("of-" + ".".join(map(str, newest.numbers)))
    ACT
member.close()
"""
FLAGS = ("--elastic", "--transport", "host")


def members(sandbox, act=""):
    return sandbox.program(MEMBER.replace("ACT", act or "pass"))


def seen(sandbox, *numbers):
    """Wait until all these members have been in a generation of them."""
    names = [f"of-{'.'.join(map(str, numbers))}-{number}" for number in numbers]
    until(lambda: all((sandbox.folder / name).exists() for name in names), f"{names}", 120.0)


def pid_of(sandbox, slot):
    """The running process of a slot of the launcher."""
    for pid in sandbox.processes():
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        if b"HETJAX_PROCESS=%d" % slot in environment and b"program.py" in Path(f"/proc/{pid}/cmdline").read_bytes():
            return pid
    raise AssertionError(f"there is no process {slot}")


def end(sandbox, launcher):
    (sandbox.folder / "end").touch()
    out, err = launcher.communicate(timeout=120)
    return launcher.returncode, out, err


def test_the_others_go_on_after_a_kill_and_a_leaver_and_nothing_is_left(sandbox):
    launcher = sandbox.start("--processes", 4, *FLAGS, "--", members(sandbox))
    seen(sandbox, 0, 1, 2, 3)
    os.kill(pid_of(sandbox, 1), signal.SIGKILL)
    seen(sandbox, 0, 2, 3)
    os.kill(pid_of(sandbox, 0), signal.SIGTERM)
    seen(sandbox, 2, 3)
    code, _, err = end(sandbox, launcher)
    assert code == 0
    assert re.search(r"process 1 \(pid \d+\) was killed by SIGKILL", err)
    assert "Generation 2: members 0, 2, 3. Member 1 was lost: its process was killed by SIGKILL." in err
    assert "Generation 3: members 2, 3. Member 0 left." in err
    assert "Generation 4" not in err


def test_lost_processes_are_replaced_as_often_as_asked(sandbox):
    launcher = sandbox.start("--processes", 2, *FLAGS, "--restart", 1, "--", members(sandbox))
    seen(sandbox, 0, 1)
    os.kill(pid_of(sandbox, 1), signal.SIGKILL)
    seen(sandbox, 0, 2)
    os.kill(pid_of(sandbox, 0), signal.SIGKILL)
    seen(sandbox, 2)
    code, _, err = end(sandbox, launcher)
    assert code == 0
    assert err.count("another one is started") == 1


def test_a_stopped_process_is_taken_out_and_killed(sandbox):
    launcher = sandbox.start("--processes", 3, *FLAGS, "--silent-limit", 4, "--", members(sandbox))
    seen(sandbox, 0, 1, 2)
    pid = pid_of(sandbox, 0)
    os.kill(pid, signal.SIGSTOP)
    seen(sandbox, 1, 2)
    until(lambda: pid not in sandbox.processes(), "the end of the stopped process")
    assert end(sandbox, launcher)[0] == 0


def test_too_few_are_stopped_and_the_exit_code_is_theirs(sandbox):
    program = members(sandbox, "if len(newest.numbers) == 3 and rank == 2: os._exit(9)")
    code, _, err = sandbox.run("--processes", 3, *FLAGS, "--min-members", 3, "--", program)
    assert code == 3
    assert "The run stops: 2 members are left, and at least 3 are wanted." in err


def test_the_launchers_own_signal_stops_all(sandbox):
    launcher = sandbox.start("--processes", 2, *FLAGS, "--restart", 5, "--", members(sandbox))
    seen(sandbox, 0, 1)
    launcher.send_signal(signal.SIGTERM)
    _, err = launcher.communicate(timeout=120)
    assert launcher.returncode == 0
    assert "Generation 2" not in err


def test_two_launchers_at_a_rendezvous_that_is_killed_and_started_again(sandbox):
    address = f"127.0.0.1:{free_port('127.0.0.1')}"
    command = [sys.executable, "-m", "hetjax", "rendezvous", "--bind", address, "--processes", "2"]
    command += ["--state", str(sandbox.folder / "state")]
    first = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    program = members(sandbox)
    launchers = [sandbox.start("--processes", 1, "--rendezvous", address, "--", program) for _ in range(2)]
    seen(sandbox, 0, 1)
    first.kill()
    first.communicate()
    second = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    joiner = sandbox.start("--processes", 1, "--join", address, "--", program)
    seen(sandbox, 0, 1, 2)
    assert [end(sandbox, launcher)[0] for launcher in (*launchers, joiner)] == [0, 0, 0]
    out, _ = second.communicate(timeout=60)
    assert second.returncode == 0
    assert "Member 2 joined." in out
    assert not (sandbox.folder / "state").exists()


def test_a_process_without_a_sign_of_life_is_killed_and_the_others_go_on(sandbox):
    act = f"pass\n{HEARTBEAT}\n"
    program = sandbox.program(act + MEMBER.replace("ACT", "pass"))
    launcher = sandbox.start("--processes", 2, *FLAGS, "--silent-limit", 3, "--restart", 1, "--", program)
    seen(sandbox, 0, 1)
    os.kill(pid_of(sandbox, 0), signal.SIGSTOP)
    seen(sandbox, 1, 2)
    assert end(sandbox, launcher)[0] == 0


@pytest.mark.parametrize(("flags", "words"), [
    (("--min-members", 0), "--min-members is 0"), (("--join", "nowhere"), "is not HOST:PORT"),
    (("--join", "a:1", "--rendezvous", "b:2"), "give only one"), (("--join", "a:1", "--transport", "mesh"), "host"),
])  # fmt: skip
def test_flags_that_make_no_sense_are_refused(sandbox, flags, words):
    code, _, err = sandbox.run(*flags, "--", members(sandbox))
    assert code == 2
    assert words in err
