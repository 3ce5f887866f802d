"""The launcher as a program: output, exit codes, signals, restarts; whatever happens, nothing is left behind."""

import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
from launching import BEAT, until

from hetjax.environment import PROGRAMS

WAIT = "open(f'ready-{me}', 'w').close(); time.sleep(100)"


def test_whole_lines_with_the_number_of_their_process(place):
    program = place.program(
        "for k in range(200):\n"
        "    os.write(1, b'a' * 50); os.write(1, b'b' * 50 + b'%d\\n' % k); os.write(2, b'err\\n')\n"
        "os.write(1, b'no end of line')"
    )
    code, lines, err = place.run("--processes", 3, "--", program)
    assert code == 0
    for process in range(3):
        mine = [line.removeprefix(f"[{process}] ") for line in lines if line.startswith(f"[{process}] ")]
        assert mine == [*(f"{'a' * 50}{'b' * 50}{k}" for k in range(200)), "no end of line"]
    assert len(lines) == 3 * 201
    assert sorted(err.splitlines()) == sorted(f"[{process}] err" for process in range(3) for _ in range(200))


def test_every_process_knows_who_it_is(place):
    told = "{k: v for k, v in os.environ.items() if k.startswith('HETJAX')}"
    program = place.program(f"import json; print(json.dumps([sys.argv[1:], {told}]))")
    code, lines, _ = place.run("--processes", 2, "--", program, "-x", "--", "y")
    assert code == 0
    (first, said), (second, said_too) = (json.loads(line[4:]) for line in sorted(lines))
    assert first == second == ["-x", "--", "y"]
    assert (said.pop("HETJAX_PROCESS"), said_too.pop("HETJAX_PROCESS")) == ("0", "1")
    assert said == said_too
    assert said["HETJAX_COORDINATOR"] == said["HETJAX_BIND"]
    assert re.fullmatch(r"127\.0\.0\.1:\d+", said["HETJAX_BIND"])
    assert said["HETJAX_PROCESSES"] == "2"
    assert "HETJAX_RESTART" not in said


def test_pinned_processes_share_the_cores_out(place):
    cores = os.sched_getaffinity(0)
    program = place.program("import json; print(json.dumps(sorted(os.sched_getaffinity(0))))")
    code, lines, _ = place.run("--processes", 2, "--pin", "--", program)
    assert code == 0
    one, two = (set(json.loads(line[4:])) for line in sorted(lines))
    assert one | two == cores
    assert abs(len(one) - len(two)) <= 1
    assert len(cores) == 1 or not one & two


@pytest.mark.parametrize(
    ("how", "code", "told"),
    [("sys.exit(7)", 7, "ended with exit code 7"), ("os.kill(os.getpid(), 9)", 137, "was killed by SIGKILL")],
)
def test_the_first_failure_is_named_and_ends_the_rest(place, how, code, told):
    began = time.monotonic()
    program = place.program(f"if me == 1:\n    while not os.path.exists('ready-0'): pass\n    {how}\n{WAIT}")
    found, _, err = place.run("--processes", 2, "--", program)
    assert found == code
    assert time.monotonic() - began < 15
    assert "[launcher] process 1 (pid " in err
    assert f"{told}; the others are ended" in err


def test_who_only_lost_a_killed_one_is_not_blamed(place):
    """Process 1 ends in error some time before the killed process 0 can be seen to be dead."""
    program = place.program("if me == 1:\n    sys.exit(1)\ntime.sleep(0.3); os.kill(os.getpid(), 9)")
    code, _, err = place.run("--processes", 2, "--", program)
    assert code == 137
    assert "[launcher] process 0 (pid " in err
    assert "process 1" not in err


def test_who_ignores_sigterm_is_killed_after_the_grace(place):
    stubborn = f"signal.signal(signal.SIGTERM, signal.SIG_IGN)\n{WAIT}"
    program = place.program(f"if me == 1:\n    while not os.path.exists('ready-0'): pass\n    sys.exit(3)\n{stubborn}")
    assert place.run("--processes", 2, "--grace", 0.5, "--", program)[0] == 3


