"""The rules of the rendezvous: who is lost, when a generation is in force, and what a restart may not forget."""

import itertools
import os
import random

import pytest
from fleet_world import LIMITS, FakeMember, World


def test_a_run_starts_when_all_processes_are_there():
    world = World(3)
    world.start(2)
    assert world.numbers() is None
    world.add(FakeMember("p2", wish=2))
    world.settle()
    assert world.numbers() == (0, 1, 2)
    assert [m.number for m in world.members] == [0, 1, 2]
    assert all(m.in_force.number == 1 and m.steps == {0: 0, 1: 0, 2: 0} for m in world.members)


def test_a_run_starts_without_a_process_that_died_before():
    world = World(3)
    world.start(2)
    world.ended["p2"] = ("ended with exit code 1", False, False)
    world.settle()
    assert world.numbers() == (0, 1)


def test_a_proposal_is_in_force_once_all_have_confirmed_and_their_steps_are_known_to_all():
    world = World(3)
    a, b, c = world.start(3)
    a.step, b.step, b.confirms = 7, 6, False
    world.die(c)
    world.settle()
    assert a.newest.number == 2
    assert a.in_force.number == 1
    b.confirmed = (2, 6)
    world.settle()
    assert a.in_force.number == b.in_force.number == 2
    assert a.steps == b.steps == {0: 7, 1: 6}
    assert a.newest.reason == "Member 2 was lost: its process was killed by SIGKILL."


def test_a_known_death_is_acted_on_at_once_whatever_the_majority():
    world = World(4)
    a, b, c, d = world.start(4)
    world.die(a, b, c)
    world.settle()
    assert world.numbers() == (3,)
    assert d.in_force.number == 2


def test_a_silent_member_is_lost_after_the_limit_and_killed_by_its_launcher():
    world = World(3)
    a, b, _ = world.start(3)
    a.stopped = True
    world.settle(9)
    assert world.numbers() == (0, 1, 2)
    world.settle(3)
    assert world.numbers() == (1, 2)
    assert world.killed == {"p0"}
    assert "silent for 10 s" in b.newest.reason
    a.stopped = False
    world.settle(1)
    assert a.failed.startswith("Member 0 does not belong to the run any more: it was silent")


def test_a_suspected_member_is_lost_if_it_does_not_answer():
    world = World(3)
    a, b, c = world.start(3)
    c.stopped = True
    a.suspect(2)
    world.settle(1)
    assert world.numbers() == (0, 1, 2)
    world.settle(2)
    assert world.numbers() == (0, 1)
    assert "Member 0 heard nothing of it" in b.newest.reason


def test_a_suspected_member_that_answers_stays_in_a_new_generation():
    world = World(3)
    a, _, c = world.start(3)
    a.suspect(2)
    world.settle()
    assert world.numbers() == (0, 1, 2)
    assert c.in_force.number == 2
    assert c.in_force.reason == "Member 0 lost touch with member 2, which answers."


def test_two_that_lose_touch_again_and_again_are_parted():
    world = World(3)
    a, b, c = world.start(3)
    for _ in range(3):
        a.suspect(1)
        c.suspect(1)
        world.settle()
    assert world.numbers() == (0, 2)
    assert "again and again" in b.failed


def test_progress_forgives_lost_touch():
    world = World(3)
    a, b, _ = world.start(3)
    for step in range(1, 6):
        a.step = b.step = step
        a.suspect(1)
        world.settle()
    assert world.numbers() == (0, 1, 2)


def test_suspicions_of_an_older_generation_are_ignored():
    world = World(3)
    a, b, c = world.start(3)
    old = (1, {"1": "silence"})
    world.die(c)
    world.settle()
    a.suspects = old
    world.settle(5)
    assert b.in_force.number == 2


def test_two_at_once():
    world = World(5)
    members = world.start(5)
    members[1].stopped = True
    world.die(members[3])
    members[0].suspect(1)
    world.settle(4)
    assert world.numbers() == (0, 2, 4)


