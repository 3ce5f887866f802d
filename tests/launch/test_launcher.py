"""The launcher as a program: output, exit codes, signals, hung processes, restarts. Nothing is ever left behind."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from launching import HEARTBEAT, until

from hetjax.environment import PROGRAMS
from hetjax.launch.options import command_of

WAIT = "open(f'ready-{rank}', 'w').close(); time.sleep(100)"  # longer than a test may take
LEAVE_A_CHILD = "import subprocess; subprocess.Popen(['sleep', '100'])"
AFTER_RANK_0_IS_READY = "if rank == 1:\n    while not os.path.exists('ready-0'): pass\n    "


def test_output_is_whole_lines_prefixed_with_the_rank(sandbox):
    program = sandbox.program(
        "for k in range(200):\n"
        "    os.write(1, b'a' * 50); os.write(1, b'b' * 50 + b'%d\\n' % k); os.write(2, b'err\\n')\n"
        "os.write(1, b'no newline')"
    )
    code, lines, err = sandbox.run("--processes", 3, "--", program)
    assert code == 0
    for rank in range(3):
        own = [line.removeprefix(f"[{rank}] ") for line in lines if line.startswith(f"[{rank}] ")]
        assert own == [*(f"{'a' * 50}{'b' * 50}{k}" for k in range(200)), "no newline"]
    assert len(lines) == 3 * 201
    assert sorted(err.splitlines()) == sorted(f"[{rank}] err" for rank in range(3) for _ in range(200))


def test_prefixes_are_colored_on_a_terminal(sandbox):
    reader, writer = os.openpty()
    launcher = sandbox.start("--", sandbox.program("print('here')"), stdout=writer)
    launcher.communicate(timeout=120)
    os.close(writer)
    output = os.read(reader, 10_000)
    os.close(reader)
    assert b"\x1b[36m[0]\x1b[0m here" in output
    assert b"\x1b[33m[1]\x1b[0m here" in output


def test_environment_arguments_and_cores_of_a_process(sandbox, monkeypatch):
    """Also: a child that a process leaves behind is killed."""
    monkeypatch.setenv(PROGRAMS, "/mine")
    variables = "{k: v for k, v in os.environ.items() if k.startswith('HETJAX')}"
    program = sandbox.program(
        f"import json; print(json.dumps([sys.argv[1:], {variables}, sorted(os.sched_getaffinity(0))]))\n{LEAVE_A_CHILD}"
    )
    code, lines, _ = sandbox.run("--processes", 2, "--pin", "--", program, "-x", "--", "y")
    assert code == 0
    (arguments, first, cores), (arguments_too, second, cores_too) = (json.loads(line[4:]) for line in sorted(lines))
    assert arguments == arguments_too == ["-x", "--", "y"]
    assert (first.pop("HETJAX_PROCESS"), second.pop("HETJAX_PROCESS")) == ("0", "1")
    assert first == second
    assert first["HETJAX_COORDINATOR"] == first["HETJAX_BIND"]
    assert re.fullmatch(r"127\.0\.0\.1:\d+", first["HETJAX_BIND"])
    assert first["HETJAX_PROCESSES"] == "2"
    assert first[PROGRAMS] == "/mine"
    assert "HETJAX_RESTART" not in first
    available = os.sched_getaffinity(0)
    assert {*cores, *cores_too} == available
    assert abs(len(cores) - len(cores_too)) <= 1
    assert len(available) == 1 or not set(cores) & set(cores_too)


def test_modules_and_commands_can_be_launched(sandbox):
    assert command_of(["-m", "json.tool", "x"]) == [sys.executable, "-m", "json.tool", "x"]
    assert Path(command_of(["env", "true"])[0]).name == "env"
    assert sandbox.run("--", "env", sys.executable, "-m", "json.tool", "--help")[0] == 0


@pytest.mark.parametrize(
    ("failure", "code", "message"),
    [("sys.exit(7)", 7, "ended with exit code 7"), ("os.kill(os.getpid(), 9)", 137, "was killed by SIGKILL")],
)
def test_the_first_failure_is_reported_and_stops_the_rest(sandbox, failure, code, message):
    """The other process ignores SIGTERM and is killed after the grace period."""
    ignore = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    program = sandbox.program(f"{ignore}\n{AFTER_RANK_0_IS_READY}{failure}\n{WAIT}")
    actual, _, err = sandbox.run("--processes", 2, "--grace", 0.2, "--", program)
    assert actual == code
    assert "[launcher] process 1 (pid " in err
    assert f"{message}; stopping the others" in err


def test_a_peer_that_fails_before_the_killed_process_is_reaped_is_not_blamed(sandbox):
    """Process 1 fails when process 0 is about to die: within the second that the launcher waits."""
    program = sandbox.program(
        f"{AFTER_RANK_0_IS_READY}sys.exit(1)\nopen('ready-0', 'w').close(); time.sleep(0.3); os.kill(os.getpid(), 9)"
    )
    code, _, err = sandbox.run("--processes", 2, "--", program)
    assert code == 137
    assert "[launcher] process 0 (pid " in err
    assert "process 1" not in err


@pytest.mark.parametrize(
    "names",
    ["SIGINT SIGTERM", pytest.param("SIGINT", marks=pytest.mark.slow), pytest.param("SIGTERM", marks=pytest.mark.slow)],
)
def test_signals_are_forwarded_and_all_processes_may_finish(sandbox, names):
    """A process that exits, and is reaped, does not stop one that is still saving, nor is there a restart."""
    numbers = [signal.Signals[name] for name in names.split()]
    program = sandbox.program(
        "received = []\n"
        "for n in (signal.SIGINT, signal.SIGTERM): signal.signal(n, lambda n, f: received.append(n))\n"
        f"open(f'ready-{{rank}}', 'w').close()\nwhile len(received) < {len(numbers)}: time.sleep(0.01)\n"
        "if rank == 0:\n    while not os.path.islink('left-1'): time.sleep(0.01)\n"
        "    while os.path.exists('/proc/' + os.readlink('left-1')): time.sleep(0.01)\n    print('saved')\n"
        "os.symlink(str(os.getpid()), f'left-{rank}')\n"
        "print(*(signal.Signals(n).name for n in received)); sys.exit(130)"
    )
    launcher = sandbox.start("--processes", 2, "--restart", 5, "--", program)
    sandbox.wait_for_files("ready", 2)
    for number in numbers:
        launcher.send_signal(number)
        assert f"forwarding {number.name} to all processes" in launcher.stderr.readline()
    out, err = launcher.communicate(timeout=120)
    assert (launcher.returncode, err) == (130, "")
    assert sorted(out.splitlines()) == [f"[0] {names}", "[0] saved", f"[1] {names}"]


def test_death_by_a_forwarded_signal_is_no_failure(sandbox):
    launcher = sandbox.start("--restart", 5, "--", sandbox.program(WAIT))
    sandbox.wait_for_files("ready", 2)
    launcher.terminate()
    assert launcher.communicate(timeout=120)[1] == "[launcher] forwarding SIGTERM to all processes\n"
    assert launcher.returncode == 128 + signal.SIGTERM


def test_the_third_signal_kills(sandbox):
    program = sandbox.program(f"signal.signal(signal.SIGINT, signal.SIG_IGN)\n{WAIT}")
    launcher = sandbox.start("--", program)
    sandbox.wait_for_files("ready", 2)
    for _ in range(2):
        launcher.send_signal(signal.SIGINT)
        assert "forwarding SIGINT" in launcher.stderr.readline()
    launcher.send_signal(signal.SIGINT)
    assert "SIGINT is the third signal" in launcher.communicate(timeout=120)[1]
    assert launcher.returncode == 130


def test_nothing_survives_a_killed_launcher(sandbox):
    """Not even the children of its processes."""
    launcher = sandbox.start("--", sandbox.program(f"{LEAVE_A_CHILD}\n{WAIT}"))
    sandbox.wait_for_files("ready", 2)
    assert len(sandbox.processes()) == 6  # launcher, guard, two processes and their children
    launcher.kill()
    launcher.wait(timeout=120)
    until(lambda: not sandbox.processes(), "the end of all processes")


def test_a_closed_stdout_stops_the_run(sandbox):
    launcher = sandbox.start("--", sandbox.program("while True: print('y' * 100, flush=True)"), stdout=subprocess.PIPE)
    launcher.stdout.readline()
    launcher.stdout.close()
    assert launcher.wait(timeout=120) == 128 + signal.SIGPIPE


# -- hung processes --


@pytest.mark.parametrize(
    ("hang", "message"),
    [
        ("os.kill(os.getpid(), signal.SIGSTOP)", "has been stopped (SIGSTOP or a debugger) for"),
        ("heartbeat.close()", "gave no sign of life for 2 s"),  # as if a thread never released the GIL
    ],
    ids=["stopped", "silent"],
)
def test_a_process_without_a_heartbeat_is_detected(sandbox, hang, message):
    # Process 0 has no heartbeat: however long a busy machine keeps it waiting, it is not taken for the one that hangs.
    program = sandbox.program(f"if rank == 0: {WAIT}\n{HEARTBEAT}{hang}\n{WAIT}")
    code, _, err = sandbox.run("--silent-limit", 2, "--grace", 0.5, "--", program)
    assert code == 124
    assert re.search(rf"process 1 \(pid \d+\) {re.escape(message)}", err)


def test_a_process_that_completes_no_steps_is_detected(sandbox):
    loop = "step = 5\nwhile True:\n    heartbeat(Record(step=step), None); step += rank; time.sleep(0.01)"
    program = sandbox.program(f"{HEARTBEAT}heartbeat.begin(None)\n{loop}")
    code, _, err = sandbox.run("--step-limit", 1, "--grace", 0.5, "--", program)
    assert code == 124
    assert re.search(r"process 0 \(pid \d+\) finished no step for 1 s; its last one was step 5", err)


@pytest.mark.slow
def test_a_long_compilation_or_evaluation_is_no_hang(sandbox):
    program = sandbox.program(
        f"{HEARTBEAT}time.sleep(6.5); heartbeat.begin(None); heartbeat.end(None); time.sleep(1.5)"
    )
    assert sandbox.run("--silent-limit", 6, "--step-limit", 1, "--", program)[0] == 0


# -- restarts --


def failing_once(failure):
    """A program whose first attempt fails; prints its arguments and environment as JSON."""
    return (
        "import json; print(json.dumps([sys.argv[1:], dict(os.environ)]))\n"
        f"if 'HETJAX_RESTART' not in os.environ:\n    if rank == 1: {failure}\n    time.sleep(100)"
    )


def restarted(lines):
    """Arguments and environment of the second attempt's process 0."""
    attempts = [json.loads(line[4:]) for line in lines if line.startswith("[0]")]
    ((arguments, variables),) = [each for each in attempts if "HETJAX_RESTART" in each[1]]
    return arguments, variables