def test_what_a_process_started_and_left_behind_is_ended(place):
    program = place.program("import subprocess; subprocess.Popen(['sleep', '100'])")
    assert place.run("--", program)[0] == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_are_passed_on_and_all_may_finish(place, number):
    """A process that ends before another one has saved does not end it."""
    place_program = place.program(
        "asked = []\nfor n in (signal.SIGINT, signal.SIGTERM): signal.signal(n, lambda n, f: asked.append(n))\n"
        "open(f'ready-{me}', 'w').close()\nwhile not asked: time.sleep(0.01)\n"
        "if me == 0:\n    while not os.path.exists('left-1'): time.sleep(0.01)\n    time.sleep(0.3); print('saved')\n"
        "open(f'left-{me}', 'w').close(); print(signal.Signals(asked[0]).name); sys.exit(130)"
    )
    launcher = place.start("--processes", 2, "--restart", 5, "--", place_program)
    place.wait_for("ready", 2)
    launcher.send_signal(number)
    out, err = launcher.communicate(timeout=30)
    assert launcher.returncode == 130
    assert sorted(out.splitlines()) == [f"[0] {number.name}", "[0] saved", f"[1] {number.name}"]
    assert f"{number.name} is passed on" in err


def test_an_end_by_a_signal_is_no_failure_to_recover_from(place):
    launcher = place.start("--restart", 5, "--", place.program(WAIT))
    place.wait_for("ready", 2)
    launcher.terminate()
    assert "starts again" not in launcher.communicate(timeout=30)[1]
    assert launcher.returncode == 128 + signal.SIGTERM


def test_the_third_signal_kills(place):
    program = place.program(f"signal.signal(signal.SIGINT, signal.SIG_IGN)\n{WAIT}")
    launcher = place.start("--", program)
    place.wait_for("ready", 2)
    for _ in range(2):
        launcher.send_signal(signal.SIGINT)
        assert "SIGINT is passed on" in launcher.stderr.readline()
    launcher.send_signal(signal.SIGINT)
    assert "third time" in launcher.communicate(timeout=30)[1]
    assert launcher.returncode == 130


def test_nothing_survives_the_launcher_even_what_its_processes_started(place):
    program = place.program(f"import subprocess; subprocess.Popen(['sleep', '100'])\n{WAIT}")
    launcher = place.start("--", program)
    place.wait_for("ready", 2)
    assert len(place.processes()) == 6  # launcher, guard, two processes and their sleeps
    launcher.kill()
    launcher.wait(timeout=30)
    until(lambda: not place.processes(), "the end of all processes")


def test_output_that_nobody_reads_ends_the_run(place):
    launcher = place.start("--", place.program("while True: print('y' * 100, flush=True)"), stdout=subprocess.PIPE)
    launcher.stdout.readline()
    launcher.stdout.close()
    assert launcher.wait(timeout=30) == 128 + signal.SIGPIPE


# -- hung processes --


def test_a_stopped_process_is_found_and_named(place):
    program = place.program(f"{BEAT}if me == 1: os.kill(os.getpid(), signal.SIGSTOP)\n{WAIT}")
    began = time.monotonic()
    code, _, err = place.run("--silent-limit", 2, "--grace", 0.5, "--", program)
    assert code == 124
    assert time.monotonic() - began < 15
    assert "process 1 (pid " in err
    assert "has been stopped (SIGSTOP or a debugger)" in err


def test_a_process_without_a_sign_of_life_is_found_and_named(place):
    """Its heartbeat's thread ends, as if something held Python's lock for ever."""
    program = place.program(f"{BEAT}if me == 0: beat.close()\n{WAIT}")
    code, _, err = place.run("--silent-limit", 2, "--grace", 0.5, "--", program)
    assert code == 124
    assert "process 0 (pid " in err
    assert "gave no sign of life for 2 s" in err


def test_alive_but_without_a_step_is_found_too(place):
    """Process 1 goes on, process 0 does not."""
    forever = "step = 5\nwhile True:\n    beat(Record(step=step), None); step += me; time.sleep(0.01)"
    program = place.program(f"{BEAT}beat.begin(None)\n{forever}")
    code, _, err = place.run("--step-limit", 1, "--grace", 0.5, "--", program)
    assert code == 124
    assert "process 0 (pid " in err
    assert "finished no step for 1 s; its last one was step 5" in err


@pytest.mark.slow
def test_a_long_compile_or_test_is_no_hang(place):
    program = place.program(f"{BEAT}time.sleep(2.5); beat.begin(None); beat.end(None); time.sleep(1.5)")
    assert place.run("--silent-limit", 2, "--step-limit", 1, "--", program)[0] == 0