def test_a_member_lost_during_a_proposal_is_left_out_of_the_next_one():
    world = World(4)
    _, b, c, d = world.start(4)
    b.confirms = False
    world.die(d)
    world.settle()
    world.die(b)
    world.settle()
    assert world.numbers() == (0, 2)
    assert c.in_force.number == 3


def test_a_member_that_does_not_finish_its_step_is_left_out():
    world = World(3)
    _, b, c = world.start(3)
    b.confirms = False
    world.die(c)
    world.settle(59)
    assert world.numbers() == (0, 1, 2)
    world.settle(3)
    assert world.numbers() == (0,)
    assert "did not finish its step" in b.failed


@pytest.mark.parametrize(("size", "cut", "goes_on"), [
    (4, (3,), (0, 1, 2)), (5, (0, 1), (2, 3, 4)), (4, (2, 3), (0, 1)), (4, (0, 1), None), (2, (1,), (0,)),
    (2, (0,), None), (3, (0, 1), None),
])  # fmt: skip
def test_of_a_partition_the_larger_part_goes_on_or_the_half_with_the_smallest_number(size, cut, goes_on):
    world = World(size)
    members = world.start(size)
    for number in cut:
        members[number].cut = True
    world.settle(15)
    if goes_on is not None:
        assert world.numbers() == goes_on
        return
    assert world.numbers() == tuple(range(size))
    world.settle(15)
    left = [member for member in members if not member.cut]
    assert all("not the larger part" in member.failed for member in left)


def test_a_partition_that_heals_in_time_loses_nobody():
    world = World(2)
    members = world.start(2)
    members[0].cut = True
    world.settle(15)
    members[0].cut = False
    world.settle(2)
    assert world.numbers() == (0, 1)
    assert all(member.in_force.number == 2 for member in members)


def test_a_silent_member_that_was_killed_meanwhile_does_not_count():
    world = World(2)
    a, _ = world.start(2)
    a.stopped = True
    world.settle(12)
    assert world.killed == {"p0"}
    world.die(a)
    world.settle()
    assert world.numbers() == (1,)


def test_leavers_go_at_once_and_do_not_count():
    world = World(3)
    a, b, c = world.start(3)
    a.leaving = b.leaving = True
    world.settle()
    assert world.numbers() == (2,)
    assert c.in_force.reason == "Member 1 left."
    assert not a.failed
    assert a.newest.number == c.in_force.number == a.in_force.number


def test_a_leaver_that_has_ended_before_anybody_heard_of_it_has_left():
    world = World(2)
    a, b = world.start(2)
    a.leaving = a.finished = True
    world.settle()
    assert world.numbers() == (1,)
    assert b.newest.reason == "Member 0 left."


def test_when_all_leave_the_run_stops():
    world = World(2)
    a, b = world.start(2)
    a.leaving = b.leaving = True
    world.settle()
    assert a.failed == b.failed == "The run stops: no member is left that has the model."


def test_who_finishes_causes_no_generation():
    world = World(3)
    a, b, c = world.start(3)
    a.finished = True
    world.settle(30)
    assert b.in_force.number == 1
    b.finished = True
    world.die(c)
    world.settle()
    assert world.registry.over
    assert not world.registry.stopped


def test_who_finishes_in_an_older_generation_than_the_others_is_taken_out():
    """Its thread has confirmed the new one, but it will exchange nothing in it."""
    world = World(3)
    a, b, c = world.start(3)
    former = a.in_force
    world.die(c)
    world.settle()
    assert world.numbers() == (0, 1)
    a.in_force, a.finished = former, True  # it was at its end when the new one came
    world.settle()
    assert world.numbers() == (1,)
    assert b.in_force.number == 3
    b.finished = True
    world.settle()
    assert world.registry.over
    assert not world.registry.stopped


