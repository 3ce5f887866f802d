"""The command `hetjax compile`: the programs of a run, compiled for accelerators that are not there."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

from hetjax.cli.compiled_steps import Make, maker
from hetjax.devices import memory
from hetjax.devices.compile import Compiled, recorded
from hetjax.devices.targets import Target, target
from hetjax.engines import Chunked, ChunkedEngine, Engine, EngineSpec, Looped, as_spec
from hetjax.engines.spmd import LoopedEngine
from hetjax.state import State

ENGINES: dict[str, EngineSpec] = {
    "looped": as_spec("looped"),
    "chunked": Chunked(complete=True),
    "masked": as_spec("masked"),
}
_ON_CHIP = 128 * 2**20  # a TPU's VMEM: a program that fits into it takes nearly no memory beside
_ALIAS = re.compile(r"\b(?:may|must)-alias\b")


@dataclass(frozen=True)
class Report:
    """What one engine compiled for one target.

    Attributes:
        engine: name of the engine.
        programs: phase ('first step', 'later' or 'evaluation') and program, in the order of compilation.
        most_rows: largest microbatch that fits into memory, extrapolated; or why it is not known.
        problems: sentences about what would fail or waste memory.
    """

    engine: str
    programs: list[tuple[str, Compiled]]
    most_rows: int | str
    problems: list[str]

    def seconds(self, *phases: str) -> float:
        """CPU seconds of the programs of some phases."""
        return sum(program.cpu_seconds for phase, program in self.programs if phase in phases)

    @property
    def training(self) -> list[Compiled]:
        """The programs of training."""
        return [program for phase, program in self.programs if phase != "evaluation"]

    def exceeded(self, most_programs: int | None, most_mib: float | None) -> Iterator[str]:
        """Sentences about limits that training exceeds: number of programs, and MiB of each."""
        names = [program.name for program in self.training]
        if most_programs is not None and len(names) > most_programs:
            yield f"training takes {len(names)} programs ({', '.join(names)}); at most {most_programs} were allowed."
        for program in self.training:
            need = (memory.needed(program.program) or 0) / 2**20
            if most_mib is not None and need > most_mib:
                yield f"the program '{program.name}' needs {need:,.1f} MiB; at most {most_mib:g} were allowed."


def main(
    targets: Sequence[str],
    configs: Sequence[str],
    engines: Sequence[str],
    batch: int,
    *,
    transport: str = "auto",
    max_programs: int | None = None,
    max_mib: Sequence[float] | None = None,
) -> None:
    """Compile and print a table for every target and configuration.

    Args:
        targets: names or files of targets.
        configs: configurations, as for `maker`.
        engines: names of engines.
        batch: samples of a step of the small models.
        transport: how sums travel between the workers.
        max_programs: most programs that training with one engine may need; None for no limit.
        max_mib: most MiB that a program of training may need: one number, or one per configuration; None for no limit.

    Raises:
        AssertionError: a program does not fit, does not reuse a donated buffer, or a limit is exceeded.
        ValueError: if a name is unknown, or limits and configurations do not match.
    """
    limits = [None] if max_mib is None else list(max_mib)
    if len(limits) not in (1, len(configs)):
        raise ValueError(
            f"--max-mib has {len(limits)} numbers for {len(configs)} configurations: give one, or one for each."
        )
    limit_of = dict(zip(configs, limits * len(configs), strict=False))
    jax.config.update("jax_platforms", "cpu")  # accelerators that are there are left alone
    chosen = [target(name) for name in targets]
    makes = {name: maker(name, batch, transport) for name in configs}
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
                found = [*report.problems, *report.exceeded(max_programs, limit_of[config])]
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
            (evaluated, *_), *_ = step.compile_evaluation(state, [batch])
        later = _later(session.engine)
        programs = [("later" if program.name in later else "first step", program) for program in training]
        programs += [("evaluation", program) for program in evaluation]
        room = int(given.memory * memory.SAFE_SHARE)
        problems = [
            problem
            for ran_by, phase in ((session.engine, training), (evaluated.engine, evaluation))
            for program in phase
            for problem in _problems(program, room, _beside(ran_by, state) if program.name in _local(ran_by) else 0)
        ]
        need = _needs(session.engine, training)
        if given.platform == "tpu" and max(need.values()) < _ON_CHIP:
            most: int | str = "what it takes fits into the chip's own memory (VMEM), which the compiler does not count"
        else:
            if isinstance(session.engine, LoopedEngine):
                need |= _looped_needs(make, devices, 2 * session.engine.micro)
            most = _most_rows(need, room - _beside(session.engine, state))
        return Report(session.engine.name, programs, most, problems)


def _microbatch(rows: int) -> str:
    return f"microbatch of {rows} rows"


def _local(engine: Any) -> dict[str, int]:
    """The programs of the local phase by name, and the rows that each computes at once."""
    if isinstance(engine, ChunkedEngine):
        return {_microbatch(rung): rung for ladder in engine.ladders.values() for rung in ladder.programs}
    return {engine.label: engine.micro if isinstance(engine, LoopedEngine) else engine.buffer}


def _later(engine: Engine) -> set[str]:
    """Names of the rungs that are not needed for the first step."""
    ladders = engine.ladders.values() if isinstance(engine, ChunkedEngine) else ()
    return {_microbatch(rung) for ladder in ladders for rung in ladder.wanted if rung not in ladder.first}


def _beside(engine: Engine, state: State) -> int:
    """Bytes that stay on the device during the local phase besides its arguments: optimizer, average, sums so far."""
    sums = memory.size(jax.eval_shape(engine.program.zeros)) if isinstance(engine, ChunkedEngine) else 0
    return memory.size(state.core[2:]) + sums


def _needs(engine: Engine, programs: Sequence[Compiled]) -> dict[int, int]:
    """Bytes of the programs of the local phase, by the rows that they compute at once."""
    rows = _local(engine)
    return {rows[each.name]: memory.needed(each.program) or 0 for each in programs if each.name in rows}


def _looped_needs(make: Make, devices: Sequence[Any], micro: int) -> dict[int, int]:
    """The same for a looped engine with microbatches of another size, which is compiled for this alone."""
    step, state, batch = make(devices=devices, engine=Looped(micro=micro))
    with step, recorded() as programs:
        (session,) = step.sessions.for_training(state, [batch], step.sync, step.controller)
        return _needs(session.engine, programs)


def _most_rows(need: Mapping[int, int], room: int) -> int | str:
    """The largest microbatch that fits, extrapolated from the smallest and the largest one; or why it is not known."""
    low, high = min(need), max(need)
    if need[high] <= need[low]:
        return "the sizes that were compiled do not show what a row takes"
    per_row = (need[high] - need[low]) / (high - low)
    return max(0, int(low + (room - need[low]) / per_row))


def _problems(compiled: Compiled, room: int, beside: int) -> Iterator[str]:
    if (need := memory.needed(compiled.program)) is not None and need + beside > room:
        others = f" beside {memory.gib(beside)} of optimizer state and sums" if beside else ""
        yield f"the program '{compiled.name}' needs {memory.gib(need)}{others}, and the device has {memory.gib(room)}."
    if (reused := _reused(compiled)) < compiled.donated:
        yield f"the program '{compiled.name}' reuses {reused} of {compiled.donated} donated buffers."


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
    known = isinstance(report.most_rows, int)
    said = f": about {report.most_rows:,} rows" if known else f" is not told: {report.most_rows}"
    lines.append(f"The largest microbatch that fits{said}.")
    lines += [f"Slow on {given.name}, {number} times: {why}." for why, number in slow.items()]
    lines += [f"Problem: {problem}" for problem in report.problems]
    for line in lines:
        console.print(line, soft_wrap=True, highlight=False)
