"""The command `hetjax compile`: the programs of a run, compiled for accelerators that are not there."""

from __future__ import annotations

import re
import runpy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from rich.console import Console
from rich.table import Table

from hetjax.adapters.probe import sample_size
from hetjax.devices import memory
from hetjax.devices.compile import Compiled, recorded
from hetjax.devices.targets import Target, target
from hetjax.engines import Chunked, ChunkedEngine, Engine, EngineSpec, as_spec
from hetjax.state import State
from hetjax.step import Step
from hetjax.zoo.tasks import Task, make_task

BATCH = 128
CONFIGS = {"mlp": "digits", "cnn": "digits", "resnet": "digits", "transformer": "text"}  # models and their data
ENGINES: dict[str, EngineSpec] = {
    "looped": as_spec("looped"),
    "chunked": Chunked(complete=True),
    "masked": as_spec("masked"),
}
_ON_CHIP = 128 * 2**20  # a TPU's VMEM: a program that fits into it takes nearly no memory beside
_ALIAS = re.compile(r"\b(?:may|must)-alias\b")

Make = Callable[..., tuple[Step, State, Any]]  # (devices=, engine=) -> the step, its first state, and a batch


@dataclass(frozen=True)
class Report:
    """What one engine compiled for one target.

    Attributes:
        engine: name of the engine.
        programs: phase ('first step', 'later' or 'evaluation') and program, in the order of compilation.
        most_rows: largest microbatch that fits into memory, extrapolated; None where the sizes here do not show it.
        problems: sentences about what would fail or waste memory.
    """

    engine: str
    programs: list[tuple[str, Compiled]]
    most_rows: int | None
    problems: list[str]

    def seconds(self, *phases: str) -> float:
        """CPU seconds of the programs of some phases."""
        return sum(program.cpu_seconds for phase, program in self.programs if phase in phases)


def main(targets: Sequence[str], configs: Sequence[str], engines: Sequence[str], batch: int, most: int | None) -> None:
    """Compile and print a table for every target and configuration.

    Args:
        targets: names or files of targets.
        configs: names of small models, or FILE.py:FUNCTION.
        engines: names of engines.
        batch: samples of a step of the small models.
        most: most programs that training with one engine may need; None for no limit.

    Raises:
        AssertionError: a program does not fit, does not reuse a donated buffer, or there are too many programs.
        ValueError: if a name is unknown.
    """
    jax.config.update("jax_platforms", "cpu")  # accelerators that are there are left alone
    chosen = [target(name) for name in targets]
    makes = {name: maker(name, batch) for name in configs}
    if unknown := [name for name in engines if name not in ENGINES]:
        raise ValueError(f"Unknown engine {unknown[0]!r}: use {', '.join(ENGINES)}.")
    console, problems = Console(), []
    for each in chosen:
        devices = each.devices()
        console.print(
            f"{each.name}: {len(devices)} x {each.device}, {memory.gib(each.memory)} each. Source: {each.source}",
            soft_wrap=True, highlight=False,
        )  # fmt: skip
        for config, make in makes.items():
            for engine in engines:
                report = compiled(each, make, engine, devices)
                _show(console, config, each, report)
                found = [*report.problems, *_too_many(report, most)]
                problems += [f"{each.name}, {config}, {engine}: {problem}" for problem in found]
    if problems:
        raise AssertionError("\n".join(problems))


def compiled(given: Target, make: Make, engine: str, devices: Sequence[Any]) -> Report:
    """Compile the programs of one engine, the ladder of microbatches complete, for a target's devices."""
    step, state, batch = make(devices=devices, engine=ENGINES[engine])
    with step:
        with recorded() as training:
            (session, *_), *_ = step.compile_training(state, [batch])
        with recorded() as evaluation:
            step.compile_evaluation(state, [batch])
        later = {f"microbatch of {rung} rows" for rung in _later(session.engine)}
        programs = [("later" if program.name in later else "first step", program) for program in training]
        programs += [("evaluation", program) for program in evaluation]
        room = int(given.memory * memory.SAFE_SHARE)
        held = memory.size(state.core[2:]) + memory.size(jax.eval_shape(session.engine.program.zeros))  # and sums
        problems = [problem for _, program in programs for problem in _problems(program, room)]
        return Report(session.engine.name, programs, _most_rows(session.engine, room - held, given.platform), problems)


