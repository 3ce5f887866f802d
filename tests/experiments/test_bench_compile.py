"""The bench of compile times: the plain train step that it compares with."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import jax

sys.path.insert(0, str(Path(__file__).parents[2] / "experiments"))

import bench_compile

from hetjax.cli import compile as command
from hetjax.cli import compiled_steps
from hetjax.devices import compile as compiling
from hetjax.devices import memory, targets


def test_the_plain_step_is_one_program_over_all_devices_that_reuses_its_state():
    seconds, program = bench_compile.plain("mlp", jax.devices()[:2], 16)
    text = program.as_text()
    assert seconds > 0
    assert "all-reduce" in text
    assert "may-alias" in text or "must-alias" in text


def test_a_row_of_the_table_has_seconds_ratios_and_memory_and_a_dash_for_what_was_not_run():
    figures = lambda first, complete, mib: {"first": first, "complete": complete, "mib": mib}
    medians = {"plain": figures(2.0, 2.0, 8.04), "chunked": figures(1.9, 2.7, 520.4), "before": figures(9.5, 9.5, 12)}
    expected = "| T4 | cnn | 2.0 | 9.5 (4.8) | 1.9 (0.9) | 2.7 (1.4) | – | 8.04, 12, 520, – |"
    row = bench_compile.table_row("T4", "cnn", medians)
    assert row == expected
    assert row.count("|") == bench_compile.TABLE[0].count("|") == bench_compile.TABLE[1].count("|")
    page = Path(__file__).parents[2] / "docs" / "accelerators.md"
    assert bench_compile.TABLE[0] in page.read_text(encoding="utf-8")


def test_before_is_jaxs_own_random_bits_and_four_rungs(monkeypatch):
    monkeypatch.setattr(compiling, "quick_to_compile", compiling.quick_to_compile)
    seen = {}

    def compiled(given, make, engine, devices):
        _, _, _ = make(devices=jax.devices()[:1], engine=None)
        return command.Report(engine, [("first step", SimpleNamespace(cpu_seconds=2.0, program=None))], "a test", [])

    def made(devices, engine):
        seen["rungs"] = engine.rungs
        return None, None, None

    monkeypatch.setattr(command, "compiled", compiled)
    monkeypatch.setattr(compiled_steps, "maker", lambda config, batch: made)
    monkeypatch.setattr(targets, "target", lambda name: SimpleNamespace(devices=jax.devices))
    monkeypatch.setattr(memory, "needed", lambda program: 2**20)
    figures = bench_compile.measure("T4", "cnn", "before", 128)
    assert figures == {"first": 2.0, "complete": 2.0, "mib": 1.0}
    assert seen["rungs"] == [2, 8, 32, 128]
    assert compiling.quick_to_compile is nullcontext
