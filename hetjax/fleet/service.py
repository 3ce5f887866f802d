"""The rendezvous of an elastic fleet as a service: a thread with a socket around the rules of `registry`."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from hetjax.fleet.keys import NO_KEY
from hetjax.fleet.protocol import NO_TOKEN, REFUSED, STATUS, Header, kind_in_any_version, unpacked
from hetjax.fleet.registry import Patience, Registry
from hetjax.fleet.rendezvous import check_free, is_loopback, split_address, url
from hetjax.fleet.sockets import REFUSALS, Sockets

_LONGEST = 2**22  # bytes of a status
_TICK = 50  # milliseconds


class Rendezvous:
    """Serves until it is closed.

    Args:
        bind: HOST:PORT to listen on.
        processes: number of processes with which the run starts.
        key: CURVE secret key in Z85, the same in all processes; None: the network is trusted.
        min_members: the run stops when fewer are left.
        limits: when members are given up.
        state: file that a restarted rendezvous goes on from; None: it asks the members.
        log: gets sentences for the user.

    Raises:
        OSError: if it cannot listen, or the file cannot be used.
        ValueError: if the file holds no such state.
    """

    def __init__(
        self,
        bind: str,
        processes: int,
        *,
        key: bytes | None = None,
        min_members: int = 1,
        limits: Patience | None = None,
        state: Path | None = None,
        log: Callable[[str], None] = lambda message: None,
    ):
        check_free(bind)
        self._state, self._log, self._saved = state, log, _read(state)
        self._registry = Registry(
            processes, time.monotonic(), min_members=min_members, limits=limits or Patience(), saved=self._saved or None
        )
        self._reported: set[str] = set()  # kinds of strangers
        self._sockets = Sockets(key)
        try:
            self._inbox = self._sockets.open(zmq.ROUTER, server=True)
            self._inbox.set(zmq.ROUTER_HANDOVER, 1)
            self._monitor = self._sockets.monitor(self._inbox, REFUSALS)
            self._inbox.bind(url(*split_address(bind)))
            self._save()
        except zmq.ZMQError as error:
            self._sockets.close(0)
            raise OSError(f"The rendezvous cannot listen on {bind}: {error}.") from error
        except BaseException:
            self._sockets.close(0)
            raise
        if key is None and not is_loopback(split_address(bind)[0]):
            log(NO_KEY)
        self._ending = False
        self._thread = threading.Thread(target=self._serve, name="hetjax-rendezvous", daemon=True)
        self._thread.start()

    @property
    def over(self) -> bool:
        """Whether the run has started, and all its members have finished or left."""
        return self._registry.over

    @property
    def alive(self) -> bool:
        """Whether it serves."""
        return self._thread.is_alive()

    def close(self) -> None:
        """Stop serving."""
        self._ending = True
        self._thread.join()
        self._sockets.close(200)

    def _serve(self) -> None:
        poller = zmq.Poller()
        for socket in (self._inbox, self._monitor, self._sockets.gate):
            if socket is not None:
                poller.register(socket, zmq.POLLIN)
        while not self._ending:
            for socket, _ in poller.poll(_TICK):
                if socket is self._inbox:
                    self._read()
                elif socket is self._monitor:
                    recv_monitor_message(socket)
                    self._turn_away("A connection was refused: its key differs, or it speaks another protocol")
                else:
                    self._sockets.admit()
            self._registry.tick(time.monotonic())
            self._send()

    def _read(self) -> None:
        for _ in range(64):  # then time has its turn
            try:
                visitor, *frames = self._inbox.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._receive(visitor, frames)

    def _receive(self, visitor: bytes, frames: list[bytes]) -> None:
        common = kind_in_any_version(frames[0]) if len(frames) == 2 else None
        if common is None or len(frames[1]) > _LONGEST:
            self._turn_away("A message that is none of this protocol was dropped")
            return
        header = unpacked(frames[0])
        if header is None or header.kind != STATUS:
            self._turn_away("A process of another version, or of a fleet that is not elastic, was refused")
            sentence = "This is the rendezvous of an elastic fleet"
            if header is None:
                sentence = "The rendezvous has another version of hetjax: install the same everywhere"
            self._inbox.send_multipart([visitor, _header(REFUSED), json.dumps(f"{sentence}.").encode()])
            return
        try:
            status = json.loads(frames[1])
            self._registry.report(visitor, status, time.monotonic())
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            self._turn_away("A message without a valid status was dropped")

    def _send(self) -> None:
        letters = self._registry.letters()
        if letters:
            self._save()
        for visitor, letter in letters:
            if "refused" in letter:
                self._turn_away(f"A process was refused: {letter['refused'].removesuffix('.')}")
            with suppress(zmq.ZMQError):
                self._inbox.send_multipart([visitor, _header(STATUS), json.dumps(letter).encode()], zmq.NOBLOCK)
        sentences, self._registry.log = self._registry.log, []
        for sentence in sentences:
            self._log(sentence)

    def _turn_away(self, what: str) -> None:
        if what not in self._reported and len(self._reported) < 100:
            self._reported.add(what)
            self._log(f"{what}; further ones are not reported.")

    def _save(self) -> None:
        """Write down what a restart needs, before any member receives it."""
        state = self._registry.to_json()
        if self._state is None or state == self._saved:
            return
        self._saved = state
        draft = self._state.with_name(self._state.name + ".new")
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            json.dump(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, self._state)


def serve(bind: str, processes: int, key: bytes | None, state: Path | None, **options: Any) -> int:
    """Serve until the run is over, or SIGINT or SIGTERM arrives; `options` are those of `Rendezvous`.

    Returns:
        The exit code: 0 if the run is over, else 128 + the signal.
    """
    received: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: received.append(number))
    rendezvous = Rendezvous(bind, processes, key=key, state=state, **options)
    try:
        while not (received or rendezvous.over):
            if not rendezvous.alive:
                raise OSError("The rendezvous failed, see above.")
            time.sleep(_TICK / 1000)
        if rendezvous.over:
            time.sleep(1.0)  # the answer reaches those that leave last, too
    finally:
        rendezvous.close()
    if rendezvous.over and state is not None:
        state.unlink(missing_ok=True)  # another run starts from the beginning
    return 128 + received[0] if received else 0


def _header(kind: int) -> bytes:
    return Header(kind, NO_TOKEN, 0).packed()


def _read(state: Path | None) -> Mapping[str, Any]:
    if state is None or not state.exists():
        return {}
    try:
        return json.loads(state.read_text())
    except ValueError as error:
        raise ValueError(f"{state} holds no state of a rendezvous: remove it to start a new run.") from error