def test_a_joiner_waits_until_it_is_ready_and_until_no_proposal_is_open():
    world = World(2)
    a, b = world.start(2)
    joiner = world.add(FakeMember("j", joins=True))
    world.settle(3)
    assert joiner.number == 2
    assert world.numbers() == (0, 1)
    b.confirms, joiner.ready = False, True
    world.settle()
    assert a.newest.numbers == (0, 1, 2)
    other = world.join("k")
    world.settle(3)
    assert a.newest.number == 2
    b.confirms, b.confirmed = True, (2, 0)
    world.settle()
    assert world.numbers() == (0, 1, 2, 3)
    assert joiner.in_force.number == other.in_force.number == 3
    assert a.newest.reason == "Member 3 joined."


def test_others_are_let_in_once_the_members_work_in_the_generation_that_is_in_force():
    world = World(3)
    a, b, c = world.start(3)
    a.works = False  # it has not entered generation 2 yet, or does not say so
    world.die(c)
    world.settle()
    joiner = world.join("j")
    world.settle(30)
    assert world.numbers() == (0, 1)
    assert joiner.newest is None
    a.works = True
    world.settle()
    assert world.numbers() == (0, 1, 3)
    assert b.newest.number == 3


def test_an_entry_waits_for_as_long_as_the_members_like():
    world = World(2)
    a, b = world.start(2)
    b.confirms = False
    joiner = world.join("j")
    world.settle(10 * LIMITS.confirm)
    assert a.newest.numbers == (0, 1, 2)
    assert world.numbers() == (0, 1)
    b.confirms, b.confirmed = True, (2, 7)
    world.settle()
    assert world.numbers() == (0, 1, 2)
    assert joiner.in_force.number == 2


def test_an_entry_is_given_up_for_a_loss_and_follows_it():
    world = World(3, min_members=3)
    a, b, c = world.start(3)
    a.confirms = b.confirms = False
    joiner = world.join("j")
    world.settle()
    assert a.newest.numbers == (0, 1, 2, 3)
    world.die(c)
    world.settle()
    assert a.newest.numbers == (0, 1)
    assert not a.newest.stop  # who waits is counted
    a.confirms = b.confirms = True
    a.confirmed = b.confirmed = (3, 7)
    world.settle()
    assert world.numbers() == (0, 1, 3)
    assert joiner.in_force.number == 4
    assert joiner.in_force.reason == "Member 3 joined."


def test_an_entry_that_comes_too_late_disturbs_nobody_at_the_end():
    world = World(2)
    a, b = world.start(2)
    a.confirms = b.confirms = False
    joiner = world.join("j")
    world.settle()
    a.finished = True
    world.settle(5)
    assert b.newest.number == 2
    assert not joiner.failed
    b.finished = True
    world.settle()
    assert joiner.failed == "The run has ended."


def test_a_joiner_that_dies_before_it_is_in_disturbs_nobody():
    world = World(2)
    a, _ = world.start(2)
    joiner = world.add(FakeMember("j", joins=True))
    world.die(joiner)
    world.settle(20)
    assert a.newest.number == 1


def test_joiners_alone_cannot_go_on():
    world = World(2)
    a, b = world.start(2)
    joiner = world.join("j")
    world.die(a, b)
    world.settle()
    assert "no member is left that has the model" in joiner.failed


def test_below_min_members_the_run_stops_with_a_sentence():
    world = World(3, min_members=3)
    a, _, c = world.start(3)
    world.die(c)
    world.settle()
    assert not a.failed
    assert a.in_force.numbers == (0, 1)
    assert a.in_force.stop == "2 members are left, and at least 3 are wanted."
    late = world.join("j")
    world.settle()
    assert late.refused == "The run stops: 2 members are left, and at least 3 are wanted."
    world.die(a)
    world.settle()
    assert world.numbers() == (1,)
    assert "1 member is left" in world.members[1].in_force.stop


