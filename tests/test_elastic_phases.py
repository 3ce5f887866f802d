"""Members of an elastic fleet come and go in every phase of a run, by injection."""

import threading

import numpy as np
import pytest
from elastic_fleet import Fleet, Killed
from elastic_runs import (
    DATA,
    STEPS,
    check,
    count_down,
    dying_in,
    killing,
    member,
    own,
    params,
    result,
    trainer,
    undisturbed,
)

from hetjax import checkpoint
from hetjax.devices.compile import compiles
from hetjax.fleet.generations import RunStopped
from hetjax.reduce import slices
from hetjax.state import gathered

HALF = STEPS // 2
NEVER = 2**30  # a round that no message has


@pytest.fixture
def several_pieces(monkeypatch):
    """The small model has several pieces, with owners of their own."""
    monkeypatch.setattr(slices, "_SMALLEST", 32)


@pytest.mark.parametrize("what", ["evaluate", "save", "predict"])
def test_who_joins_waits_until_the_others_have_evaluated_saved_or_predicted(tmp_path, what):
    """It is proposed while they do so; nothing is interrupted."""
    seen = []

    def work(link):
        with trainer(own(link)) as each:
            saver = checkpoint.Saver(tmp_path, each, steps=4)

            def hook(record, state):
                if link.number == 0 and record.step == 4:
                    fleet.join(link)
                if record.step == 4 and what != "save":
                    before = link.generation
                    seen.append(getattr(each, what)(gathered(state), DATA))
                    assert link.generation == before

            with saver:
                hooks = [hook, saver] if what == "save" else [hook]
                return result(each, *each.fit(each.init(params()), DATA, steps=STEPS, hooks=hooks))

    with Fleet(work, 2) as fleet:
        results = fleet.end()
    assert sorted(results) == [0, 1, 2]
    joined = results[2][1].records[0].step
    assert 6 <= joined <= 7
    for number in (0, 1):
        check(results[number])
        assert [event["members"] for event in results[number][2]] == [[0, 1], [0, 1, 2]]
    check(results[2], steps=STEPS + 1 - joined)
    assert len(seen) == (0 if what == "save" else 2)


def test_who_leaves_keeps_nobody_waiting_who_evaluates():
    """It is asked to leave after step 3, and all evaluate after step 4, while step 5 runs."""
    losses = {}

    def work(link):
        with trainer(own(link)) as each:

            def hook(record, state):
                if record.step == 3 and link.number == 1:
                    each.leave()
                if record.step == 4:
                    losses[link.number] = each.evaluate(gathered(state), DATA)["loss"]

            return result(each, *each.fit(each.init(params()), DATA, steps=STEPS, hooks=[hook]))

    with Fleet(work, 3) as fleet:
        results = fleet.end()
    assert sorted(results) == [0, 2]
    for found in results.values():
        check(found)
    np.testing.assert_allclose(losses[0], losses[2], rtol=1e-6)


def test_who_comes_after_the_last_step_is_told_that_the_run_has_ended():
    """The others evaluate once more after `fit`, without it."""

    def work(link):
        if link.joins:
            with pytest.raises(RunStopped, match="The run has ended"):
                member(link)
            raise Killed
        with trainer(own(link)) as each:
            state, history = each.fit(each.init(params()), DATA, steps=STEPS)
            if link.number == 0:
                fleet.join(link)
            assert each.evaluate(state, DATA)["loss"] > 0
            return result(each, state, history)

    with Fleet(work, 2) as fleet:
        results = fleet.end()
    assert sorted(results) == [0, 1]
    for each in results.values():
        check(each)
        assert [event["members"] for event in each[2]] == [[0, 1]]


@pytest.mark.slow
@pytest.mark.parametrize(("victim", "sends"), [(1, 0), (1, 3), (3, 0), (3, 2), (3, 5)])
def test_deaths_while_one_joins(several_pieces, victim, sends):
    """Of a member that trains, or of the one that joins, as they settle."""

    def work(link):
        with trainer(own(link)) as each:
            here = lambda: link.number == victim and len(link.entered.members) == 4
            dying_in(each.step.recovery, "_agree", link, sends, here)

            def hook(record, state):
                if link.number == 0 and record.step == 3:
                    fleet.join(link)

            return result(each, *each.fit(each.init(params()), DATA, steps=STEPS, hooks=[hook]))

    with Fleet(work, 3) as fleet:
        results = fleet.end()
    assert sorted(results) == [number for number in range(4) if number != victim]
    for number in {0, 1, 2} - {victim}:
        check(results[number])
    if victim != 3:
        check(results[3], steps=len(results[3][1].records))


