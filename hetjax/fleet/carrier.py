"""The carrier: messages between the processes of a run over ZeroMQ, by way of their hosts.

Every process keeps its own JAX backend; what it exchanges with the others are host buffers. Each process has one inbox,
to which all others connect. A thread files what arrives by (channel, round, piece, sender); the thread that waits for
it takes it from there. Buffers are sent without a copy, and every wait has a limit and names the process it waits for.

Processes meet at process 0, which compares what they are (`hetjax.fleet.reception`) and gives all of them the table of
addresses. Messages carry the token of the run and the generation of its membership; others are dropped. They have a
bounded size, and nothing in them is ever unpickled. With a key (`hetjax.fleet.keys`) connections are authenticated and
encrypted by CURVE.
"""

from __future__ import annotations

import itertools
import json
import logging
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import metadata
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from hetjax.fleet.channel import Buffer, Channel, Mail
from hetjax.fleet.protocol import (
    BEAT,
    BYE,
    DATA,
    HELLO,
    NO_TOKEN,
    REFUSED,
    TABLE,
    Header,
    kind_in_any_version,
    unpacked,
)
from hetjax.fleet.pulse import Pulse
from hetjax.fleet.reception import Reception
from hetjax.fleet.rendezvous import own_address_towards, split_address, url
from hetjax.fleet.sockets import LARGEST, LINGER, REFUSALS, Sockets, local_address

log = logging.getLogger("hetjax")

MessageKey = tuple[int, int, int, int]  # channel, round, piece, sender

_STRAGGLE = 3.0  # seconds in which process 0 waits for others, to refuse them
_DROPPED = 3  # handshakes that process 0 may drop without a word, as it does with another key
_EARLY = 4096  # messages kept of processes that know all others already


class PeerLost(ConnectionError):
    """Another process of the run has ended or stopped answering."""