@pytest.mark.parametrize(("description", "word"), [
    ({"version": "2"}, "version"), ({"alike": {"model": "other"}}, "model"), ({"problem": "No GPU."}, "No GPU."),
])  # fmt: skip
def test_who_does_not_fit_is_refused_and_the_others_start(description, word):
    world = World(2)
    world.add(FakeMember("p0", alike={"model": "mine"}))
    stranger = world.add(FakeMember("s", **{"alike": {"model": "mine"}, **description}))
    world.add(FakeMember("p1", alike={"model": "mine"}))
    world.settle()
    assert word in stranger.refused
    assert world.numbers() == (0, 1)


def test_a_founder_that_comes_too_late_is_refused():
    world = World(2)
    world.start(2)
    late = world.add(FakeMember("p9"))
    world.settle()
    assert "already started" in late.refused


def test_a_number_is_only_given_to_who_knows_its_secret():
    world = World(3)
    a, *_ = world.start(3)
    thief = FakeMember("thief")
    thief.number, thief.in_force, thief.newest = 1, a.in_force, a.newest
    world.add(thief)
    world.settle()
    assert thief.refused == "Another process is member 1."
    world.restart()
    world.settle()
    thief.refused = ""
    world.settle()
    assert thief.refused == "Another process is member 1."


@pytest.mark.parametrize("saves", [True, False])
def test_a_restarted_rendezvous_reissues_no_number_and_disturbs_nobody(saves):
    world = World(3, saves=saves)
    a, b, c = world.start(3)
    joiner = world.join("j")
    world.settle()
    assert a.in_force.number == 2
    world.restart()
    world.settle(20)
    assert {m.newest.number for m in (a, b, c, joiner)} == {2}
    world.die(b)
    late = world.join("k")
    world.settle(2)
    assert world.numbers() == (0, 2, 3, late.number)
    assert a.in_force.number > 2
    assert late.number == 4 if saves else late.number > 4


@pytest.mark.parametrize("saves", [True, False])
@pytest.mark.parametrize("late", [False, True])
def test_a_newcomer_that_was_proposed_as_the_rendezvous_died_is_let_in_by_the_next_one(saves, late):
    world = World(3, saves=saves)
    a, b, c = world.start(3)
    for member in (a, b, c):
        member.confirms = False
    joiner = world.join("j")
    world.settle()
    assert joiner.newest.number == 2
    assert joiner.in_force is None
    world.restart()
    joiner.cut = late
    for member in (a, b, c):
        member.confirms = True
    world.settle(2)
    joiner.cut = False
    world.settle(2)
    assert (joiner.failed, joiner.refused) == ("", "")
    assert a.in_force.numbers == joiner.in_force.numbers == (0, 1, 2, 3)
    assert a.in_force.number > 2


@pytest.mark.parametrize("saves", [True, False])
def test_members_that_died_while_the_rendezvous_was_away_are_lost_when_it_is_back(saves):
    world = World(3, saves=saves)
    a, b, c = world.start(3)
    world.away = True
    world.die(c)
    a.suspect(2)
    b.suspect(2)
    world.settle(30)
    assert a.newest.number == 1
    world.restart()
    world.settle(1)
    assert world.numbers() == (0, 1)
    assert a.in_force.number == b.in_force.number


@pytest.mark.parametrize("saves", [True, False])
def test_a_restarted_rendezvous_waits_for_a_majority(saves):
    world = World(3, saves=saves)
    a, b, c = world.start(3)
    world.restart()
    b.cut = c.cut = True
    world.settle(60)
    assert world.numbers() == (0, 1, 2)
    assert not a.failed
    b.cut = False
    world.settle(20)
    assert world.numbers() == (0, 1)


@pytest.mark.parametrize("saves", [True, False])
def test_a_proposal_that_was_open_when_the_rendezvous_died_is_followed_by_another(saves):
    world = World(3, saves=saves)
    a, b, c = world.start(3)
    b.confirms = False
    world.die(c)
    world.settle()
    assert a.newest.number == 2
    b.confirms = True
    world.restart()
    world.settle(1)
    assert world.numbers() == (0, 1)
    assert a.in_force is not None
    assert a.in_force.number == b.in_force.number > 2


