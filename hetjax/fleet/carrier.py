"""The carrier: messages between the processes of a run over ZeroMQ, by way of their hosts.

Every process keeps its own JAX backend; what it exchanges with the others are host buffers. Each process has one inbox,
to which all others connect. A thread files what arrives by (channel, round, piece, sender); whoever waits for a message
takes it from there. Buffers are sent without a copy, and every wait has a limit and names the process it waits for.

Processes meet at process 0, which compares what they are and gives all of them the table of addresses. Messages carry
the token of the run and the generation of its membership; others are dropped. They have a bounded size, and nothing in
them is ever unpickled. With a key (`hetjax.fleet.keys`) connections are authenticated and encrypted by CURVE.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import secrets
import struct
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from hetjax.fleet.rendezvous import own_address_towards, split_address, url

log = logging.getLogger("hetjax")

Buffer = Any  # bytes, memoryview, or a contiguous NumPy array
Mail = list[memoryview]

LARGEST = 2**26  # bytes of one frame; longer contents are sent in pieces
_CHUNK = 2**24
_HEADER = struct.Struct("<4sB8sHIIQI")  # magic, kind, token, sender, generation, channel, round, piece
_MAGIC = b"HJX1"  # the version of this protocol
_HELLO, _TABLE, _REFUSED, _DATA, _BEAT, _BYE = range(6)
_NO_TOKEN = bytes(8)
_GRACE = 0.3  # seconds between a closed connection and the goodbye that may still arrive
_LINGER = 5000  # milliseconds in which messages already sent are still delivered after closing
_AUTH_FAILED = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL


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
        description: JSON values that process 0 compares (`alike`) or only passes on (everything else).
        start_limit: seconds within which all have to connect.
        wait_limit: seconds to wait for a message.
        heartbeat_limit: seconds after which a silent process counts as lost.

    Raises:
        ValueError: if processes disagree; in all processes, with the same sentence.
        TimeoutError: if not all connect within the limit.
    """

    transport = "host"

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
        self.index, self.count, self.wait_limit = index, count, wait_limit
        self.coordinator, self.generation = coordinator, 0
        self.others = [peer for peer in range(count) if peer != index]
        self._beat_limit, self._next_beat = heartbeat_limit, 0.0
        self._token = secrets.token_bytes(8) if index == 0 else _NO_TOKEN
        self._key, self._context = key, zmq.Context(io_threads=1)
        self._sending = threading.Lock()  # sockets are used by several threads, one at a time
        self._arrived = threading.Condition()
        self._mail: dict[tuple[int, int, int, int], Mail] = {}
        self._wanted: set[tuple[int, int, int, int]] = set()
        self._lost: dict[int, str] = {}
        self._closed_by: dict[int, float] = {}  # peers that closed their connection, and when
        self._goodbyes: set[int] = set()
        self._heard = dict.fromkeys(self.others, time.monotonic())
        self._hello: dict[int, dict[str, Any]] = {}  # in process 0
        self._visitors: dict[int, bytes] = {}  # in process 0: where to answer a hello
        self._answer: tuple[int, Any] | None = None  # table or refusal
        self._strangers = 0
        self._early: list[Sequence[zmq.Frame]] = []
        self._ending = False
        self._channels = itertools.count(1)
        self.table: list[dict[str, Any]] = []
        try:
            own = self._open_inbox(bind)
            self._thread = threading.Thread(target=self._serve, name="hetjax-carrier", daemon=True)
            self._thread.start()
            self._meet({"version": metadata.version("hetjax"), "processes": count, **(description or {}), **own},
                       start_limit)  # fmt: skip
            self._control = self.channel()
            self.gather(b"", start_limit)
        except BaseException:
            self.close(together=False)
            raise

    # -- messages --

    def channel(self) -> Channel:
        """A new channel; all processes open theirs in the same order."""
        return Channel(self, next(self._channels))

    def send(self, to: int, channel: int, round_: int, piece: int, buffers: Sequence[Buffer]) -> zmq.MessageTracker:
        """Send buffers to a process without copying them; they must not change until the tracker is done."""
        header = self._header(_DATA, channel, round_, piece)
        with self._sending:
            return self._outboxes[to].send_multipart([header, *buffers], copy=False, track=True)

    def receive(self, sender: int, channel: int, round_: int, piece: int, limit: float | None = None) -> Mail:
        """Wait for a message.

        Raises:
            PeerLost: if the sender has ended or stopped answering.
            TimeoutError: if the message did not arrive within the limit.
        """
        key, limit = (channel, round_, piece, sender), self.wait_limit if limit is None else limit
        deadline = time.monotonic() + limit
        with self._arrived:
            while key not in self._mail:
                if sender in self._lost:
                    raise PeerLost(f"Process {sender} {self._lost[sender]}.")
                if (left := deadline - time.monotonic()) <= 0:
                    raise TimeoutError(
                        f"Process {sender} sent nothing for {limit:g} s, although it answers: it may compute for "
                        "longer than the others, or run another program. Raise wait_limit if steps can take that long."
                    )
                self._wanted.add(key)
                self._arrived.wait(left)
            self._wanted.discard(key)
            return self._mail.pop(key)

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
            with suppress(PeerLost, TimeoutError):
                self.gather(b"")
            with self._sending:
                for outbox in self._outboxes.values():
                    outbox.send(self._header(_BYE), zmq.NOBLOCK)
        self._ending = True
        if getattr(self, "_thread", None) is not None and self._thread is not threading.current_thread():
            with self._sending:
                self._waker.send(b"")
            self._thread.join(5.0)
        self._context.destroy(linger=_LINGER if together else 0)

    # -- meeting --

    def _open_inbox(self, bind: str | None) -> dict[str, Any]:
        """Listen, and describe where."""
        self._inbox = self._socket(zmq.ROUTER, server=True)
        self._waker, self._wake = self._context.socket(zmq.PUSH), self._context.socket(zmq.PULL)
        self._wake.bind("inproc://wake")
        self._waker.connect("inproc://wake")
        self._outboxes: dict[int, zmq.Socket] = {}
        self._monitors: dict[zmq.Socket, int] = {}
        self._retired: list[zmq.Socket] = []  # to be closed by the thread, which polls them
        if self.index == 0:
            assert bind is not None
            self._inbox.bind(url(*split_address(bind)))
        else:
            host = own_address_towards(self.coordinator)
            port = self._inbox.bind_to_random_port(url(host, None))
            self._connect(0, url(*split_address(self.coordinator)))
            return {"address": url(host, port), **self._local_address()}
        return {"address": url(*split_address(self.coordinator)), **self._local_address()}

    def _local_address(self) -> dict[str, str]:
        """An abstract Unix socket for processes of the same host: half the CPU time of TCP, and no file is left."""
        if (host := _host_identity()) is None:
            return {}
        address = f"ipc://@hetjax-{secrets.token_hex(12)}"
        self._inbox.bind(address)
        return {"host": host, "local": address}

    def _connect(self, peer: int, address: str) -> None:
        outbox = self._socket(zmq.DEALER)
        monitor = outbox.get_monitor_socket(zmq.EVENT_DISCONNECTED | _AUTH_FAILED)
        outbox.connect(address)
        with self._sending:
            self._outboxes[peer], self._monitors[monitor] = outbox, peer

    def _socket(self, kind: int, server: bool = False) -> zmq.Socket:
        socket = self._context.socket(kind)
        socket.set(zmq.LINGER, _LINGER)
        socket.set(zmq.SNDHWM, 0)
        socket.set(zmq.RCVHWM, 0)
        socket.set(zmq.MAXMSGSIZE, LARGEST)
        if self._key is not None:
            public = zmq.curve_public(self._key)
            if server:
                socket.set(zmq.CURVE_SERVER, 1)
                socket.set(zmq.ZAP_DOMAIN, b"hetjax")
            else:
                socket.set(zmq.CURVE_SERVERKEY, public)
                socket.set(zmq.CURVE_PUBLICKEY, public)
            socket.set(zmq.CURVE_SECRETKEY, self._key)
        return socket

    def _meet(self, own: dict[str, Any], limit: float) -> None:
        """Exchange descriptions through process 0, then connect to everyone."""
        if self.index == 0:
            with self._arrived:
                self._hello[0] = own
                self._answer = self._compared()
        else:
            with self._sending:
                self._outboxes[0].send_multipart([self._header(_HELLO), json.dumps(own).encode()])
        with self._arrived:
            met = self._arrived.wait_for(lambda: self._answer is not None or self._lost, limit)
            if not met and self.index == 0:
                missing = ", ".join(str(peer) for peer in range(self.count) if peer not in self._hello)
                self._answer = _REFUSED, (
                    f"Not all {self.count} processes connected to {self.coordinator} within {limit:g} s: process "
                    f"{missing} is missing. Check that all were started, with the same number of processes, "
                    "different indices and the same key."
                )  # fmt: skip
            elif not met:
                raise TimeoutError(
                    f"Process 0 at {self.coordinator} did not answer process {self.index} within {limit:g} s: not all "
                    f"{self.count} processes have connected, or its key differs. Check that all were started."
                )
            elif self._answer is None:
                raise ValueError(f"Process 0 at {self.coordinator} {self._lost[0]}.")
            kind, content = self._answer
        if self.index == 0:
            with self._sending:
                self._waker.send(b"answer")
            if kind == _REFUSED:  # a moment to deliver it
                self._thread.join(0.2)
        if kind == _REFUSED:
            raise (ValueError if met else TimeoutError)(content)
        self._token, table = bytes.fromhex(content["token"]), content["table"]
        with self._sending:  # the connection of the hello may have been another one
            self._retired, self._monitors = [*self._outboxes.values(), *self._monitors], {}
        same_host = lambda row: "host" in row and row["host"] == own.get("host")
        for peer in self.others:
            self._connect(peer, table[peer]["local"] if same_host(table[peer]) else table[peer]["address"])
        self.table = table
        with self._sending:
            self._waker.send(b"connected")

    def _compared(self) -> tuple[int, Any] | None:
        """Process 0's answer when all have come, or when one does not fit; None before."""
        mine = self._hello[0]
        for peer, theirs in sorted(self._hello.items()):
            for name in ("version", "processes", *mine.get("alike", {})):
                a, b = (row.get(name, row.get("alike", {}).get(name)) for row in (mine, theirs))
                if a != b:
                    return _REFUSED, (
                        f"Process {peer} differs from process 0 in its {name.replace('_', ' ')}: {b} instead of {a}. "
                        "Start all processes with the same hetjax and the same flags."
                    )
        if len(self._hello) < self.count:
            return None
        table = [self._hello[peer] for peer in range(self.count)]
        return _TABLE, {"token": self._token.hex(), "table": table}

    # -- in the thread --

    def _serve(self) -> None:
        zap = None
        if self._key is not None:
            zap = self._context.socket(zmq.REP)
            zap.bind("inproc://zeromq.zap.01")
        poller = self._poller(zap)
        pause = max(50, int(min(self._beat_limit / 8, 1.0) * 1000))
        while not self._ending:
            with suppress(zmq.ZMQError):
                for socket, _ in poller.poll(pause if not self._closed_by else 50):
                    if socket is self._inbox:
                        self._read_inbox()
                    elif socket is zap:
                        self._authenticate(zap)
                    elif socket is self._wake:
                        if self._wake.recv() == b"answer":
                            self._send_answer()
                        early, self._early = self._early, []
                        for frames in early:
                            self._file(frames)
                        poller = self._poller(zap)
                    elif socket in self._monitors:
                        self._watch(self._monitors[socket], recv_monitor_message(socket)["event"])
                    else:
                        self._read_answer(socket)
            self._check_peers(time.monotonic())

    def _poller(self, zap: zmq.Socket | None) -> zmq.Poller:
        """Poll everything that can be read; outboxes only until process 0 has answered."""
        with self._sending:
            retired, self._retired = self._retired, []
            outboxes = [] if self.table else self._outboxes.values()
            sockets = [self._inbox, self._wake, *([] if zap is None else [zap]), *self._monitors, *outboxes]
        for socket in retired:
            socket.close(0)
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
            if self._token == _NO_TOKEN:
                self._early.append(frames)  # of a process that knows all others already
            else:
                self._file(frames, visitor.bytes)

    def _file(self, frames: Sequence[zmq.Frame], visitor: bytes = b"") -> None:
        header = self._parsed(frames[0].buffer if frames else b"")
        if header is None:
            self._strangers += 1
            if self._strangers == 1:
                log.warning("A message that does not belong to this run was dropped; further ones are, too.")
            return
        kind, sender, channel, round_, piece = header
        if kind == _HELLO:
            self._note_hello(sender, visitor, frames)
            return
        self._heard[sender] = time.monotonic()
        if kind == _BYE:
            self._goodbyes.add(sender)
        elif kind == _DATA:
            key = (channel, round_, piece, sender)
            with self._arrived:
                self._mail[key] = [frame.buffer for frame in frames[1:]]
                if key in self._wanted:
                    self._arrived.notify_all()

    def _note_hello(self, sender: int, visitor: bytes, frames: Sequence[zmq.Frame]) -> None:
        try:
            theirs = json.loads(bytes(frames[1].buffer)) if len(frames) == 2 and len(frames[1]) < 2**16 else None
        except ValueError:
            theirs = None
        if self.index != 0 or not isinstance(theirs, dict):
            return
        with self._arrived:
            if sender in self._hello or sender >= self.count:
                self._answer = _REFUSED, (
                    f"Process {sender} of {theirs.get('processes')} connected "
                    + (f"twice to {self.coordinator}: give every process its own index."
                       if sender in self._hello
                       else f"to {self.coordinator}, where {self.count} processes are expected. Start all with the "
                       "same number.")
                )  # fmt: skip
                self._visitors[-1 - sender] = visitor
            else:
                self._hello[sender], self._visitors[sender] = theirs, visitor
                if 0 in self._hello:
                    self._answer = self._answer or self._compared()
            self._arrived.notify_all()

    def _send_answer(self) -> None:
        assert self._answer is not None
        kind, content = self._answer
        for visitor in self._visitors.values():
            self._inbox.send_multipart([visitor, self._header(kind), json.dumps(content).encode()])

    def _read_answer(self, outbox: zmq.Socket) -> None:
        """Process 0's answer to a hello comes back on the connection that brought it."""
        header, *content = outbox.recv_multipart()
        parsed = _HEADER.unpack(header) if len(header) == _HEADER.size else (b"",)
        if parsed[0] == _MAGIC and parsed[1] in (_TABLE, _REFUSED) and content:
            with self._arrived:
                self._answer = parsed[1], json.loads(content[0])
                self._arrived.notify_all()

    def _authenticate(self, zap: zmq.Socket) -> None:
        """Admit only clients that own the same key (ZeroMQ RFC 27)."""
        version, request, _domain, _address, _identity, mechanism, *credentials = zap.recv_multipart()
        assert self._key is not None
        public = zmq.curve_public(self._key)
        known = mechanism == b"CURVE" and credentials and z85.encode(credentials[0]) == public
        status, text = (b"200", b"OK") if known else (b"400", b"another key")
        zap.send_multipart([version, request, status, text, b"", b""])

    def _watch(self, peer: int, event: int) -> None:
        if event == zmq.EVENT_DISCONNECTED:
            self._closed_by.setdefault(peer, time.monotonic())
        elif event & _AUTH_FAILED and not self.table:
            with self._arrived:
                self._lost[peer] = (
                    "refused the connection: its key differs, or only one of the two has a key. Give all processes "
                    "the same key file"
                )
                self._arrived.notify_all()

    def _check_peers(self, now: float) -> None:
        if not self.table:
            self._closed_by.clear()
            return
        for peer, closed in list(self._closed_by.items()):
            if now - closed > _GRACE:
                del self._closed_by[peer]
                self._lose(peer, "ended, or its connection broke")
        if now < self._next_beat:
            return
        self._next_beat = now + self._beat_limit / 4
        with self._sending:
            for outbox in self._outboxes.values():
                with suppress(zmq.Again):
                    outbox.send(self._header(_BEAT), zmq.NOBLOCK)
        for peer, heard in self._heard.items():
            if now - heard > self._beat_limit:
                self._lose(peer, f"has not answered for {self._beat_limit:g} s: it hangs, or its connection broke")

    def _lose(self, peer: int, reason: str) -> None:
        if peer in self._goodbyes or self._ending:
            return
        with self._arrived:
            self._lost.setdefault(peer, reason)
            self._arrived.notify_all()

    # -- headers --

    def _header(self, kind: int, channel: int = 0, round_: int = 0, piece: int = 0) -> bytes:
        return _HEADER.pack(_MAGIC, kind, self._token, self.index, self.generation, channel, round_, piece)

    def _parsed(self, header: Any) -> tuple[int, int, int, int, int] | None:
        if len(header) != _HEADER.size:
            return None
        magic, kind, token, sender, generation, channel, round_, piece = _HEADER.unpack(header)
        known = kind == _HELLO or (token == self._token and generation == self.generation and sender in self._heard)
        return (kind, sender, channel, round_, piece) if magic == _MAGIC and known else None