def test_all_processes_are_restarted_with_resume(sandbox, monkeypatch):
    monkeypatch.delenv(PROGRAMS, raising=False)
    program = sandbox.program(failing_once("sys.exit(1)"))
    code, lines, err = sandbox.run("--restart", 2, "--", program, "--steps", 5)
    assert code == 0
    assert "restarting with 2 processes from the last checkpoint (restart 1 of at most 2)" in err
    arguments, variables = restarted(lines)
    assert arguments == ["--steps", "5", "--resume"]
    assert (variables["HETJAX_RESTART"], variables["HETJAX_PROCESSES"]) == ("1", "2")
    assert float(variables["HETJAX_STARTED"]) >= Path(program).stat().st_mtime  # older checkpoints are not this run's
    folders = {json.loads(line[4:])[1][PROGRAMS] for line in lines}
    assert len(folders) == 1  # the restart finds what the first attempt compiled
    assert sandbox.temporary in Path(folders.pop()).parents  # which is removed with the launcher


@pytest.mark.parametrize(
    ("flags", "given", "arguments"),
    [(["--restart"], ["--resume"], ["--resume"]), (["--restart", 1, "--resume-flag=--go-on"], [], ["--go-on"])],
)
def test_the_resume_flag_is_not_repeated_and_can_be_changed(sandbox, flags, given, arguments):
    program = sandbox.program(failing_once("os.kill(os.getpid(), 9)"))
    _, lines, _ = sandbox.run(*flags, "--", program, *given)
    found, variables = restarted(lines)
    assert found == arguments
    assert ("HETJAX_STARTED" in variables) == (not given)  # a run that was resumed by its user is not a new one


