"""Members and their rendezvous over sockets, in one process; and enemies at its port."""

import json
import logging
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import zmq

from hetjax.environment import CHILD, PROCESS
from hetjax.fleet.generations import Fenced, Superseded
from hetjax.fleet.protocol import HELLO, STATUS, Header
from hetjax.fleet.registration import Agent, Registration
from hetjax.fleet.registry import Patience
from hetjax.fleet.rendezvous import free_port
from hetjax.fleet.service import Rendezvous

_, KEY = zmq.curve_keypair()
_, OTHER_KEY = zmq.curve_keypair()
WAIT = 60.0  # seconds; a limit only ends hangs
LIMITS = Patience(silent=30.0, answer=30.0)


class Fleet:
    def __init__(self, processes, monkeypatch, key=None, **options):
        self.port, self.key, self.log = free_port("127.0.0.1"), key, []
        self.options = {"limits": LIMITS, **options}
        self.address, self.open, self.processes = f"127.0.0.1:{self.port}", [], processes
        self.monkeypatch = monkeypatch
        self.serve()

    def serve(self):
        self.rendezvous = Rendezvous(self.address, self.processes, key=self.key, log=self.log.append, **self.options)

    def register(self, index, key="own", **options):
        options = {"start_limit": WAIT, "address": f"tcp://member:{index}", **options}
        registration = Registration(self.address, key=self.key if key == "own" else key, **options)
        self.open.append(registration)
        return registration

    def start(self):
        with ThreadPoolExecutor(self.processes) as pool:
            members = [*pool.map(self.register, range(self.processes))]
        members.sort(key=lambda member: member.number)
        assert enter(members) == 1
        return members

    def close(self):
        for registration in self.open:
            registration.close()
        self.rendezvous.close()


@pytest.fixture
def fleets(monkeypatch):
    """Makes fleets that are closed at the end, after which no thread may be left."""
    before, made = set(threading.enumerate()), []
    monkeypatch.delenv(PROCESS, raising=False)
    monkeypatch.delenv(CHILD, raising=False)

    def make(processes, **options):
        made.append(Fleet(processes, monkeypatch, **options))
        return made[-1]

    yield make
    for fleet in made:
        fleet.close()
    assert set(threading.enumerate()) <= before


def enter(members, step=0, than=0):
    """Bring all members into the next generation."""
    for member in members:
        member.confirm(member.wait_newer(than, WAIT).number, step)
    steps = [member.wait_confirmed(member.newest.number, WAIT) for member in members]
    for member in members:
        member.enter(member.newest.number)
    assert steps == [dict.fromkeys(members[0].newest.numbers, step)] * len(members)
    return members[0].newest.number


def test_members_start_join_leave_and_finish(fleets):
    fleet = fleets(2)
    a, b = fleet.start()
    joiner = fleet.register(2, joins=True)
    assert joiner.number == 2
    assert joiner.newest is None
    joiner.ready()
    assert enter([a, b, joiner], 5, than=1) == 2
    b.leave()
    assert enter([a, joiner], 6, than=2) == 3
    assert a.newest.reason == "Member 1 left."
    assert b.wait_newer(2, WAIT).numbers == (0, 2)
    assert b.wait_confirmed(3, WAIT) == {0: 6, 2: 6}
    for member in (a, joiner):
        member.close()
    wait_for(lambda: fleet.rendezvous.over)
    assert not any("lost" in sentence for sentence in fleet.log)


def test_an_end_reported_by_the_launcher_makes_a_generation_at_once(fleets):
    fleet = fleets(3)
    with pytest.MonkeyPatch.context() as patch:
        members = []
        for child in ("x", "y", "z"):
            patch.setenv(CHILD, child)
            members.append(fleet.register(0))
    enter(members)
    agent = Agent(fleet.address, fleet.key)
    agent.ended("y", "was killed by SIGKILL", False, False)
    assert enter([members[0], members[2]], than=1) == 2
    assert members[0].newest.reason == "Member 1 was lost: its process was killed by SIGKILL."
    agent.close()


def test_a_member_that_was_taken_out_is_told_and_its_launcher_kills_it(fleets):
    fleet = fleets(3, limits=Patience(silent=30.0, answer=30.0, confirm=0.5))
    with pytest.MonkeyPatch.context() as patch:
        members = []
        for child in ("x", "y", "z"):
            patch.setenv(CHILD, child)
            members.append(fleet.register(0))
    agent = Agent(fleet.address, fleet.key)
    a, b, c = members
    for member in (a, b, c):
        member.confirm(1, 0)
    enter(members)
    a.suspect([2], "silence")
    for member in (a, b):  # c does not confirm
        member.confirm(member.wait_newer(1, WAIT).number, 0)
    assert enter([a, b], than=2) == 3
    with pytest.raises(Fenced, match="did not finish its step"):
        c.wait_newer(2, WAIT)
    wait_for(lambda: agent.kill == {"z"})
    agent.close()


def test_a_generation_is_superseded_when_a_member_is_lost_meanwhile(fleets):
    fleet = fleets(3)
    a, b, c = fleet.start()
    c.leave()
    a.wait_newer(1, WAIT)
    b.leave()
    with pytest.raises(Superseded):
        a.wait_confirmed(2, WAIT)
    assert enter([a], than=2) == 3