@pytest.mark.slow
@pytest.mark.parametrize(("first", "second"), [(2, 0), (2, 2), (6, 1), (6, 4), (8, 3)])
def test_a_second_death_as_the_others_settle(several_pieces, first, second):
    """Who has taken over a step hands it on."""

    def work(link):
        with trainer(own(link)) as each:
            killing(link, {1: (4, first)})
            here = lambda: link.number == 3 and len(link.entered.members) == 4
            dying_in(each.step.recovery, "_agree", link, second, here)
            return result(each, *each.fit(each.init(params()), DATA, steps=STEPS))

    with Fleet(work, 5) as fleet:
        results = fleet.end()
    assert sorted(results) == [0, 2, 4]
    for each in results.values():
        check(each)


@pytest.mark.slow
@pytest.mark.parametrize(("phase", "sends"), [("_agree", 1), ("_agree", 2), ("go_back", 0), ("go_back", 2),
                                              ("go_back", 4), ("go_back", 7), ("go_back", 11)])  # fmt: skip
def test_a_second_death_on_the_way_back(several_pieces, tmp_path, phase, sends):
    """Some find out that state is lost, while others learn only of the next death."""

    def work(link):
        with trainer(own(link)) as each:
            saver = checkpoint.Saver(tmp_path, each, steps=3)
            here = lambda: link.number == 1 and (phase == "go_back" or len(link.entered.members) == 3)
            dying_in(each.step.recovery, phase, link, sends, here)

            def hook(record, state):
                if record.step == 8 and link.number == 0:
                    raise Killed

            with saver:
                return result(each, *each.fit(each.init(params()), DATA, steps=STEPS, hooks=[saver, hook]))

    with Fleet(work, 4, holders=1) as fleet:
        results = fleet.end()
    assert sorted(results) == [2, 3]
    for each in results.values():
        check(each)


@pytest.mark.slow
def test_one_goes_back_before_another_knows_why(several_pieces, tmp_path):
    """Member 1 dies after member 2 has heard what it holds, and before member 3 has."""
    goes = threading.Event()

    def work(link):
        with trainer(own(link)) as each:
            saver, recovery = checkpoint.Saver(tmp_path, each, steps=3), each.step.recovery
            agree, go_back = recovery._agree, recovery.go_back

            def send(*message, send=link.send):
                if message[0] == 2:  # member 3
                    goes.wait(60.0)
                    raise Killed
                return send(*message)

            def agreeing(running):
                if link.number == 1 and len(link.entered.members) == 3:
                    link.send = send
                agree(running)

            def going(*given):
                goes.set()
                return go_back(*given)

            def hook(record, state):
                if record.step == 8 and link.number == 0:
                    raise Killed

            recovery._agree, recovery.go_back = agreeing, going
            with saver:
                return result(each, *each.fit(each.init(params()), DATA, steps=STEPS, hooks=[saver, hook]))

    with Fleet(work, 4, holders=1) as fleet:
        results = fleet.end()
    assert sorted(results) == [2, 3]
    for each in results.values():
        check(each)


@pytest.mark.slow
def test_both_holders_of_a_piece_lost_at_once(tmp_path):
    """The others go back to the checkpoint, in the same processes, and compile nothing."""
    compiled = {}

    def work(link):
        with trainer(own(link)) as each:
            saver = checkpoint.Saver(tmp_path, each, steps=3)

            def hook(record, state):
                compiled.setdefault(record.step, compiles())
                if record.step == 8 and link.number in each.step._pipeline.reduce.exchange.holders(0):
                    raise Killed

            with saver:
                return result(each, *each.fit(each.init(params()), DATA, steps=STEPS, hooks=[saver, hook]))

    with Fleet(work, 4) as fleet:
        results = fleet.end()
    assert len(results) == 2
    for each in results.values():
        check(each)
    assert compiled[STEPS] == compiled[2]


