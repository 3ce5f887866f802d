"""The partition benchmark on a few samples: its arithmetic, and that it tells good blocks from random ones."""

from __future__ import annotations

import bench_partition as bench
import numpy as np
import pytest
from rich.console import Console

X = np.random.default_rng(0).normal(size=(240, 3)).astype(np.float32)
CLASSES = np.arange(240) % 2
QUIET = Console(quiet=True)


def test_splitting_classes_lowers_f_relative_to_the_exact_partition():
    rows = bench.split(X, CLASSES)
    exact = [row for row in rows if row["parts"] == 1]
    assert [row["lost"] for row in exact] == [0, 0]
    eight = next(row for row in rows if row["parts"] == 8 and row["objective"] == "facility-location")
    assert eight["f"] < exact[0]["f"]
    assert eight["lost"] == pytest.approx(1 - eight["f"] / exact[0]["f"])
    bench.show_split(rows, QUIET)


def test_recut_moves_fewer_samples_than_a_partition_from_scratch():
    rows = bench.show_recut(bench.recut_costs(X, CLASSES), QUIET)
    assert all(row["moved"] < row["fresh_moved"] for row in rows)
    assert rows[0]["moved"] == 60  # a quarter of the samples: from 60 each to 120, 60, 30, 30


def test_quality_is_relative_to_random_blocks():
    found = bench.show_quality(bench.compare_quality(X, CLASSES, 4), QUIET)
    for case in found.values():
        assert case["partitions"]["class-balanced"]["over_chance"] == pytest.approx(1)
    assert found["unequal"]["partitions"]["facility-location, parts"]["over_chance"] < 1
    assert found["equal"]["partitions"]["graph-cut, min-block"]["over_chance"] < 1


def test_growth_exponent_is_the_slope_of_the_two_largest():
    rows = [{"n": n, "kernel": 1e-9 * n**2} for n in (100, 1000, 2000)]
    assert bench.show_growth(rows, QUIET)["exponent"]["kernel"] == pytest.approx(2)
    assert [row["n"] for row in bench.growth(bench.Args(quick=True), X[:, :1].repeat(3, 0)[:600], np.zeros(600))] == [
        250,
        500,
    ]


def test_memory_is_that_of_a_fresh_process():
    assert 0.01 < bench.in_fresh_process(bench.peak_gb) < 4
