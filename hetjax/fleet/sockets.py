"""ZeroMQ sockets of a process: bounded messages, optionally CURVE with one key for the whole fleet."""

from __future__ import annotations

import itertools
import os
import secrets
from pathlib import Path

import zmq
from zmq.utils import z85

LARGEST = 2**26  # bytes of one frame; longer contents are sent in pieces
LINGER = 5000  # milliseconds in which messages already sent are still delivered after closing
REFUSALS = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL


class Sockets:
    """The ZeroMQ context of a process; with a key its sockets are authenticated and encrypted.

    Args:
        key: CURVE secret key in Z85, the same in all processes; None: the network is trusted.
    """

    def __init__(self, key: bytes | None):
        self.context = zmq.Context(io_threads=1)
        self._key, self._public = key, b"" if key is None else zmq.curve_public(key)
        self._monitored: dict[zmq.Socket, zmq.Socket] = {}  # the monitor of each
        self._names = itertools.count()
        self.gate: zmq.Socket | None = None
        if key is not None:  # before the first server, which would let everyone in until then (ZeroMQ RFC 27)
            self.gate = self.context.socket(zmq.REP)
            self.gate.bind("inproc://zeromq.zap.01")

    def open(self, kind: int, server: bool = False) -> zmq.Socket:
        """A socket to processes."""
        socket = self.context.socket(kind)
        socket.set(zmq.LINGER, LINGER)
        socket.set(zmq.SNDHWM, 0)
        socket.set(zmq.RCVHWM, 0)
        socket.set(zmq.MAXMSGSIZE, LARGEST)
        if self._key is not None:
            if server:
                socket.set(zmq.CURVE_SERVER, 1)
                socket.set(zmq.ZAP_DOMAIN, b"hetjax")
            else:
                socket.set(zmq.CURVE_SERVERKEY, self._public)
                socket.set(zmq.CURVE_PUBLICKEY, self._public)
            socket.set(zmq.CURVE_SECRETKEY, self._key)
        return socket

    def monitor(self, socket: zmq.Socket, events: int) -> zmq.Socket:
        """A socket that receives the events of a socket's connections."""
        # By default the name has the number of a file, which a socket that is being closed may still use.
        self._monitored[socket] = socket.get_monitor_socket(events, f"inproc://monitor-{next(self._names)}")
        return self._monitored[socket]

    def retire(self, socket: zmq.Socket) -> None:
        """Close a monitored socket at once, and its monitor.

        The order matters: an event for a monitor that is closed already blocks ZeroMQ's thread for ever, and with it
        all sockets of this context. A closed socket still has events for a while, so they are turned off first.
        """
        monitor = self._monitored.pop(socket)
        socket.disable_monitor()
        socket.close(0)
        monitor.close(0)

    def admit(self) -> None:
        """Answer one question of the gate: only clients that own the same key are let in."""
        assert self.gate is not None
        version, request, _domain, _address, _identity, mechanism, *credentials = self.gate.recv_multipart()
        known = mechanism == b"CURVE" and credentials and z85.encode(credentials[0]) == self._public
        status, text = (b"200", b"OK") if known else (b"400", b"another key")
        self.gate.send_multipart([version, request, status, text, b"", b""])

    def close(self, linger: int) -> None:
        """Close all sockets; `linger`: milliseconds for messages already sent."""
        while self._monitored:  # see `retire`
            self._monitored.popitem()[0].disable_monitor()
        self.context.destroy(linger=linger)


def local_address() -> dict[str, str]:
    """An abstract Unix socket for processes of the same host: half the CPU time of TCP, and no file is left."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        host = f"{boot} {os.readlink('/proc/self/ns/net')}"
    except OSError:  # there are none on this platform
        return {}
    return {"host": host, "local": f"ipc://@hetjax-{secrets.token_hex(12)}"}