def twice(link, each, hook=lambda record, state: None):
    """Half of the steps, an evaluation, the other half; one that joins comes into the second half."""
    if link.joins:
        return result(each, *each.fit(each.init(params()), DATA, steps=STEPS, hooks=[hook]))
    half, first = each.fit(each.init(params()), DATA, steps=HALF, hooks=[hook])
    assert each.evaluate(half, DATA)["loss"] > 0
    state, history = each.fit(half, DATA, steps=STEPS - HALF, hooks=[hook])
    assert [record.step for record in first.records] == list(range(1, HALF + 1))
    return result(each, state, history)


def test_a_second_fit_is_joined_and_survives_a_loss(several_pieces):
    def work(link):
        with trainer(own(link)) as each:

            def hook(record, state):
                if link.number == 0 and record.step == HALF + 1:
                    fleet.join(link)
                if link.number == 1 and record.step == STEPS - 1:
                    raise Killed

            return twice(link, each, hook)

    with Fleet(work, 3) as fleet:
        results = fleet.end()
    assert sorted(results) == [0, 2, 3]
    for number in (0, 2):
        check(results[number], steps=STEPS - HALF)
    check(results[3], steps=len(results[3][1].records))
    assert [len(event["members"]) for event in results[0][2]] == [3, 4, 3]


@pytest.mark.slow
@pytest.mark.parametrize("meeting", [1, 2, 3])
@pytest.mark.parametrize("sends", [0, 1])
def test_deaths_between_two_fits(several_pieces, meeting, sends):
    """In the gather that ends the first one, in that of the evaluation, and as the second one begins.

    Some have passed it and are in the next phase, when others learn of the death.
    """

    def work(link):
        with trainer(own(link)) as each:
            recovery, gathers = each.step.recovery, []

            def counted(content, *limit, gather=link.gather):
                if link.number == 1 and each.step._pipeline.made == HALF and content in (b"", gathers and content):
                    gathers.append(content)
                    if len(gathers) == meeting:
                        count_down(link, sends)
                return gather(content, *limit)

            assert recovery is not None
            link.gather = counted
            return twice(link, each)

    with Fleet(work, 3) as fleet:
        results = fleet.end()
    assert sorted(results) == [0, 2]
    for each in results.values():
        check(each, steps=STEPS - HALF)


@pytest.mark.slow
@pytest.mark.parametrize("ask", ["ask_to_save", "stop"])
def test_what_a_lost_member_asked_for_is_done_by_all_when_the_step_is_done_again(tmp_path, ask):
    """One has read the record of the step, the other has not made it, and the only holder after it is lost."""

    def work(link):
        with trainer(own(link)) as each:
            saver = checkpoint.Saver(tmp_path, each)

            def hook(record, state):
                if link.generation > 1:
                    return
                reduce = each.step._pipeline.reduce
                owner, second = reduce.exchange.holders(0)
                if link.number == owner and record.step == 4:
                    getattr(each, ask)()
                if link.number == owner and record.step == 5:
                    raise Killed
                if link.number == second and record.step == 3:
                    total = reduce._total
                    hold = lambda: link.receive(owner, 1, NEVER, 0)  # until the owner is lost
                    due = lambda: link.step == 4 and link.generation == 1
                    reduce._total = lambda *given, **how: hold() if due() else total(*given, **how)

            with saver:
                return result(each, *each.fit(each.init(params()), DATA, steps=STEPS, hooks=[hook, saver]))

    with Fleet(work, 3) as fleet:
        results = fleet.end()
    assert len(results) == 2
    for state, history, _ in results.values():
        assert history.records[4].save == (ask == "ask_to_save")
        assert [record.step for record in history.records] == list(range(1, 1 + (6 if ask == "stop" else STEPS)))
        np.testing.assert_allclose(history.losses, undisturbed()[1][: len(history.losses)], rtol=1e-5)
        assert state.step == len(history.records)
    if ask == "ask_to_save":
        assert [int(path.name.split("_")[-1]) for path in checkpoint.folder.stored(tmp_path)] == [5]