def test_a_process_of_another_run_cannot_claim_a_number():
    old, new = World(2), World(2)
    stranger, _ = old.start(2)
    new.start(2)
    stranger.secret, stranger.introduce = "other", True
    new.add(stranger)
    new.settle()
    assert stranger.refused == "It belongs to another run."


def test_a_pause_of_the_rendezvous_is_not_taken_for_silence():
    world = World(3)
    world.start(3)
    world.now += 60
    world.registry.tick(world.now)
    world.settle(5)
    assert world.numbers() == (0, 1, 2)


@pytest.mark.parametrize("status", [{}, {"secret": "x", "address": 3}, {"agent": "a", "ended": 4}, [], 3])
def test_what_is_no_status_is_refused_without_effect(status):
    world = World(2)
    world.start(2)
    with pytest.raises((ValueError, TypeError, KeyError, AttributeError)):
        world.registry.report(b"stranger", status, world.now)
    world.settle(1)
    assert world.numbers() == (0, 1)


SEED = int(os.environ.get("REGISTRY_SEED", "0")) or random.randrange(2**32)


@pytest.mark.parametrize("saves", [True, False])
def test_random_events_never_let_two_generations_work_at_once(saves):
    print(f"REGISTRY_SEED={SEED}")
    for run in range(15):
        chance = random.Random(f"{SEED}-{run}")
        _random_run(chance, World(size := chance.randint(2, 6), saves=saves), size)


def _random_run(chance, world, size):
    world.start(size)
    for event in range(40):
        alive = [m for m in world.members if not (m.dead or m.failed or m.refused or m.finished)]
        inside = [m for m in alive if m.in_force is not None]
        kind = chance.choice(["kill", "unknown", "stop", "cont", "cut", "heal", "leave", "join", "suspect", "restart"])
        kind = chance.choice([kind, "wait", "slow", "step"])
        some = chance.sample(alive, min(len(alive), chance.choice([1, 1, 2])))
        if kind in ("kill", "unknown") and len(inside) > 2:
            world.die(*some, known=kind == "kill")
        for member in some:
            match kind:
                case "stop" | "cont":
                    member.stopped = kind == "stop"
                case "cut":
                    member.cut = True
                case "leave" if len(inside) > 2:
                    member.leaving = True
                case "suspect" if member.newest is not None:
                    member.suspect(chance.choice(member.newest.numbers))
                case "slow":
                    member.confirms = not member.confirms
        if kind == "heal":
            for member in world.members:
                member.cut = False
        if kind == "join":
            world.join(f"j{event}")
        if kind == "restart" and (world.saves or not any(m.cut or m.stopped for m in alive)):
            world.away = True
            world.settle(chance.randint(0, 3))
            world.restart()
        if kind == "step":
            _steps(world)
        world.settle(chance.choice([0, 0, 1, 3, 15]))
        for child in world.killed:
            world.die(*[m for m in world.members if m.secret == child and not m.dead])
        _check(world)


def _steps(world):
    """All generations whose members all work in them take a step: it must be one at most."""
    working = {m.in_force.number: m.in_force for m in world.members if m.active}
    by_number = {m.number: m for m in world.members if m.number is not None and m.active}
    complete = [
        g
        for g in working.values()
        if all(n in by_number and by_number[n].in_force.number == g.number for n in g.numbers)
    ]
    assert len(complete) <= 1, [g.numbers for g in complete]
    for generation in complete:
        for number in generation.numbers:
            by_number[number].step += 1


def _check(world):
    members_of = {}
    for generation in world.history:
        assert members_of.setdefault(generation.number, generation.numbers) == generation.numbers
    in_force = [generation for _, generation in sorted({g.number: g for g in world.history}.items())]
    gone = {m.number for m in world.members if m.dead or m.leaving}
    for old, new in itertools.pairwise(in_force):
        assert set(old.numbers) & set(new.numbers) or set(old.numbers) <= gone, (old.numbers, new.numbers)
    numbers = [m.number for m in world.members if m.number is not None and not m.refused]
    assert len(numbers) == len(set(numbers))
    _steps(world)
