"""DASO's schedule against hand-written sequences: G sum gradients, S send, Rn receive with staleness n, B block."""

import json
import math

import pytest

from hetjax.sync.daso.schedule import DasoSchedule, Plateau, StepActions


def letters(actions: StepActions) -> str:
    received = f"R{actions.receive}" if actions.receive else ""
    gradients, send, block = actions.sum_gradients * "G", actions.send * "S", actions.block * "B"
    return f"{gradients}{send}{received}{block}" or "-"


def epoch(schedule: DasoSchedule, steps: int) -> str:
    return " ".join(letters(schedule.step(left=steps - 1 - b)) for b in range(steps))


def cycling(skip: int, wait: int, **options) -> DasoSchedule:
    schedule = DasoSchedule(warm_up=0, cool_down=0, **options)
    schedule.skip, schedule.wait = skip, wait
    return schedule


@pytest.mark.parametrize(
    ("skip", "wait", "steps", "expected"),
    [
        (4, 1, 10, "S R1 - - S R1 - - S SR1B"),
        (8, 2, 12, "S - R2 - - - - - S - R2 SB"),
        (8, 2, 10, "S - R2 - - - - - S SR1B"),  # the wait ends with the epoch
        (2, 1, 6, "S R1 S R1 S SR1B"),
        (1, 1, 4, "S SR1 SR1 SR1B"),
        (4, 1, 1, "SB"),
        (4, 1, 5, "S R1 - - SB"),
        (2, 3, 6, "S - SR2 - SR2 SR1B"),  # a wait beyond the skip ends at the next send
    ],
)
def test_steps_of_an_epoch(skip, wait, steps, expected):
    assert epoch(cycling(skip, wait), steps) == expected


@pytest.mark.parametrize(
    ("skip", "wait", "steps", "expected"),
    [
        (4, 1, 10, "S R1 - - S R1 - - S SR1B"),
        (2, 1, 7, "S - SR1 - SR1 - SR1B"),  # received after two steps, blended as if after one
        (1, 1, 4, "S SR1 SR1 SR1B"),
        (8, 2, 10, "S - R2 - - - - - S SR1B"),
        (8, 2, 11, "S - R2 - - - - - S R2 SB"),  # one step is left: the wait is capped to 1 and met at once
        (8, 2, 12, "S - R2 - - - - - S - - SR2B"),  # at 2 steps after sending it is capped to 1, which has passed
        (8, 2, 13, "S - R2 - - - - - S - R2 - SB"),
        (0, 0, 3, "SB SB SB"),  # parameters and not gradients, even in the blocking phases
    ],
)
def test_steps_as_published(skip, wait, steps, expected):
    assert epoch(cycling(skip, wait, faithful=True), steps) == expected


@pytest.mark.parametrize(
    ("steps", "expected"),
    [(1, "S R1 - - S R1 - - S SR1B"), (2, "S - R2 - S - R2 - S SR1B"), (9, "S - - - SR4 - - - SR4 SR1B")],
)
def test_a_slow_exchange_is_received_later(steps, expected):
    schedule = cycling(4, 1)
    schedule.exchange_steps = steps
    assert epoch(schedule, 10) == expected


def test_sixteen_bits_travel_while_nodes_block_as_published_and_otherwise_while_they_cycle():
    for skip, faithful, expected in ((0, True, [1, 1]), (4, True, [0, 0]), (4, False, [1, 0])):
        schedule = cycling(skip, 1, faithful=faithful)
        assert [schedule.compresses(last) for last in (False, True)] == expected


def test_blocking_phases_sum_gradients():
    assert epoch(DasoSchedule(warm_up=1), 3) == "G G G"


def test_without_overlap_it_is_local_sgd_with_the_same_number_of_exchanges():
    schedule, control = (DasoSchedule(warm_up=0, cool_down=0, overlap=overlap) for overlap in (True, False))
    assert epoch(control, 10) == "SB - - - SB - - - SB SB"
    assert epoch(schedule, 10).count("S") == 4


def test_cycle_of_skips():
    """warm_up 2, cool_down 2 of 22 epochs; the loss falls, then stays: 4 -> 2 -> 1 -> 8 -> 4."""
    schedule = DasoSchedule(warm_up=2, cool_down=2, total=22)
    losses = [3.0, 2.5, 2.0, 1.5, 1.0] + [0.99] * 17  # 1% is below the threshold
    seen = []
    for loss in losses:
        seen.append((schedule.skip, schedule.wait))
        epoch(schedule, 5)
        schedule.end_epoch(loss)
    # After the fifth epoch the best loss is 1.0; three epochs without improvement make it stable.
    expected = [(0, 0)] * 2 + [(4, 1)] * 6 + [(2, 1)] * 3 + [(1, 1)] * 3 + [(8, 2)] * 3 + [(4, 1)] * 3 + [(0, 0)] * 2
    assert seen == expected


def test_a_falling_loss_keeps_the_skip():
    schedule = DasoSchedule(warm_up=0, cool_down=0)
    for e in range(20):
        schedule.end_epoch(0.9**e)
    assert schedule.skip == 4


def test_plateau_is_reached_after_more_than_patience_epochs():
    plateau = Plateau()
    assert [plateau.stable(loss) for loss in (1.0, 0.96, 0.96, 0.96, 0.96, 0.96, 0.9, 0.9)] == (
        [False, False, False, True, False, False, False, False]
    )
    assert plateau.best == 0.9
    negative = Plateau()
    assert [negative.stable(loss) for loss in (-1.0, -1.04, -1.06)] == [False] * 3
    assert negative.best == -1.06
    assert not Plateau().stable(math.nan)


def test_short_and_extended_runs():
    schedule = DasoSchedule(warm_up=0, cool_down=0, max_skip=2)
    assert (schedule.skip, schedule.wait) == (2, 1)
    only_blocking = DasoSchedule(warm_up=1, cool_down=1, total=2)
    only_blocking.end_epoch(1.0)
    assert only_blocking.skip == 0
    longer = DasoSchedule(warm_up=1, cool_down=1, total=2)  # a run extended after its cool-down cycles again
    longer.end_epoch(1.0)
    longer.total = 9
    longer.end_epoch(1.0)
    assert longer.skip == 4


def test_resumes_from_its_state_after_any_step():
    def whole(schedule, until, plan):
        seen = []
        for e, steps in enumerate(plan):
            for b in range(steps):
                if len(seen) == until:
                    fresh = DasoSchedule(warm_up=1, cool_down=1, total=len(plan))
                    fresh.load_state_dict(json.loads(json.dumps(schedule.state_dict())))
                    schedule = fresh
                seen.append(letters(schedule.step(left=steps - 1 - b)))
            schedule.end_epoch(1.0 if e else 2.0)
        return seen

    plan = [7, 9, 8, 6, 9, 7, 7]
    make = lambda: DasoSchedule(warm_up=1, cool_down=1, total=len(plan))
    expected = whole(make(), -1, plan)
    assert all(whole(make(), step, plan) == expected for step in range(sum(plan)))


@pytest.mark.parametrize("wrong", [{"warm_up": -1}, {"cool_down": -1}, {"max_skip": 0}, {"stability": 1.0}])
def test_invalid_options_are_rejected(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        DasoSchedule(**wrong)