@pytest.mark.slow
def test_restarts_are_limited(sandbox):
    code, _, err = sandbox.run("--restart", 2, "--", sandbox.program("if rank == 0: sys.exit(9)\ntime.sleep(100)"))
    assert code == 9
    assert err.count("restarting with") == 2
    assert "giving up after 2 restarts" in err


def test_a_usage_error_is_not_repeated(sandbox):
    code, _, err = sandbox.run("--restart", 2, "--", sandbox.program("sys.exit(2)"))
    assert code == 2
    assert "restarting" not in err


def test_elastic_restarts_without_the_lost_processes(sandbox):
    """Process 1 of 3 dies, then process 0 of 2; the last one finishes alone."""
    program = sandbox.program(
        "n = int(os.environ['HETJAX_PROCESSES'])\nprint('lost ' + os.environ.get('HETJAX_LOST', '-'))\n"
        "if n == 3 and rank == 1 or n == 2 and rank == 0: os.kill(os.getpid(), 9)\n"
        "if n > 1: time.sleep(100)\nprint('alone', sys.argv[1:])"
    )
    code, lines, err = sandbox.run("--processes", 3, "--elastic", "--", program)
    assert (code, lines[-1]) == (0, "[0] alone ['--resume']")
    assert "restarting with 2 processes" in err
    assert "restarting with 1 process " in err
    assert {line.partition(" ")[2] for line in lines[:-1]} == {"lost -", "lost 1", "lost 0,1"}  # original numbers
