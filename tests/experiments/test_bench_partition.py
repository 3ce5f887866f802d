"""The bench of partitions: what it counts, on a few samples, and that it knows good blocks from bad."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parents[2] / "experiments"))

import bench_partition as bench

X = np.random.default_rng(0).normal(size=(240, 3)).astype(np.float32)
CLASSES = np.arange(240) % 2
QUIET = Console(quiet=True)


def test_splitting_classes_loses_f_and_the_loss_is_against_the_exact_cut():
    lines = bench.split(X, CLASSES)
    exact = [line for line in lines if line["parts"] == 1]
    assert [line["lost"] for line in exact] == [0, 0]
    eight = next(line for line in lines if line["parts"] == 8 and line["objective"] == "facility-location")
    assert eight["f"] < exact[0]["f"]
    assert eight["lost"] == pytest.approx(1 - eight["f"] / exact[0]["f"])
    bench.show_split(lines, QUIET)


def test_recutting_moves_less_than_cutting_anew():
    lines = bench.show_recut(bench.moved(X, CLASSES), QUIET)
    assert all(line["moved"] < line["fresh_moved"] for line in lines)
    assert lines[0]["moved"] == 60  # a quarter of the samples: from 60 each to 120, 60, 30, 30


def test_quality_is_told_against_chance():
    found = bench.show_quality(bench.worth(X, CLASSES, 4), QUIET)
    for case in found.values():
        assert case["partitions"]["class-balanced"]["over_chance"] == pytest.approx(1)
    assert found["unequal"]["partitions"]["facility-location, parts"]["over_chance"] < 1
    assert found["equal"]["partitions"]["graph-cut, min-block"]["over_chance"] < 1


def test_growth_is_the_slope_of_the_largest_two():
    lines = [{"n": n, "kernel": 1e-9 * n**2} for n in (100, 1000, 2000)]
    assert bench.show_growth(lines, QUIET)["exponent"]["kernel"] == pytest.approx(2)
    assert [line["n"] for line in bench.growth(bench.Args(quick=True), X[:, :1].repeat(3, 0)[:600], np.zeros(600))] == [
        250,
        500,
    ]


def test_memory_is_that_of_a_fresh_process():
    assert 0.01 < bench.apart(bench._idle) < 4
