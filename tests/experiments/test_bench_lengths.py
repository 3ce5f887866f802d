"""The bench of unequal lengths: one short run from end to end."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "experiments"))

import bench_lengths


def test_the_lengths_are_log_uniform():
    sizes = [len(sample["tokens"]) for sample in bench_lengths.sequences(2000)]
    assert min(sizes) == 8
    assert 500 < max(sizes) <= 512
    assert sum(size < 64 for size in sizes) == pytest.approx(1000, abs=70)  # sqrt(8 x 512)


@pytest.mark.slow
def test_a_short_run_compiles_nothing_after_its_warm_up():
    result = bench_lengths.measure(24, 8, (64, 512), None, rounds=1, width=8)
    assert result["recompiles"] == 0
    assert result["lengths"] == [64, 512]
    assert 0.1 < result["fill"] < 1
    assert result["reached"] > 0
    assert result["over_padded"] > 0
