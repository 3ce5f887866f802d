"""The command `hetjax compile`, with CPU devices that stand for a target: nothing is run on them."""

import jax
import numpy as np
import optax
import pytest
from tiny_problem import loss_fn, source

import hetjax
from hetjax.__main__ import main
from hetjax.cli import compile as command
from hetjax.cli.compile import compiled, maker
from hetjax.devices import targets
from hetjax.devices.compile import compile_for, recorded
from hetjax.devices.targets import Target, target
from hetjax.devices.workers import device_kind


@pytest.fixture
def devices(monkeypatch):
    """Two devices that stand for a T4."""
    found = jax.devices()[:2]
    for device in found:
        monkeypatch.setitem(targets._targets, device, target("T4"))
    monkeypatch.setattr(Target, "devices", lambda self: found)
    device_kind.cache_clear()
    yield found
    device_kind.cache_clear()


def make(devices, engine):
    step = hetjax.Step(loss_fn, optax.adam(1e-3), batch_size=128, devices=devices, engine=engine)
    state = step.init({"w": np.zeros(5, np.float32), "b": np.zeros((), np.float32)})
    return step, state, jax.tree.map(lambda x: x[:2], source())


@pytest.mark.parametrize("engine", ["looped", "masked"])
def test_training_takes_one_program_beside_the_sum(engine, devices):
    report = compiled(target("T4"), make, engine, devices)
    first = [program.name for phase, program in report.programs if phase == "first step"]
    assert len(first) == 3
    assert first[1:] == ["copy of the state", "reduce and update"]
    assert not report.problems
    assert {phase for phase, _ in report.programs} == {"first step", "evaluation"}


def test_of_a_ladder_one_rung_is_needed_for_the_first_step_and_every_donated_buffer_is_reused(devices, monkeypatch):
    monkeypatch.setattr("hetjax.engines.chunked.on_cpu", lambda kind: False)
    report = compiled(target("T4"), make, "chunked", devices)
    rungs = {phase: [] for phase, _ in report.programs}
    for phase, program in report.programs:
        if program.name.startswith("microbatch"):
            rungs[phase].append(program.name)
    assert rungs["first step"] == ["microbatch of 64 rows"]
    assert rungs["later"] == ["microbatch of 8 rows"]
    assert not report.problems
    donated = {program.name: program.donated for phase, program in report.programs if phase == "first step"}
    assert donated["add two microbatches"] == 1
    assert donated["reduce and update"] >= 6  # parameters and Adam's two moments
    assert report.most_rows > 10**6
    assert report.seconds("first step") > 0


def test_a_program_that_does_not_fit_is_a_problem(devices):
    small = Target("small", "Tesla T4", "cuda", 512, "a test")
    report = compiled(small, make, "masked", devices)
    assert any("needs" in problem and "and the device has" in problem for problem in report.problems)


def test_too_many_programs_make_the_command_fail(devices, monkeypatch, capsys):
    monkeypatch.setattr(command, "maker", lambda config, batch: make)
    with pytest.raises(AssertionError, match=r"T4, tiny, looped: training takes 3 programs .* at most 2"):
        command.main(["T4"], ["tiny"], ["looped"], 128, 2)
    printed = capsys.readouterr().out
    assert "loop over 16 rows" in printed
    assert "Before the first step" in printed


def test_small_microbatches_do_not_show_what_a_row_takes_on_a_tpu(devices, monkeypatch):
    """They fit into the chip's own memory, which the compiler does not count."""
    monkeypatch.setattr("hetjax.engines.chunked.on_cpu", lambda kind: False)
    assert compiled(target("v5e"), make, "chunked", devices).most_rows is None


def test_a_donated_buffer_that_is_not_reused_is_a_problem():
    with recorded() as programs, pytest.warns(UserWarning, match="donated buffers were not usable"):
        compile_for(
            lambda x: x[1:], (jax.ShapeDtypeStruct((8,), np.float32),), jax.devices()[:1], (0,), "a shorter copy"
        )
    assert list(command._problems(programs[0], 2**30)) == [
        "the program 'a shorter copy' reuses 0 of 1 donated buffers."
    ]


@pytest.mark.parametrize("broken", ["a problem", "the compiler"])
def test_the_command_fails_with_an_exit_code(broken, devices, monkeypatch, capsys):
    def compiled(*args):
        if broken == "the compiler":
            raise jax.errors.JaxRuntimeError("INTERNAL: the compiler gave up")
        return command.Report("looped", [], None, ["the program 'x' reuses 0 of 1 donated buffers."])

    monkeypatch.setattr(command, "compiled", compiled)
    if broken == "the compiler":  # with its traceback
        with pytest.raises(jax.errors.JaxRuntimeError):
            main(["compile", "--target", "T4"])
    else:
        assert main(["compile", "--target", "T4"]) == 1
        assert "T4, cnn, looped: the program 'x' reuses 0 of 1 donated buffers." in capsys.readouterr().err


def test_names_that_do_not_exist_are_answered_with_those_that_do(tmp_path):
    with pytest.raises(ValueError, match="Unknown engine 'lopped': use looped, chunked, masked"):
        command.main(["T4"], ["cnn"], ["lopped"], 128, None)
    with pytest.raises(ValueError, match="no configuration 'vit': use mlp, cnn, resnet, transformer"):
        maker("vit", 128)
    (tmp_path / "own.py").write_text("def make(devices, engine): ...\n")
    assert callable(maker(f"{tmp_path}/own.py:make", 128))
    with pytest.raises(ValueError, match="has no function 'other'"):
        maker(f"{tmp_path}/own.py:other", 128)
