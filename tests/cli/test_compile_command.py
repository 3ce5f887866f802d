"""The command `hetjax compile`, with CPU devices that stand for a target: nothing is run on them."""

import jax
import numpy as np
import optax
import pytest
from tiny_problem import loss_fn, source

import hetjax
from hetjax.__main__ import main
from hetjax.cli import compile as command
from hetjax.cli.compile import compiled
from hetjax.cli.compiled_steps import maker
from hetjax.devices import memory, targets
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


def make(devices, engine, transport="auto"):
    step = hetjax.Step(loss_fn, optax.adam(1e-3), batch_size=128, devices=devices, engine=engine, transport=transport)
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


@pytest.mark.parametrize("engine", ["looped", "chunked"])
def test_a_program_has_to_fit_beside_the_state_of_the_optimizer(engine, devices, monkeypatch):
    """As large as the largest program of the local phase: Adam's two moments are on the device too."""
    monkeypatch.setattr("hetjax.engines.chunked.on_cpu", lambda kind: False)
    report = compiled(target("T4"), make, engine, devices)
    local = [program for program in report.training if "rows" in program.name]
    most = max(memory.needed(program.program) for program in local)
    moments = 4 + 2 * 6 * 4  # and their count
    sums = [memory.needed(program.program) for program in report.training if program.name == "no samples"]
    beside = moments + sum(sums)  # a chunked worker adds a microbatch to those before
    small = Target("small", "Tesla T4", "cuda", (most + beside - 8) * 10 // 9, "a test")
    problems = [text for text in compiled(small, make, engine, devices).problems if "rows" in text]
    assert problems
    assert all("of optimizer state and sums, and the device has" in text for text in problems)


def test_too_many_programs_make_the_command_fail(devices, monkeypatch, capsys):
    monkeypatch.setattr(command, "maker", lambda config, batch, transport: make)
    with pytest.raises(AssertionError, match=r"T4, tiny, looped: training takes 3 programs .* at most 2"):
        command.main(["T4"], ["tiny"], ["looped"], 128, max_programs=2)
    printed = capsys.readouterr().out
    assert "loop over 16 rows" in printed
    assert "Before the first step" in printed


def test_small_microbatches_do_not_show_what_a_row_takes_on_a_tpu(devices, monkeypatch):
    """They fit into the chip's own memory, which the compiler does not count."""
    monkeypatch.setattr("hetjax.engines.chunked.on_cpu", lambda kind: False)
    assert "VMEM" in compiled(target("v5e"), make, "chunked", devices).most_rows


def test_a_donated_buffer_that_is_not_reused_is_a_problem():
    with recorded() as programs, pytest.warns(UserWarning, match="donated buffers were not usable"):
        compile_for(
            lambda x: x[1:], (jax.ShapeDtypeStruct((8,), np.float32),), jax.devices()[:1], (0,), "a shorter copy"
        )
    assert list(command._problems(programs[0], 2**30, 0)) == [
        "the program 'a shorter copy' reuses 0 of 1 donated buffers."
    ]


@pytest.mark.parametrize("broken", ["a problem", "the compiler"])
def test_the_command_fails_with_an_exit_code(broken, devices, monkeypatch, capsys):
    def compiled(*args):
        if broken == "the compiler":
            raise jax.errors.JaxRuntimeError("INTERNAL: the compiler gave up")
        return command.Report("looped", [], "a test", ["the program 'x' reuses 0 of 1 donated buffers."])

    monkeypatch.setattr(command, "compiled", compiled)
    if broken == "the compiler":  # with its traceback
        with pytest.raises(jax.errors.JaxRuntimeError):
            main(["compile", "--target", "T4"])
    else:
        assert main(["compile", "--target", "T4"]) == 1
        assert "T4, cnn, looped: the program 'x' reuses 0 of 1 donated buffers." in capsys.readouterr().err


def test_names_that_do_not_exist_are_answered_with_those_that_do(tmp_path):
    with pytest.raises(ValueError, match="Unknown engine 'lopped': use looped, chunked, masked"):
        command.main(["T4"], ["cnn"], ["lopped"], 128)
    with pytest.raises(ValueError, match="no configuration 'vit': use mlp, cnn, resnet, transformer, digits, "):
        maker("vit", 128)
    (tmp_path / "own.py").write_text("def make(devices, engine): ...\n")
    assert callable(maker(f"{tmp_path}/own.py:make", 128))
    with pytest.raises(ValueError, match="has no function 'other'"):
        maker(f"{tmp_path}/own.py:other", 128)


def test_the_largest_microbatch_of_a_loop_is_told_from_a_second_one(devices):
    """The second one is compiled for that alone, and counts among no programs."""
    report = compiled(target("T4"), make, "looped", devices)
    assert report.most_rows > 10**6
    assert len(report.training) == 3
    assert "do not show" in compiled(target("T4"), make, "masked", devices).most_rows


def test_a_program_above_the_limit_makes_the_command_fail(devices, monkeypatch):
    monkeypatch.setattr(command, "maker", lambda config, batch, transport: make)
    need = max(memory.needed(program.program) for program in compiled(target("T4"), make, "looped", devices).training)
    command.main(["T4"], ["tiny"], ["looped"], 128, max_mib=[need / 2**20])
    with pytest.raises(AssertionError, match=r"T4, other, looped: the program '.*' needs 0\.0 MiB; at most 0 were all"):
        command.main(["T4"], ["tiny", "other"], ["looped"], 128, max_mib=[1, 0])
    with pytest.raises(ValueError, match="--max-mib has 2 numbers for 1 configurations"):
        command.main(["T4"], ["tiny"], ["looped"], 128, max_mib=[1, 2])


def test_an_experiment_is_compiled_with_its_own_optimizer_model_and_batch(devices):
    make = maker("text_transformer", 128)
    step, state, batch = make(devices=devices, engine=command.ENGINES["looped"])
    assert step.batch_size == 64
    assert step.controller.name == "balanced"
    assert state.params["embedding"].shape[-1] == 64
    assert len(jax.tree.leaves(batch)[0]) >= 1
    with pytest.raises(ValueError, match="'digits_rcd_sgd' has the sync 'decentralized': only 'allreduce'"):
        maker("digits_rcd_sgd", 128)(devices=devices, engine=command.ENGINES["looped"])


def test_sums_by_way_of_one_device_are_compiled_too(devices, monkeypatch):
    """As for a GPU beside a CPU: the parts of two workers are added, and applied, on a single device."""
    monkeypatch.setattr("hetjax.engines.chunked.on_cpu", lambda kind: False)
    through_one = lambda devices, engine: make(devices, engine, transport="host")
    report = compiled(target("T4:2"), through_one, "chunked", devices)
    named = {program.name: program for program in report.training}
    for name in ("sums of a worker", "sum", "update"):
        assert all(len(place.device_set) == 1 for place in jax.tree.leaves(named[name].program.input_shardings))
    assert not report.problems
    assert named["update"].donated >= 6
    with pytest.raises(ValueError, match=r"--transport has no effect on own.py:make"):
        maker("own.py:make", 128, "host")
