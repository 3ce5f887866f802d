"""Which rows of a step a process reads, by hand."""

from types import SimpleNamespace

import numpy as np
import pytest

from hetjax.loop import own_span
from hetjax.plan.controllers.protocol import Plan
from hetjax.plan.sampler import Span

PLAN = Plan(np.array([40, 80, 0, 680]))
STEP = Span(0, 1000, 1800)


@pytest.mark.parametrize(
    ("local", "own", "ahead"),
    [
        ((0,), (1000, 1040), (1000, 1045)),
        ((1,), (1040, 1120), (1030, 1130)),
        ((0, 1), (1000, 1120), (1000, 1135)),
        ((2,), (1120, 1121), (1119, 1121)),  # nothing to compute: padding is made of one row
        ((3,), (1120, 1800), (1035, 1800)),
    ],
)
def test_the_margin_is_a_share_of_the_own_slice(local, own, ahead):
    several = SimpleNamespace(several_processes=True, local=local)
    assert own_span(several, PLAN, STEP) == own
    assert own_span(several, PLAN, STEP, 8) == ahead


def test_one_process_reads_the_whole_step():
    alone = SimpleNamespace(several_processes=False, local=(0, 1, 2, 3))
    assert own_span(alone, PLAN, STEP, 8) == (1000, 1800)