def maker(config: str, batch: int) -> Make:
    """The function that makes step, state and batch of a configuration.

    Args:
        config: name of a small model, or FILE.py:FUNCTION with a function of (devices, engine).
        batch: samples of a step of a small model.

    Raises:
        ValueError: if there is no such configuration.
    """
    if config in CONFIGS:
        return lambda devices, engine: _small_model(config, batch, devices, engine)
    path, _, name = config.rpartition(":")
    if not path.endswith(".py"):
        raise ValueError(
            f"There is no configuration {config!r}: use {', '.join(CONFIGS)}, or FILE.py:FUNCTION, where "
            "FUNCTION(devices, engine) returns a hetjax.Step, its first state and a batch."
        )
    if not Path(path).is_file() or not callable(found := runpy.run_path(path).get(name)):
        raise ValueError(f"{path} has no function {name!r}: give FILE.py:FUNCTION.")
    return found


def small_task(model: str) -> Task:
    """The data and the model of a configuration, with random bits in the local phase: dropout, or shifted images."""
    options: dict[str, Any] = {"transformer": {"dropout": 0.1}, "cnn": {"dropout": 0.2}}.get(model, {})
    return make_task(CONFIGS[model], model, augment="shift" if model in ("cnn", "resnet") else "none", **options)


def _small_model(model: str, batch: int, devices: Sequence[Any], engine: EngineSpec) -> tuple[Step, State, Any]:
    task = small_task(model)
    step = Step(task.model, optax.adamw(1e-3), batch_size=batch, devices=devices, engine=engine)
    state = step.init(task.model.params, task.model.model_state)
    return step, state, task.train.rows(np.arange(sample_size(state, step.quantum)))


def _later(engine: Engine) -> set[int]:
    """Rungs that are not needed for the first step."""
    ladders = engine.ladders.values() if isinstance(engine, ChunkedEngine) else ()
    return {rung for ladder in ladders for rung in ladder.wanted if rung not in ladder.first}


def _most_rows(engine: Engine, room: int, platform: str) -> int | None:
    """The largest microbatch that fits beside the state, extrapolated from the smallest and the largest rung.

    None if they do not show what a row takes: on TPU, if they fit into the chip's own memory.
    """
    if not isinstance(engine, ChunkedEngine):
        return None
    (ladder,) = engine.ladders.values()
    need = {rung: memory.needed(next(iter(programs.values()))) or 0 for rung, programs in ladder.programs.items()}
    low, high = min(need), max(need)
    if need[high] <= need[low] or (platform == "tpu" and need[high] < _ON_CHIP):  # one rung, or unknown
        return None
    per_row = (need[high] - need[low]) / (high - low)
    return max(0, int(low + (room - need[low]) / per_row))


def _problems(compiled: Compiled, room: int) -> Iterator[str]:
    if (need := memory.needed(compiled.program)) is not None and need > room:
        yield f"the program '{compiled.name}' needs {memory.gib(need)}, and the device has {memory.gib(room)}."
    if (reused := _reused(compiled)) < compiled.donated:
        yield f"the program '{compiled.name}' reuses {reused} of {compiled.donated} donated buffers."


def _too_many(report: Report, most: int | None) -> Iterator[str]:
    training = [program.name for phase, program in report.programs if phase != "evaluation"]
    if most is not None and len(training) > most:
        yield f"training takes {len(training)} programs ({', '.join(training)}); at most {most} were allowed."


def _reused(compiled: Compiled) -> int:
    """Number of arguments whose buffers hold results."""
    return len(_ALIAS.findall(compiled.program.as_text().partition("\n")[0]))


def _show(console: Console, config: str, given: Target, report: Report) -> None:
    table = Table("program", "for", "seconds", "CPU s", "MiB", "donated", box=None, padding=(0, 2, 0, 0),
                  pad_edge=False, header_style="bold")  # fmt: skip
    for column in table.columns[2:]:
        column.justify = "right"
    slow: dict[str, int] = {}
    for phase, program in report.programs:
        need = memory.needed(program.program)
        donated = f"{_reused(program)} of {program.donated}" if program.donated else ""
        size = "" if need is None else f"{need / 2**20:,.1f}"
        table.add_row(program.name, phase, f"{program.seconds:.1f}", f"{program.cpu_seconds:.1f}", size, donated)
        for why, number in given.slow_operations(program.program.as_text()).items():
            slow[why] = slow.get(why, 0) + number
    console.print(f"\n{config}, engine {report.engine}:", highlight=False)
    console.print(table)
    first, later = report.seconds("first step"), report.seconds("later")
    lines = [f"Before the first step {first:.1f} CPU seconds, with the whole ladder {first + later:.1f}."]
    if report.most_rows is not None:
        lines.append(f"The largest microbatch that fits: about {report.most_rows:,} rows.")
    lines += [f"Slow on {given.name}, {number} times: {why}." for why, number in slow.items()]
    lines += [f"Problem: {problem}" for problem in report.problems]
    for line in lines:
        console.print(line, soft_wrap=True, highlight=False)
