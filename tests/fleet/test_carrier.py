"""The carrier between processes: several in threads of one process, strangers at their ports, and killed processes."""

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import zmq

from hetjax.fleet.carrier import Carrier, PeerLost
from hetjax.fleet.channel import _CHUNK
from hetjax.fleet.protocol import DATA, HELLO, REFUSED, TABLE, Header, kind_in_any_version, unpacked
from hetjax.fleet.pulse import Pulse
from hetjax.fleet.reception import Reception
from hetjax.fleet.rendezvous import free_port
from hetjax.fleet.sockets import LARGEST

ROOT = Path(__file__).parents[2]
_, KEY = zmq.curve_keypair()
_, OTHER_KEY = zmq.curve_keypair()


def start(port, index, count=2, **options):
    address = f"127.0.0.1:{port}"
    limits = {"start_limit": 20.0, "wait_limit": 20.0} | options
    return Carrier(index, count, coordinator=address, bind=address if index == 0 else None, **limits)


def attempt(*arguments, **options):
    """A carrier, or the error of its constructor."""
    try:
        return start(*arguments, **options)
    except Exception as error:
        return error


def met(*options, port=None):
    """Carriers of one process each, or their errors; options of each."""
    port = port or free_port("127.0.0.1")
    with ThreadPoolExecutor(len(options)) as pool:
        futures = [
            pool.submit(attempt, port, o.pop("index", k), o.pop("count", len(options)), **o)
            for k, o in enumerate([*map(dict, options)])
        ]
        return [future.result() for future in futures]


def together(fleet, work):
    """Call `work` with every carrier at the same time; results, or errors."""

    def run(carrier):
        try:
            return work(carrier)
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(fleet)) as pool:
        return list(pool.map(run, fleet))


def sockets():
    """Open sockets of this process."""
    links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    return {found for found in (os.readlink(link) for link in links if os.path.lexists(link)) if "socket" in found}


@pytest.fixture
def fleets():
    """Makes fleets that are closed at the end, after which nothing may be left."""
    threads, before = set(threading.enumerate()), sockets()
    made = []

    def make(*options, **more):
        made.append(met(*options, **more))
        return made[-1]

    yield make
    for fleet in made:
        for carrier in fleet:
            if isinstance(carrier, Carrier):
                carrier.close(together=False)
    assert not [t for t in threading.enumerate() if t not in threads and "carrier" in t.name]
    assert sockets() <= before


# -- messages --


def test_whoever_waits_for_several_messages_gets_the_first_that_has_come(fleets):
    first, second, third = fleets(
        {},
        {},
        {},
    )
    own, of_second, of_third = (carrier.channel() for carrier in (first, second, third))
    assert own.take(1, 5) is None
    of_second.send(0, 5, [b"piece"])
    assert own.first_arrived([(2, 0), (1, 5)]) == (1, 5)
    of_third.send(0, 0, [b"tail"])
    assert own.first_arrived([(2, 0)]) == (2, 0)
    assert own.first_arrived([(2, 0), (1, 5)]) == (2, 0)  # the first of those that are there
    assert [bytes(own.take(1, 5)[0]), bytes(own.receive(2, 0)[0])] == [b"piece", b"tail"]
    assert own.take(1, 5) is None
    third.close(together=False)
    with pytest.raises(PeerLost, match="Process 2"):
        own.first_arrived([(2, 0), (1, 5)])


@pytest.mark.parametrize("key", [None, KEY], ids=["plain", "key"])
def test_every_process_gets_what_every_process_gives(fleets, key):
    """Short and long contents, with and without a key, until all leave together."""
    fleet = fleets(*[{"key": key, "description": {"name": k}} for k in "abc"])
    assert [row["name"] for row in fleet[1].table] == ["a", "b", "c"]
    contents = [b"", b"x", os.urandom(_CHUNK + 17)]
    for shift in range(3):
        gathered = together(fleet, lambda c, s=shift: c.gather(contents[(c.index + s) % 3]))
        assert gathered == [[contents[(k + shift) % 3] for k in range(3)]] * 3
    long = bytes(2 * _CHUNK)
    assert together(fleet, lambda c: c.broadcast(long if c.index == 0 else None)) == [long] * 3
    together(fleet, lambda c: c.close(together=True))