# -- restarts --

FAILS_ONCE = "print(sys.argv[1:], os.environ.get('HETJAX_RESTART'), os.environ['HETJAX_PROCESSES'])\n"
FAILS_ONCE += "if 'HETJAX_RESTART' not in os.environ:\n    if me == 1: sys.exit(1)\n    time.sleep(100)"


def test_all_start_again_with_resume(place):
    code, lines, err = place.run("--restart", 2, "--", place.program(FAILS_ONCE), "--steps", 5)
    assert code == 0
    assert {line[4:] for line in lines} >= {"['--steps', '5', '--resume'] 1 2"}
    assert "starts again with 2 processes from the last checkpoint (1 of at most 2 times)" in err


def test_resume_is_not_said_twice_and_can_be_called_otherwise(place):
    program = place.program(FAILS_ONCE)
    assert "[0] ['--resume'] 1 2" in place.run("--restart", "--", program, "--resume")[1]
    assert "[0] ['--go-on'] 1 2" in place.run("--restart", 1, "--resume-flag=--go-on", "--", program)[1]


def test_where_resume_was_added_it_is_said_since_when_the_run_is_new(place):
    program = place.program("print(float(os.environ.get('HETJAX_STARTED', 0)) > time.time() - 60)\n" + FAILS_ONCE)
    assert "[0] True" in place.run("--restart", "--", program)[1]
    assert "[0] True" not in place.run("--restart", "--", program, "--resume")[1]


def test_a_restart_finds_the_compiled_programs_in_a_folder_that_goes_with_the_launcher(place, monkeypatch):
    monkeypatch.delenv(PROGRAMS, raising=False)
    code, lines, _ = place.run("--restart", "--", place.program(f"print(os.environ[{PROGRAMS!r}])\n{FAILS_ONCE}"))
    assert code == 0
    (folder,) = {line[4:] for line in lines if "programs" in line}
    assert place.temporary in Path(folder).parents  # of which nothing is left


def test_a_folder_of_compiled_programs_can_be_given(place, monkeypatch):
    monkeypatch.setenv(PROGRAMS, "/mine")
    assert "[1] /mine" in place.run("--", place.program(f"print(os.environ[{PROGRAMS!r}])"))[1]


@pytest.mark.slow
def test_it_gives_up_at_last(place):
    code, _, err = place.run("--restart", 2, "--", place.program("if me == 0: sys.exit(9)\ntime.sleep(100)"))
    assert code == 9
    assert err.count("starts again") == 2
    assert "gives up after 2 further starts" in err


def test_a_mistake_of_the_user_is_not_repeated(place):
    code, _, err = place.run("--restart", 2, "--", place.program("sys.exit(2)"))
    assert code == 2
    assert "starts again" not in err


def test_elastic_goes_on_with_those_that_are_left(place):
    """Process 1 of 3 dies, then process 0 of 2; the last one does it alone."""
    program = place.program(
        "n = int(os.environ['HETJAX_PROCESSES'])\nprint('lost ' + os.environ.get('HETJAX_LOST', '-'))\n"
        "if n == 3 and me == 1 or n == 2 and me == 0: os.kill(os.getpid(), 9)\n"
        "if n > 1: time.sleep(100)\nprint('alone', sys.argv[1:])"
    )
    code, lines, err = place.run("--processes", 3, "--elastic", "--", program)
    assert (code, lines[-1]) == (0, "[0] alone ['--resume']")
    assert "starts again with 2 processes" in err
    assert "starts again with 1 process " in err
    assert {line.partition(" ")[2] for line in lines[:-1]} == {"lost -", "lost 1", "lost 0,1"}  # by first numbers


def test_a_color_for_each_process_on_a_terminal(place):
    """A pseudo-terminal as output; the lines come with colors there."""
    reader, writer = os.openpty()
    launcher = place.start("--", place.program("print('here')"), stdout=writer)
    launcher.communicate(timeout=30)
    os.close(writer)
    told = os.read(reader, 10_000)
    os.close(reader)
    assert b"\x1b[36m[0]\x1b[0m here" in told
    assert b"\x1b[33m[1]\x1b[0m here" in told


def test_commands_and_modules_can_be_run_too(place):
    assert place.run("--", "true")[0] == 0
    assert place.run("--", "-m", "json.tool", "--help")[0] == 0
