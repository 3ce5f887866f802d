"""The study of accuracy in fewer bits: its statistics on pairs computed by hand."""

import numpy as np
import pytest
from studies.wire_accuracy import ARMS, QUANTILE, Options, draw, interval, verdict


def test_the_interval_is_that_of_students_t():
    pairs = [0.1, -0.2, 0.3, 0.0, 0.05]
    mean, half = interval(pairs)
    assert mean == pytest.approx(0.05)
    assert half == pytest.approx(2.776 * np.std(pairs, ddof=1) / 5**0.5)
    assert sorted(QUANTILE.values(), reverse=True) == list(QUANTILE.values())


@pytest.mark.parametrize(
    ("pairs", "expected"), [([0.1, -0.1, 0.1], "within"), ([2.0, 2.1, 2.2], "outside"), ([0.2, 1.0, -0.5], "open")]
)
def test_a_verdict_needs_the_whole_interval_on_one_side(pairs, expected):
    assert verdict(pairs) == expected


def test_all_arms_run_by_default():
    assert Options().arms.split(",") == list(ARMS)


def test_the_losses_of_the_first_seed_are_drawn(tmp_path):
    runs = {"0": {"losses": [2.0, 1.0]}, "1": {"losses": [9.0]}}
    draw({"cnn": {"float32": runs, "delay": runs}, "transformer": {"float32": runs}}, tmp_path / "losses.svg")
    assert "<svg" in (tmp_path / "losses.svg").read_text()