def test_channels_rounds_and_pieces_are_kept_apart(fleets):
    """Any order of sending, buffers of NumPy without a copy."""
    a, b = fleets({}, {})
    (one, two), (uno, due) = ([c.channel(), c.channel()] for c in (a, b))
    sent = np.arange(6, dtype=np.float32)
    two.send(1, 0, [sent])
    one.send(1, 1, [b"second", b"part"])
    one.send(1, 0, [b"first"])
    one.round = uno.round = 1
    one.send(1, 0, [b"next round"])
    assert bytes(uno.receive(0, 0)[0]) == b"next round"
    uno.round = 0
    assert [bytes(x) for x in uno.receive(0, 1)] == [b"second", b"part"]
    assert bytes(uno.receive(0, 0)[0]) == b"first"
    np.testing.assert_array_equal(np.frombuffer(due.receive(0, 0)[0], np.float32), sent)


def test_a_message_that_is_too_long_is_refused_by_its_sender(fleets):
    a, b = fleets({}, {})
    with pytest.raises(ValueError, match="exceeds the limit of 67,108,864: send it in pieces"):
        a.channel().send(1, 0, [b"small", np.zeros(LARGEST // 8 + 1)])
    assert together([a, b], lambda c: c.gather(b"fine")) == [[b"fine"] * 2] * 2


def test_a_message_that_does_not_come_is_reported(fleets):
    a, _ = fleets({}, {})
    with pytest.raises(TimeoutError, match=r"Process 1 sent nothing for 0\.05 s, although it answers"):
        a.channel().receive(1, 0, limit=0.05)


def test_an_error_in_the_thread_reaches_all_who_wait(fleets, monkeypatch):
    a, b = fleets({}, {})
    channels = [a.channel(), a.channel()]

    def fail(*_):
        raise ZeroDivisionError("on purpose")

    monkeypatch.setattr(a, "_file", fail)
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(channel.receive, 1, 0) for channel in channels]
        b.channel().send(0, 0, [b"anything"])
        for future in waiting:
            with pytest.raises(RuntimeError, match="carrier of process 0 failed: ZeroDivisionError: on purpose"):
                future.result(timeout=10)
    with pytest.raises(RuntimeError, match="on purpose"):
        a.gather(b"")


# -- meeting --


def test_a_late_process_is_waited_for_longer_than_heartbeats_may_take(fleets):
    """Only those who have met can be lost; afterwards nothing is sent, as this machine may be busy for 0.4 s."""
    port = free_port("127.0.0.1")
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(attempt, port, 0, heartbeat_limit=0.4)
        stop = time.monotonic() + 0.6
        while time.monotonic() < stop:  # as long as a slow import may take
            assert not first.done()
            time.sleep(0.01)
        fleet = [attempt(port, 1, heartbeat_limit=0.4), first.result()]
    assert [type(carrier) for carrier in fleet] == [Carrier] * 2, fleet
    for carrier in fleet:
        carrier.close(together=False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([{}, {"count": 3}], "Process 1 differs from process 0 in its number of processes: 3 instead of 2"),
        ([{}, {}, {"index": 1}], "Process 1 connected twice to 127.0.0.1:.*: give every process its own index"),
        ([{"count": 2}, {"index": 2, "count": 3}], "Process 2 of 3 connected to .*, where 2 processes are expected"),
        ([{"description": {"alike": {"batch_size": 4}}}, {"description": {"alike": {"batch_size": 8}}}],
         "Process 1 differs from process 0 in its batch size: 8 instead of 4"),
        ([{}, {"description": {"version": "9.9"}}], "differs from process 0 in its version: 9.9 instead of"),
        ([{}, {}, {"description": {"problem": "There is no gpu here."}}], "^Process 2: There is no gpu here.$"),
        ([{"description": {"problem": "A."}}, {"description": {"problem": "B."}}], "^Process 0: A. Process 1: B.$"),
    ],
)  # fmt: skip
def test_processes_that_disagree_are_told_so_on_all_sides(fleets, options, message):
    errors = fleets(*options)
    assert {type(error) for error in errors} == {ValueError}, errors
    assert len({str(error) for error in errors}) == 1
    with pytest.raises(ValueError, match=message):
        raise errors[0]


@pytest.mark.parametrize("keys", [(KEY, OTHER_KEY), (KEY, None), (None, KEY)], ids=["another", "none", "too many"])
def test_another_key_is_refused(fleets, keys, caplog):
    """The process with the wrong key ends at once; process 0 is not disturbed, and waits for the right one."""
    port = free_port("127.0.0.1")
    with ThreadPoolExecutor(1) as pool, caplog.at_level(logging.WARNING, "hetjax"):
        first = pool.submit(attempt, port, 0, key=keys[0])
        wrong = attempt(port, 1, key=keys[1])
        assert isinstance(wrong, ValueError), wrong
        assert "its key differs, or only one of the two has a key" in str(wrong)
        assert not first.done()
        fleet = [first, attempt(port, 1, key=keys[0])]
        fleet[0] = first.result()
    try:
        assert together(fleet, lambda c: c.gather(b"y")) == [[b"y", b"y"]] * 2
    finally:
        together(fleet, lambda c: c.close(together=True))


def test_a_missing_process_is_named(fleets):
    errors = fleets({"count": 4, "start_limit": 1.5}, {"count": 4})
    assert isinstance(errors[0], TimeoutError)
    assert "within 1.5 s: processes 2, 3 are missing" in str(errors[0])
    assert str(errors[1]) == str(errors[0])


def test_a_port_that_is_taken_is_an_os_error(fleets):
    with socket.create_server(("127.0.0.1", 0)) as server:
        (error,) = fleets({"count": 2}, port=server.getsockname()[1])
    assert isinstance(error, OSError)
    assert "cannot listen on 127.0.0.1" in str(error)


def test_another_version_of_the_protocol_is_refused_on_both_sides():
    """All versions begin alike, so each side can tell the other."""
    reception = Reception(2, "host:1", {"address": "x"}, b"t" * 8)
    reception.arrive(None, "HJX7", b"anything", b"v")
    assert reception.answer[0] == REFUSED
    ((visitor, kind, content),) = reception.letters()
    assert (visitor, kind) == (b"v", REFUSED)
    assert "another version of hetjax, with protocol HJX7" in json.loads(content)
    frame = b"HJX7" + bytes([REFUSED]) + b"of any length"
    assert unpacked(frame) is None
    assert kind_in_any_version(frame) == (REFUSED, "HJX7")


# -- strangers --


def dealer(context, port):
    stranger = context.socket(zmq.DEALER)
    stranger.linger = 1000
    stranger.connect(f"tcp://127.0.0.1:{port}")
    return stranger


def test_strangers_do_not_disturb_a_run(fleets, caplog):
    """Connections that say nothing, rubbish, foreign messages, forged headers, a process that comes too late."""
    port = free_port("127.0.0.1")
    fleet = fleets({}, {}, port=port)
    raw = lambda content: socket.create_connection(("127.0.0.1", port)).sendall(content)
    with ExitStack() as stack, caplog.at_level(logging.WARNING, "hetjax"):
        for _ in range(20):
            stack.enter_context(socket.create_connection(("127.0.0.1", port)))  # half open
            socket.create_connection(("127.0.0.1", port)).close()  # a port scanner
        for content in (b"GET / HTTP/1.1\r\n\r\n", os.urandom(1000)):
            raw(content)
        with socket.create_connection(("127.0.0.1", port)) as rubbish:
            rubbish.settimeout(5)
            closed = False
            for _ in range(160):  # 10 MB, unless the carrier closes the connection
                try:
                    rubbish.sendall(os.urandom(2**16))
                except OSError:
                    closed = True
                    break
            assert closed
        context = stack.enter_context(zmq.Context())
        stranger = dealer(context, port)
        forged = Header(DATA, b"00000000", 1, 0, 1, 0, 0).packed()
        hellos = [
            b"",
            b"{",
            b"[" * 50_000,
            b"1",
            b"{}",
            b'{"address": 3}',
            b'{"alike": 1, "address": ""}',
            bytes(2**17),
        ]
        for frames in ([b""], [b"", b""], [b"HJX"], [b"HJX1"], [forged, b"1"], [os.urandom(35)], [b"x" * 2**20],
                       *([Header(HELLO, bytes(8), 1).packed(), hello] for hello in hellos)):  # fmt: skip
            stranger.send_multipart(frames)
        stranger.send(b"y" * (LARGEST + 1))  # this one closes the connection
        late = attempt(port, 1)
        assert isinstance(late, ValueError)
        assert "The run of 2 processes at 127.0.0.1:" in str(late)
        assert "has already started" in str(late)
        for k in range(3):
            assert together(fleet, lambda c, k=k: c.gather(b"%d" % k)) == [[b"%d" % k] * 2] * 2
    assert not fleet[0]._lost
    assert [r.getMessage() for r in caplog.records if "does not belong" in r.getMessage()]


def test_rubbish_before_the_meeting_does_not_disturb_it(fleets):
    port = free_port("127.0.0.1")
    with ThreadPoolExecutor(1) as pool, zmq.Context() as context:
        first = pool.submit(attempt, port, 0)
        stranger = dealer(context, port)
        for frames in ([b"HJX1"], [Header(HELLO, bytes(8), 1).packed(), b"{"], [Header(TABLE, bytes(8), 1).packed()]):
            stranger.send_multipart(frames)
        fleet = [attempt(port, 1), first.result()]
        stranger.close()
    try:
        assert together(fleet, lambda c: c.gather(b"y")) == [[b"y", b"y"]] * 2
    finally:
        together(fleet, lambda c: c.close(together=True))


@pytest.mark.parametrize("content", [b'{"token": 1}', b"[]", b'{"token": "00", "table": [1, 2]}', b'{"token": "zz"}'])
def test_who_answers_rubbish_is_not_process_0(content):
    port = free_port("127.0.0.1")
    with zmq.Context() as context, ThreadPoolExecutor(1) as pool:
        impostor = context.socket(zmq.ROUTER)
        impostor.linger = 1000
        impostor.bind(f"tcp://127.0.0.1:{port}")
        guest = pool.submit(attempt, port, 1)
        visitor = impostor.recv_multipart()[0]
        impostor.send_multipart([visitor, b"\x00"])
        impostor.send_multipart([visitor, Header(TABLE, bytes(8), 0).packed(), b"{"])
        impostor.send_multipart([visitor, Header(TABLE, bytes(8), 0).packed(), content])
        error = guest.result()
        impostor.close()
    assert isinstance(error, ValueError)
    assert "is not process 0 of this run" in str(error)


# -- loss --


def test_signs_of_life():
    """With given clocks: silence, closed connections, goodbyes, and a pause of this process itself."""
    pulse = Pulse([1, 2, 3], limit=4.0, now=0.0)
    assert pulse.beat_is_due(0.0)
    assert not pulse.beat_is_due(0.9)
    assert pulse.beat_is_due(1.0)
    for now in np.arange(1, 4.5, 0.5):
        pulse.heard(1, now)
        assert pulse.lost(now) == {}
    pulse.goodbye(3)
    pulse.heard(1, 4.4)
    assert pulse.lost(4.5) == {2: "has not answered for 4 s: it hangs, or its connection broke"}
    pulse.heard(2, 5)
    pulse.disconnected(1, 5.0)
    assert pulse.hurried
    assert pulse.lost(5.1) == {}
    assert pulse.lost(5.4) == {1: "ended, or its connection broke"}
    pulse = Pulse([1], limit=4.0, now=0.0, patient=True)
    for now in range(20):  # it has not entered this generation yet
        assert pulse.lost(now) == {}
    pulse.heard(1, 20.0)
    for now in range(20, 24):
        assert pulse.lost(now) == {}
    assert list(pulse.lost(24.5)) == [1]
    pulse = Pulse([1], limit=4.0, now=0.0)
    assert pulse.lost(100.0) == {}  # this process was stopped
    assert pulse.lost(101.9) == {}
    assert list(pulse.lost(102.1)) == [1]


def test_a_process_that_closes_without_goodbye_is_lost_to_all(fleets):
    a, b, c = fleets({}, {}, {})
    c.close(together=False)
    for error in together([a, b], lambda carrier: carrier.gather(b"")):
        assert isinstance(error, PeerLost)
        assert str(error) == "Process 2 ended, or its connection broke."


PEER = """
import sys, os
from hetjax.fleet.carrier import Carrier, PeerLost
port, index = int(sys.argv[1]), int(sys.argv[2])
address = f"127.0.0.1:{port}"
carrier = Carrier(index, 3, coordinator=address, bind=address, start_limit=60, wait_limit=60, heartbeat_limit=2)
print("joined", flush=True)
try:
    carrier.gather(b"") if index != 1 else sys.stdin.read()
except PeerLost as lost:
    print(lost, flush=True)
    carrier.close(together=False)
    os._exit(1)
"""


@pytest.mark.parametrize(("how", "reason"), [(signal.SIGKILL, "ended"), (signal.SIGSTOP, "has not answered for 2 s")])
def test_a_killed_or_stopped_process_is_named_by_the_others(how, reason):
    port = free_port("127.0.0.1")
    pipes = {
        "stdin": subprocess.PIPE,
        "stdout": subprocess.PIPE,
        "text": True,
        "env": {**os.environ, "PYTHONPATH": str(ROOT)},
    }
    started = [subprocess.Popen([sys.executable, "-c", PEER, str(port), str(k)], **pipes) for k in range(3)]
    try:
        assert [process.stdout.readline() for process in started] == ["joined\n"] * 3
        started[1].send_signal(how)
        for k in (0, 2):
            out, _ = started[k].communicate(timeout=120)
            assert out.startswith(f"Process 1 {reason}"), out
            assert started[k].returncode == 1
    finally:
        for process in started:
            process.kill()
            process.communicate()
