"""The study of accuracy in fewer bits: its statistics on pairs computed by hand."""

import numpy as np
import pytest
from studies.wire_accuracy import QUANTILE, interval, verdict


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