def test_too_few_members_are_told_to_stop(fleets):
    fleet = fleets(2, min_members=2)
    a, b = fleet.start()
    b.leave()
    assert a.wait_newer(1, WAIT).stop == "1 member is left, and at least 2 are wanted."
    with pytest.raises(ValueError, match="The run stops"):
        fleet.register(5, joins=True)


def test_a_wait_ends_with_a_sentence_that_says_how_many_are_missing(fleets):
    fleet = fleets(2)
    a = fleet.register(0)
    with pytest.raises(TimeoutError, match="1 of 2 processes are there"):
        a.wait_newer(0, 0.2)


@pytest.mark.parametrize("saves", [True, False])
def test_members_go_on_while_the_rendezvous_is_away_and_find_it_again(fleets, tmp_path, saves):
    state = tmp_path / "state" if saves else None
    fleet = fleets(3, key=KEY, state=state)
    a, b, c = fleet.start()
    fleet.rendezvous.close()
    a.suspect([2], "silence")
    a.check()
    fleet.serve()
    c.leave()
    newest = enter([a, b], 3, than=1)
    assert newest > 1
    joiner = fleet.register(3, joins=True)
    assert joiner.number > 2
    joiner.ready()
    enter([a, b, joiner], 4, than=newest)
    if saves:
        assert state.stat().st_mode & 0o077 == 0


def test_a_state_file_that_is_none_is_refused(tmp_path):
    (tmp_path / "state").write_text("{")
    with pytest.raises(ValueError, match="remove it"):
        Rendezvous(f"127.0.0.1:{free_port('127.0.0.1')}", 2, state=tmp_path / "state")


def test_without_a_key_a_reachable_network_is_said_to_be_trusted():
    for key, said in ((None, True), (KEY, False)):
        log = []
        Rendezvous(f"0.0.0.0:{free_port('127.0.0.1')}", 1, key=key, log=log.append).close()
        assert any("this network is trusted" in sentence for sentence in log) == said


def test_a_port_in_use_is_refused_with_a_sentence(fleets):
    fleet = fleets(1)
    with pytest.raises(OSError, match="cannot listen"):
        Rendezvous(fleet.address, 2)


def test_a_process_with_another_key_or_none_is_refused_in_a_sentence(fleets):
    fleet = fleets(1, key=KEY)
    for key in (OTHER_KEY, None):
        with pytest.raises((ValueError, TimeoutError), match=r"key|answer"):
            fleet.register(1, key=key, start_limit=3.0)
    assert any("its key differs" in sentence for sentence in fleet.log)
    assert enter([fleet.register(0)]) == 1


def test_another_version_and_another_model_are_refused(fleets):
    fleet = fleets(2)
    a = fleet.register(0, description={"alike": {"model": "mine"}})
    with pytest.raises(ValueError, match="model: other instead of mine"):
        fleet.register(1, description={"alike": {"model": "other"}})
    with pytest.raises(ValueError, match="version: 0 instead of"):
        fleet.register(1, description={"version": "0"})
    b = fleet.register(1)
    b.describe({"model": "mine"})
    enter([a, b])
    joiner = fleet.register(2, joins=True)
    joiner.describe({"model": "other"})
    joiner.ready()
    with pytest.raises(Fenced, match="model: other instead of mine"):
        joiner.wait_newer(0, WAIT)
    assert a.newest.number == 1
    assert sum("was refused" in sentence for sentence in fleet.log) == 2


def rubbish(fleet):
    """What comes to an open port."""
    for content in (b"GET / HTTP/1.1\r\n\r\n", bytes(10_000_000), b"", b"\xff" * 10):
        with socket.create_connection(("127.0.0.1", fleet.port)) as connection:
            connection.settimeout(2.0)
            try:
                connection.sendall(content)
                connection.recv(100)
            except OSError:
                pass
    half_open = [socket.create_connection(("127.0.0.1", fleet.port)) for _ in range(50)]
    context = zmq.Context()
    enemy = context.socket(zmq.DEALER)
    enemy.linger = 1000
    enemy.connect(f"tcp://{fleet.address}")
    header = Header(STATUS, bytes(8), 0).packed()
    for frames in (
        [b"x"], [header], [header, b"{"], [header, b"[" * 100_000], [header, b"null"], [header, b'{"secret": "a"}'],
        [header, json.dumps({"secret": "a", "address": 7}).encode()], [header, bytes(10_000_000)], [b"x"] * 100,
        [Header(HELLO, bytes(8), 0).packed(), b"{}"], [b"HJX9" + header[4:], b"{}"],
        [header, json.dumps({"agent": [], "ended": [1]}).encode()],
    ):  # fmt: skip
        enemy.send_multipart(frames)
    return half_open, context


def test_rubbish_at_the_port_is_dropped_and_the_run_goes_on(fleets, caplog):
    fleet = fleets(2)
    members = fleet.start()
    with caplog.at_level(logging.WARNING):
        half_open, context = rubbish(fleet)
        joiner = fleet.register(2, joins=True)
        joiner.ready()
        assert enter([*members, joiner], 1, than=1) == 2
    for connection in half_open:
        connection.close()
    context.destroy(linger=0)
    wait_for(lambda: any("valid status" in sentence for sentence in fleet.log))
    assert any("another version" in sentence for sentence in fleet.log)
    assert len(fleet.log) < 15


def wait_for(condition):
    deadline = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
