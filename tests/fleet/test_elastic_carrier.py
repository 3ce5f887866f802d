"""The carrier of an elastic fleet: whoever dies, and whenever, the others meet again."""

import random
import threading

import pytest

from hetjax.fleet.elastic import ElasticCarrier, GenerationChanged
from hetjax.fleet.registration import Registration
from hetjax.fleet.registry import Patience
from hetjax.fleet.rendezvous import free_port
from hetjax.fleet.service import Rendezvous

WAIT = 60.0  # only ends a hang
PATIENT = Patience(silent=WAIT, answer=WAIT, confirm=WAIT)
STEPS = 20


class Killed(BaseException):
    """Ends a member as SIGKILL would end its process."""


@pytest.fixture
def fleet():
    """Runs work(carrier, k) for this many members in threads; returns what each returned or raised, by number."""
    opened = []

    def run(members, work, limits=PATIENT, log=lambda sentence: None):
        address, found = f"127.0.0.1:{free_port('127.0.0.1')}", {}
        opened.append(Rendezvous(address, members, limits=limits, log=log))

        def one(k):
            register = lambda place, notify: Registration(address, notify=notify, **place)
            link, finished = ElasticCarrier(register, address, expected=members, wait_limit=WAIT), False
            try:
                found[link.number], finished = work(link, k), True
            except BaseException as error:
                found[link.number] = error
            link.close(together=finished)

        threads = [threading.Thread(target=one, args=(k,), daemon=True) for k in range(members)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * WAIT)
        assert not any(thread.is_alive() for thread in threads)
        return found

    yield run
    for rendezvous in opened:
        rendezvous.close()


def steps_of(link):
    """Exchange something with everybody in every step; after a loss go on from the newest step."""
    link.enter_next()
    made, settled = 0, False
    while made < STEPS or not settled:
        try:
            if not settled:
                made, settled = max(int(row) for row in link.gather(str(made).encode())), True
                channel = link.channel()  # as a reduce opens one when members have settled
                continue
            for piece in (0, 1):
                for peer in link.others:
                    channel.send(peer, piece, [made.to_bytes(4, "little") * 500])
                for peer in link.others:
                    (came,) = channel.receive(peer, piece)
                    assert int.from_bytes(came[:4], "little") == made
            channel.round, made = channel.round + 1, made + 1
            link.step = made
        except GenerationChanged:
            link.enter_next()
            settled = False
    return made


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40))
def test_survivors_of_deaths_at_any_message_go_on_at_once(fleet, seed):
    """Connections that break while they are replaced once stopped ZeroMQ's thread, in one of ten such runs."""
    draw = random.Random(seed)
    members = draw.choice([3, 4, 5])
    kills = {k: (draw.randint(1, STEPS // 2), draw.randint(0, 6)) for k in draw.sample(range(members), members - 2)}

    def work(link, k):
        step, left = kills.get(k, (STEPS + 1, 0))
        send, sends = link.send, [left]

        def one(*message):
            if link.step >= step:
                sends[0] -= 1
                if sends[0] < 0:
                    raise Killed
            return send(*message)

        link.send = one
        return steps_of(link)

    found = fleet(members, work)
    assert sorted(map(repr, found.values())) == sorted(["Killed()"] * len(kills) + [repr(STEPS)] * 2)


@pytest.mark.slow
def test_a_member_that_enters_late_is_not_taken_for_lost(fleet):
    """Others compile, or compute, for longer than the limit of silence; the rendezvous hears of them meanwhile."""
    log, entered = [], threading.Barrier(2)

    def work(link, k):
        if k == 0:  # the others are in the generation, and have been for several limits
            entered.wait(WAIT)
            link.registration.wait_newer(0, WAIT)
            for _ in range(8):
                link.registration.check()
                threading.Event().wait(0.25)
        link.enter_next()
        if k == 1:
            entered.wait(WAIT)
        link.gather(b"")
        return link.generation

    found = fleet(3, work, Patience(silent=0.5, answer=0.25, confirm=WAIT), log.append)
    assert found == {0: 1, 1: 1, 2: 1}, log