class Carrier:
    """Joins this process with the others. The constructor returns when all are connected.

    Args:
        index: index of this process.
        count: number of processes.
        coordinator: HOST:PORT at which process 0 is reached.
        bind: HOST:PORT that process 0 listens on; unused in other processes.
        key: CURVE secret key in Z85, the same in all processes; None: the network is trusted.
        description: JSON values that process 0 compares (`alike`), refuses (`problem`, a sentence) or only passes on
            (everything else).
        start_limit: seconds within which all have to connect.
        wait_limit: seconds to wait for a message.
        heartbeat_limit: seconds after which a silent process counts as lost.

    Raises:
        ValueError: if processes disagree; in all processes, with the same sentence.
        TimeoutError: if not all connect within the limit.
        OSError: if process 0 cannot listen.
    """

    transport = "host"
    elastic = 0  # expected number of processes, where members may come and go
    _reception: Reception | None  # in process 0

    def __init__(
        self,
        index: int,
        count: int,
        *,
        coordinator: str,
        bind: str | None,
        key: bytes | None = None,
        description: Mapping[str, Any] | None = None,
        start_limit: float = 60.0,
        wait_limit: float = 600.0,
        heartbeat_limit: float = 20.0,
    ):
        self._prepare(index, count, wait_limit, heartbeat_limit)
        self.coordinator, self._token = coordinator, secrets.token_bytes(8) if index == 0 else NO_TOKEN
        self._sockets = Sockets(key)
        try:
            own = {"version": metadata.version("hetjax"), "processes": count, **(description or {}), **self._open(bind)}
            if index == 0:
                self._reception = Reception(count, coordinator, own, self._token)
            self._start_thread()
            self._meet(own, start_limit)
            self._control = self.channel()
            self.gather(b"", start_limit)
        except BaseException:
            self.close(together=False)
            raise

    def _prepare(self, index: int, count: int, wait_limit: float, heartbeat_limit: float) -> None:
        """Set up what the thread and its users share, before there is any socket."""
        self.index, self.count, self.wait_limit = index, count, wait_limit
        self.generation = 0
        self.others = [peer for peer in range(count) if peer != index]
        self.table: list[dict[str, Any]] = []
        self._token = NO_TOKEN
        self._sending = threading.Lock()  # sockets are used by several threads, one at a time
        self._arrived = threading.Condition()
        self._mail: dict[MessageKey, Mail] = {}
        self._wanted: set[MessageKey] = set()
        self._lost: dict[int, str] = {}
        self._failed: BaseException | None = None  # of the thread
        self._pulse = Pulse(self.others, heartbeat_limit, time.monotonic())
        self._reception = None
        self._answer: tuple[int, Any] | None = None  # in the others: table or refusal
        self._strangers = self._dropped = 0
        self._early: list[Sequence[zmq.Frame]] = []
        self._ending, self._linger = False, 1000  # milliseconds; an error may follow from what was just sent
        self._channels = itertools.count(1)
        self._thread: threading.Thread | None = None
        self._outboxes: dict[int, zmq.Socket] = {}
        self._monitors: dict[zmq.Socket, int | None] = {}  # the process at the other end; None: of the inbox
        self._retired: list[zmq.Socket] = []  # to be closed by the thread, which polls them

    def _start_thread(self) -> None:
        self._thread = threading.Thread(target=self._serve, name="hetjax-carrier", daemon=True)
        self._thread.start()

    @property
    def first(self) -> bool:
        """Whether this is process 0."""
        return self.index == 0

    # -- messages --

    def channel(self) -> Channel:
        """A new channel; all processes open theirs in the same order."""
        return Channel(self, next(self._channels))

    def send(self, to: int, channel: int, round_: int, piece: int, buffers: Sequence[Buffer]) -> zmq.MessageTracker:
        """Send buffers to a process without copying them; they must not change until the tracker is done.

        Raises:
            ValueError: if a buffer is longer than LARGEST: the receiver would close the connection.
        """
        if (longest := max((memoryview(buffer).nbytes for buffer in buffers), default=0)) > LARGEST:
            raise ValueError(f"A message of {longest:,} bytes exceeds the limit of {LARGEST:,}: send it in pieces.")
        header = self._header(DATA, channel, round_, piece)
        with self._sending:
            tracker = self._outboxes[to].send_multipart([header, *buffers], copy=False, track=True)
        assert tracker is not None
        return tracker

    def receive(self, sender: int, channel: int, round_: int, piece: int, limit: float | None = None) -> Mail:
        """Wait for a message.

        Raises:
            PeerLost: if the sender has ended or stopped answering.
            TimeoutError: if the message did not arrive within the limit.
            RuntimeError: if the carrier itself failed.
        """
        _, mail = self._await([(channel, round_, piece, sender)], limit, take=True)
        assert mail is not None
        return mail

    def take(self, sender: int, channel: int, round_: int, piece: int) -> Mail | None:
        """A message if it has arrived."""
        with self._arrived:
            return self._mail.pop((channel, round_, piece, sender), None)

    def first_arrived(self, messages: Sequence[tuple[int, int]], channel: int, round_: int) -> tuple[int, int]:
        """Wait for one of several messages of a round, with the errors of `receive` for the first of them.

        Args:
            messages: sender and piece of each.
            channel: their channel.
            round_: their round.

        Returns:
            The first one that has arrived; `receive` or `take` takes it.
        """
        keys = [(channel, round_, piece, sender) for sender, piece in messages]
        (_, _, piece, sender), _ = self._await(keys, None, take=False)
        return sender, piece

    def _await(self, keys: Sequence[MessageKey], limit: float | None, take: bool) -> tuple[MessageKey, Mail | None]:
        """Wait for one of these messages; the first that has arrived, and its content if it is taken."""
        limit, sender = self.wait_limit if limit is None else limit, keys[0][-1]
        deadline = time.monotonic() + limit
        with self._arrived:
            while (found := self._found(keys)) is None:
                self._check_thread()
                if sender in self._lost:
                    first = next(iter(self._lost))  # the others may have ended because of it
                    raise PeerLost(f"Process {first} {self._lost[first]}.")
                if (left := deadline - time.monotonic()) <= 0:
                    raise TimeoutError(
                        f"Process {sender} sent nothing for {limit:g} s, although it answers: it may compute for "
                        "longer than the others, or run another program. Raise wait_limit if steps can take that long."
                    )
                self._wanted.update(keys)
                self._arrived.wait(left)
            return found, self._mail.pop(found) if take else None

    def _found(self, keys: Sequence[MessageKey]) -> MessageKey | None:
        """The first of these messages that has arrived, with the lock held; then none of them is waited for."""
        found = next((key for key in keys if key in self._mail), None)
        if found is not None:
            self._wanted.difference_update(keys)
        return found

    def latest(self, sender: int, channel: int, round_: int, piece: int) -> Mail | None:
        """The newest message of this number up to a round, if any has arrived; older ones are dropped."""
        with self._arrived:
            found = [key for key in self._mail if key[0] == channel and key[2:] == (piece, sender) and key[1] <= round_]
            mails = {key[1]: self._mail.pop(key) for key in found}
        return mails[max(mails)] if mails else None

    def gather(self, content: bytes, limit: float | None = None) -> list[bytes]:
        """The content of every process, in process order. Collective."""
        for peer in self.others:
            self._control.send_long(peer, content)
        gathered = [content if peer == self.index else self._control.receive_long(peer, limit)
                    for peer in range(self.count)]  # fmt: skip
        self._control.round += 1
        return gathered

    def collect(self, content: bytes) -> list[bytes] | None:
        """The content of every process, in process 0; None in the others. Collective."""
        collected = None
        if self.index == 0:
            collected = [content, *(self._control.receive_long(peer) for peer in self.others)]
        else:
            self._control.send_long(0, content)
        self._control.round += 1
        return collected

    def broadcast(self, content: bytes | None) -> bytes:
        """The content of process 0. Collective."""
        if self.index == 0:
            assert content is not None
            for peer in self.others:
                self._control.send_long(peer, content)
        else:
            content = self._control.receive_long(0)
        self._control.round += 1
        return content

    def close(self, together: bool) -> None:
        """End the carrier; `together`: after all processes have come this far, up to the wait limit."""
        if self._ending:
            return
        if together:
            with suppress(PeerLost, TimeoutError, RuntimeError):
                self.gather(b"")
            with self._sending:
                for outbox in self._outboxes.values():
                    with suppress(zmq.ZMQError):
                        outbox.send(self._header(BYE), zmq.NOBLOCK)
            with self._arrived:  # who says goodbye has got everything; then nothing has to be delivered any more
                all_left = self._arrived.wait_for(lambda: not self._pulse.present, _STRAGGLE)
            self._linger = 0 if all_left else LINGER
        self._ending = True
        if self._thread is not None and self._thread is not threading.current_thread():
            self._wake_thread()
            self._thread.join(5.0)
        self._sockets.close(self._linger)

    # -- meeting --

    def _open(self, bind: str | None) -> dict[str, Any]:
        """Listen, and describe where."""
        self._open_inbox()
        local = local_address()
        try:
            if self.index == 0:
                assert bind is not None
                self._inbox.bind(url(*split_address(bind)))
                address = url(*split_address(self.coordinator))
            else:
                host = own_address_towards(self.coordinator)
                address = url(host, self._inbox.bind_to_random_port(url(host, None)))
                self._connect(0, url(*split_address(self.coordinator)))
            if local:
                self._inbox.bind(local["local"])
        except zmq.ZMQError as error:
            raise OSError(f"Process {self.index} cannot listen on {bind or self.coordinator}: {error}.") from error
        return {"address": address, **local}

    def _open_inbox(self) -> None:
        self._inbox = self._sockets.open(zmq.ROUTER, server=True)
        self._monitors[self._sockets.monitor(self._inbox, REFUSALS)] = None
        self._waker, self._wake = self._sockets.context.socket(zmq.PUSH), self._sockets.context.socket(zmq.PULL)
        self._wake.bind("inproc://wake")
        self._waker.connect("inproc://wake")

    def _connect(self, peer: int, address: str) -> None:
        outbox = self._sockets.open(zmq.DEALER)
        events = zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | REFUSALS
        monitor = self._sockets.monitor(outbox, events)
        outbox.connect(address)
        with self._sending:
            self._outboxes[peer], self._monitors[monitor] = outbox, peer

    def _meet(self, own: dict[str, Any], limit: float) -> None:
        """Exchange descriptions through process 0, then connect to everyone."""
        kind, content = self._receive_guests(limit) if self._reception is not None else self._ask(own, limit)
        if kind == REFUSED:
            raise ValueError(content)
        try:
            token, table = bytes.fromhex(content["token"]), content["table"]
            same_host = lambda row: "host" in row and row["host"] == own.get("host")
            addresses = [row["local"] if same_host(row) else row["address"] for row in table]
        except (TypeError, ValueError, KeyError) as error:
            raise ValueError(f"What answers at {self.coordinator} is not process 0 of this run.") from error
        self._connect_others(addresses)
        self._token, self.table = token, table
        self._wake_thread()

    def _connect_others(self, addresses: Sequence[str]) -> None:
        """Connect to all others anew."""
        with self._sending:  # the connection of the hello may have been another one
            self._retired += self._outboxes.values()
            self._monitors = {monitor: peer for monitor, peer in self._monitors.items() if peer is None}
            self._outboxes = {}
        for peer in self.others:
            self._connect(peer, addresses[peer])
        self._pulse = Pulse(self.others, self._pulse.limit, time.monotonic(), bool(self.elastic))

    def _receive_guests(self, limit: float) -> tuple[int, Any]:
        """In process 0: wait for all others; the answer to them."""
        reception = self._reception
        assert reception is not None
        with self._arrived:
            met = self._arrived.wait_for(lambda: reception.answer is not None or self._failed is not None, limit)
            self._check_thread()
            if not met:
                reception.give_up(limit)
            assert reception.answer is not None
            kind, content = reception.answer
        self._wake_thread()  # sends what is not sent yet
        if kind == REFUSED:
            with self._arrived:  # those who come only now learn it too
                done = lambda: not reception.pending and (reception.complete or not met)
                self._arrived.wait_for(done, min(limit, _STRAGGLE))
            self._linger = LINGER
            if not met:
                raise TimeoutError(content)
        return kind, content

    def _ask(self, own: dict[str, Any], limit: float) -> tuple[int, Any]:
        """In the other processes: process 0's answer."""
        with self._sending:
            self._outboxes[0].send_multipart([self._header(HELLO), json.dumps(own).encode()])
        with self._arrived:
            known = lambda: self._answer is not None or self._lost or self._failed is not None
            met = self._arrived.wait_for(known, limit)
            self._check_thread()
            if self._answer is not None:
                return self._answer
            if met:
                raise ValueError(f"Process 0 at {self.coordinator} {self._lost[0]}.")
            raise TimeoutError(
                f"Process 0 at {self.coordinator} did not answer process {self.index} within {limit:g} s: not all "
                f"{self.count} processes have connected, or its key differs. Check that all were started."
            )

    def _check_thread(self) -> None:
        if self._failed is not None:
            raise RuntimeError(
                f"The carrier of process {self.index} failed: {type(self._failed).__name__}: {self._failed}"
            ) from self._failed

    def _wake_thread(self) -> None:
        with self._sending, suppress(zmq.ZMQError):
            self._waker.send(b"", zmq.NOBLOCK)

    # -- in the thread --

    def _serve(self) -> None:
        try:
            self._loop()
        except BaseException as error:
            with self._arrived:
                self._failed = error
                self._arrived.notify_all()

    def _loop(self) -> None:
        poller = self._poller()
        pause = max(50, int(min(self._pulse.limit / 8, 1.0) * 1000))
        while not self._ending:
            for socket, _ in poller.poll(pause if not self._pulse.hurried else 50):
                if socket is self._inbox:
                    self._read_inbox()
                elif socket is self._sockets.gate:
                    self._sockets.admit()
                elif socket is self._wake:
                    self._wake.recv()
                    self._send_letters()
                    early, self._early = self._early, []
                    for frames in early:
                        self._file(frames)
                    poller = self._poller()
                    break  # what was polled may be closed
                elif socket.type == zmq.PAIR:
                    self._watch(socket, recv_monitor_message(socket)["event"])
                else:
                    self._read_answer(socket)
            self._check_peers(time.monotonic())

    def _poller(self) -> zmq.Poller:
        """Poll everything that can be read; outboxes only until process 0 has answered."""
        with self._sending:
            retired, self._retired = self._retired, []
            outboxes = [] if self.table else self._outboxes.values()
            gate = [] if self._sockets.gate is None else [self._sockets.gate]
            sockets = [self._inbox, self._wake, *gate, *self._monitors, *outboxes]
        for socket in retired:
            self._sockets.retire(socket)
        poller = zmq.Poller()
        for socket in sockets:
            poller.register(socket, zmq.POLLIN)
        return poller

    def _read_inbox(self) -> None:
        for _ in range(64):  # then heartbeats have their turn
            try:
                visitor, *frames = self._inbox.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            if self._token != NO_TOKEN:
                self._file(frames, visitor.bytes)
            elif len(self._early) < _EARLY:
                self._early.append(frames)  # of a process that knows all others already

    def _file(self, frames: Sequence[zmq.Frame], visitor: bytes = b"") -> None:
        first = bytes(frames[0].buffer) if frames else b""
        if (common := kind_in_any_version(first)) is not None and common[0] == HELLO and len(frames) == 2:
            self._note_hello(unpacked(first), common[1], bytes(frames[1].buffer), visitor)
            return
        header = unpacked(first)
        if header is None or not self._belongs(header):
            self._turn_away("A message that does not belong to this run was dropped; further ones are, too.")
            return
        self._pulse.heard(header.sender, time.monotonic())
        if header.kind == BYE:
            with self._arrived:
                self._pulse.goodbye(header.sender)
                self._arrived.notify_all()
        elif header.kind == DATA:
            key = (header.channel, header.round, header.piece, header.sender)
            with self._arrived:
                self._mail[key] = [frame.buffer for frame in frames[1:]]
                if key in self._wanted:
                    self._arrived.notify_all()

    def _turn_away(self, message: str) -> None:
        self._strangers += 1
        if self._strangers == 1:
            log.warning(message)

    def _note_hello(self, header: Header | None, version: str, content: bytes, visitor: bytes) -> None:
        if self._reception is not None:
            with self._arrived:
                self._reception.arrive(None if header is None else header.sender, version, content, visitor)
                self._send_letters()

    def _send_letters(self) -> None:
        if self._reception is not None:
            with self._arrived:
                for visitor, kind, content in self._reception.letters():
                    self._inbox.send_multipart([visitor, self._header(kind), content])
                self._arrived.notify_all()

    def _read_answer(self, outbox: zmq.Socket) -> None:
        """Process 0's answer to a hello comes back on the connection that brought it."""
        first, *content = outbox.recv_multipart()
        kind, _ = kind_in_any_version(first) or (None, "")
        if len(content) == 1 and (kind == REFUSED or (kind == TABLE and unpacked(first) is not None)):
            with suppress(ValueError, RecursionError), self._arrived:
                self._answer = kind, json.loads(content[0])
                self._arrived.notify_all()

    def _watch(self, monitor: zmq.Socket, event: int) -> None:
        with self._arrived:
            if monitor not in self._monitors:
                return  # of a connection that was replaced
            peer = self._monitors[monitor]
            if peer is None:
                self._turn_away("A connection was refused: its key differs, or only one of the two sides has a key.")
            elif event == zmq.EVENT_DISCONNECTED:
                self._pulse.disconnected(peer, time.monotonic())
                self._arrived.notify_all()
            elif not self.table:
                self._dropped += 1
                if event & REFUSALS or self._dropped == _DROPPED:
                    self._lost[peer] = (
                        "refused the connection: its key differs, or only one of the two has a key. Give all processes "
                        "the same key file"
                    )
                    self._arrived.notify_all()

    def _check_peers(self, now: float) -> None:
        if not self.table:
            return
        if self._pulse.beat_is_due(now):
            with self._sending:
                for outbox in self._outboxes.values():
                    with suppress(zmq.Again):
                        outbox.send(self._header(BEAT), zmq.NOBLOCK)
        with self._arrived:  # an entry into another generation changes who is who
            if (lost := self._pulse.lost(now)) and not self._ending:
                self._lost |= {peer: reason for peer, reason in lost.items() if peer not in self._lost}
                self._arrived.notify_all()

    def _header(self, kind: int, channel: int = 0, round_: int = 0, piece: int = 0) -> bytes:
        return Header(kind, self._token, self.index, self.generation, channel, round_, piece).packed()

    def _belongs(self, header: Header) -> bool:
        return (header.token, header.generation) == (self._token, self.generation) and header.sender in self._pulse
