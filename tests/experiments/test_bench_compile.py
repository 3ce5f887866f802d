"""The bench of compile times: the plain train step that it compares with."""

from __future__ import annotations

import sys
from pathlib import Path

import jax

sys.path.insert(0, str(Path(__file__).parents[2] / "experiments"))

import bench_compile


def test_the_plain_step_is_one_program_over_all_devices_that_reuses_its_state():
    seconds, program = bench_compile.plain("mlp", jax.devices()[:2], 16)
    text = program.as_text()
    assert seconds > 0
    assert "all-reduce" in text
    assert "may-alias" in text or "must-alias" in text