class Channel:
    """Messages of one purpose, in rounds; a channel is used by one thread at a time."""

    def __init__(self, carrier: Carrier, number: int):
        self.carrier, self.number, self.round = carrier, number, 0

    def send(self, to: int, piece: int, buffers: Sequence[Buffer]) -> zmq.MessageTracker:
        """Send a piece of this round; the buffers must not change until the tracker is done."""
        return self.carrier.send(to, self.number, self.round, piece, buffers)

    def receive(self, sender: int, piece: int, limit: float | None = None) -> Mail:
        """Wait for a piece of this round."""
        return self.carrier.receive(sender, self.number, self.round, piece, limit)

    def send_long(self, to: int, content: bytes) -> None:
        """Send bytes of any length as piece 0 and following ones."""
        view = memoryview(content)
        self.send(to, 0, [len(view).to_bytes(8, "little"), view[:_CHUNK]])
        for piece, start in enumerate(range(_CHUNK, len(view), _CHUNK), start=1):
            self.send(to, piece, [view[start : start + _CHUNK]])

    def receive_long(self, sender: int, limit: float | None = None) -> bytes:
        """Wait for bytes sent by `send_long`."""
        size, first = self.receive(sender, 0, limit)
        pieces = -(-int.from_bytes(size, "little") // _CHUNK)
        return b"".join([first, *(self.receive(sender, piece, limit)[0] for piece in range(1, pieces))])


def _host_identity() -> str | None:
    """What processes that can reach each other by abstract Unix sockets have in common; None where there are none."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/net')}"
    except OSError:
        return None
