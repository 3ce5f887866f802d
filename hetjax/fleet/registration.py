"""A process's side of the rendezvous: sends its status again and again, and receives the membership.

One thread talks to the rendezvous. While that is away the thread goes on trying, and training goes on; only changes of
the membership wait.
"""

from __future__ import annotations

import json
import os
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib import metadata
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from hetjax.environment import CHILD, PROCESS
from hetjax.fleet.generations import Fenced, Generation, RunStopped, Superseded
from hetjax.fleet.protocol import NO_TOKEN, REFUSED, STATUS, Header, kind_in_any_version
from hetjax.fleet.rendezvous import split_address, url
from hetjax.fleet.sockets import REFUSALS, Sockets

__all__ = ["Agent", "Fenced", "Registration", "RunStopped", "Superseded"]

_IMPATIENT = 0.05  # seconds between two attempts before the first answer
_DROPPED = 3  # handshakes that the rendezvous may drop without a word, as it does with another key
_KEEPALIVE = 2000  # milliseconds after which a silent connection is probed
_REMEMBERED = 1000  # ended children that an agent reports again to a rendezvous that was started anew


class _Line:
    """A connection to the rendezvous, with a thread.

    Args:
        rendezvous: HOST:PORT.
        key: CURVE secret key in Z85; None: the network is trusted.
        status: makes the next message.
        read: takes in an answer; returns whether to send the status at once.
    """

    def __init__(
        self,
        rendezvous: str,
        key: bytes | None,
        status: Callable[[], dict[str, Any]],
        read: Callable[[dict[str, Any]], bool],
    ):
        self.rendezvous, self.interval = rendezvous, _IMPATIENT
        self._status, self._read = status, read
        self.answered, self._dropped = False, 0
        self._sockets = Sockets(key)
        self._socket = self._sockets.open(zmq.DEALER)
        self._socket.set(zmq.IMMEDIATE, 1)  # nothing piles up while the rendezvous is away
        self._socket.set(zmq.SNDHWM, 100)
        self._socket.set(zmq.HEARTBEAT_IVL, _KEEPALIVE)
        self._socket.set(zmq.HEARTBEAT_TIMEOUT, 2 * _KEEPALIVE)
        events = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | REFUSALS
        self._monitor = self._sockets.monitor(self._socket, events)
        self._waker, self._wake = self._sockets.context.socket(zmq.PUSH), self._sockets.context.socket(zmq.PULL)
        self._wake.bind("inproc://wake")
        self._waker.connect("inproc://wake")
        self._waking = threading.Lock()
        self._ending = False
        self._socket.connect(url(*split_address(rendezvous)))
        self._thread = threading.Thread(target=self._run, name="hetjax-registration", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def _run(self) -> None:
        try:
            self._serve()
        except Exception as error:
            self._read({"refused": f"the connection failed: {type(error).__name__}: {error}"})
            raise

    def push(self) -> None:
        """Send the status now."""
        with self._waking, suppress(zmq.ZMQError):
            self._waker.send(b"", zmq.NOBLOCK)

    def close(self) -> None:
        """Send the status once more, and end."""
        self._ending = True
        self.push()
        if self._thread is not threading.current_thread():
            self._thread.join(5.0)
        self._sockets.close(1000)

    def _serve(self) -> None:
        poller = zmq.Poller()
        for socket in (self._socket, self._monitor, self._wake):
            poller.register(socket, zmq.POLLIN)
        due = 0.0
        while not self._ending:
            now = time.monotonic()
            if now >= due:
                self._send()
                due = time.monotonic() + self.interval
            for socket, _ in poller.poll(max(0, int((due - now) * 1000)) + 1):
                if socket is self._socket:
                    due = 0.0 if self._receive() else due
                elif socket is self._wake:
                    self._wake.recv()
                    due = 0.0
                elif self._watch(recv_monitor_message(socket)["event"]):
                    due = 0.0
        self._send()

    def _send(self) -> None:
        with suppress(zmq.Again):
            content = json.dumps(self._status()).encode()
            self._socket.send_multipart([Header(STATUS, NO_TOKEN, 0).packed(), content], zmq.NOBLOCK)

    def _receive(self) -> bool:
        first, *content = self._socket.recv_multipart()
        kind, _ = kind_in_any_version(first) or (None, "")
        if len(content) != 1 or kind not in (STATUS, REFUSED):
            return False
        letter = json.loads(content[0])
        self.answered = True
        return self._read({"refused": letter} if kind == REFUSED else letter)

    def _watch(self, event: int) -> bool:
        """Note an event of the connection; returns whether it was just made."""
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            return True
        self._dropped += 1
        if not self.answered and (event & REFUSALS or self._dropped >= _DROPPED):
            self._read({"refused": "its key differs, or only one of the two has a key. Give all the same key file."})
        return False


class Registration:
    """A member's registration. The constructor returns once the rendezvous has given it a number.

    Args:
        rendezvous: HOST:PORT.
        address: ZeroMQ address of its inbox, for other hosts.
        local: the same for processes on `host`; None: there is none.
        host: names host and network namespace.
        description: JSON values that are compared (`alike`), refused (`problem`, a sentence) or only passed on.
        key: CURVE secret key in Z85, the same in all processes; None: the network is trusted.
        start_limit: seconds within which the rendezvous has to answer.
        joins: enter a run that is under way, once `ready` was called.
        notify: called, in a thread, when there is something new.

    Raises:
        ValueError: if the rendezvous refuses this process.
        TimeoutError: if it does not answer.
    """

    def __init__(
        self,
        rendezvous: str,
        *,
        address: str,
        local: str | None = None,
        host: str = "",
        description: Mapping[str, Any] | None = None,
        key: bytes | None = None,
        start_limit: float = 60.0,
        joins: bool = False,
        notify: Callable[[], None] = lambda: None,
    ):
        self.rendezvous, self.number = rendezvous, -1
        self.newest: Generation | None = None  # proposed to this member
        self.silent_limit = 10.0  # seconds after which a silent member is lost, as the rendezvous has it
        own = {"version": metadata.version("hetjax"), "child": os.environ.get(CHILD, ""), **(description or {})}
        self._introduction: dict[str, Any] = {
            "address": address, "local": local, "host": host, "description": own, "joins": joins
        }  # fmt: skip
        if (number := os.environ.get(PROCESS, "")).isdigit():
            self._introduction["wish"] = int(number)
        self._secret, self._notify = secrets.token_hex(16), notify
        self._changed = threading.Condition()
        self._introduce = True
        self._in_force: Generation | None = None
        self._steps: dict[int, int] = {}
        self._confirmed, self._entered = (0, 0), 0
        self._suspects: dict[int, str] = {}
        self._suspected_in, self._question = 0, 0
        self._alike: dict[str, Any] = {}
        self._ready = self._leaving = False
        self._finished: int | None = None
        self._refused, self._waiting = "", ""
        self._failure: type[Fenced] = Fenced
        self._failed = ""
        self._line = _Line(rendezvous, key, self._status, self._read)
        self._line.start()
        try:
            with self._changed:
                met = self._changed.wait_for(lambda: self.number >= 0 or self._refused or self._failed, start_limit)
                if not met:
                    raise TimeoutError(
                        f"The rendezvous {rendezvous} did not admit this process within {start_limit:g} s: "
                        + (
                            self._waiting
                            or "it does not answer. Check the address, that it was started, and the firewall"
                        )
                        + "."
                    )
                if self.number < 0:
                    raise ValueError(
                        f"The rendezvous {rendezvous} refused this process: {self._refused or self._failed}"
                    )
        except BaseException:
            self._line.close()
            raise

    # -- what the member learns --

    def check(self) -> None:
        """Raise `Fenced` or `RunStopped` if this process is no member any more."""
        if self._failed:
            raise self._failure(self._failed)

    def wait_newer(self, than: int, limit: float) -> Generation:
        """Wait for a generation that is newer than a number.

        Raises:
            TimeoutError: if none was proposed within the limit.
            Fenced: if this process is no member any more; `RunStopped` if the run stops.
        """
        with self._changed:
            newer = lambda: self._failed or (self.newest is not None and self.newest.number > than)
            met = self._changed.wait_for(newer, limit)
            self.check()
            if not met or self.newest is None:
                raise TimeoutError(
                    f"The rendezvous {self.rendezvous} proposed no new generation within {limit:g} s"
                    + (f": {self._waiting}. Check that all were started." if self._waiting else ".")
                )
            return self.newest

    def wait_confirmed(self, generation: int, limit: float) -> dict[int, int]:
        """Wait until all members of a generation have confirmed it: from then on it is in force.

        Returns:
            The newest complete step of each member.

        Raises:
            Superseded: if a newer one was proposed meanwhile.
            TimeoutError: if it did not come in force within the limit.
            Fenced: if this process is no member any more; `RunStopped` if the run stops.
        """
        with self._changed:
            newer = lambda: self.newest is not None and self.newest.number > generation
            done = lambda: self._in_force is not None and self._in_force.number == generation
            met = self._changed.wait_for(lambda: self._failed or newer() or done(), limit)
            self.check()
            if newer():
                assert self.newest is not None
                raise Superseded(f"Generation {generation} was superseded: {self.newest.reason}")
            if not met:
                raise TimeoutError(f"Not all members confirmed generation {generation} within {limit:g} s.")
            return dict(self._steps)

    # -- what the member reports --

    def confirm(self, generation: int, step: int) -> None:
        """Report that this process works in no older generation.

        Args:
            generation: the proposal.
            step: the newest step that is complete here.
        """
        with self._changed:  # two threads may confirm two proposals in either order
            self._confirmed = max(self._confirmed, (generation, step))
        self._line.push()

    def enter(self, generation: int) -> None:
        """Report that this process works in a generation; only when all do, others are let in."""
        self._report(_entered=generation)

    def suspect(self, members: Sequence[int], reason: str) -> None:
        """Report members of the newest generation that sent nothing within a limit, or whose connection broke."""
        with self._changed:
            newest = 0 if self.newest is None else self.newest.number
            if self._suspected_in != newest:
                self._suspected_in, self._suspects = newest, {}
            self._suspects |= dict.fromkeys(members, reason)
        self._line.push()

    def describe(self, alike: Mapping[str, Any]) -> None:
        """Add to what has to be alike in all members, such as the model; who differs is fenced."""
        self._report(_alike={**self._alike, **alike})

    def ready(self) -> None:
        """Let this process in at the next occasion: it has compiled its programs."""
        self._report(_ready=True)

    def leave(self) -> None:
        """Leave the run: the others get a generation without this process."""
        self._report(_leaving=True)

    def close(self, finished: bool = True, generation: int | None = None) -> None:
        """End the registration.

        Args:
            finished: the run is at its end, so that the others need no new generation; else they get one.
            generation: the last one that this process worked in. Default: the last one it has confirmed.
        """
        with self._changed:
            if finished:
                self._finished = self._confirmed[0] if generation is None else generation
            else:
                self._leaving = True
        self._line.close()

    def _report(self, **values: Any) -> None:
        with self._changed:
            for name, value in values.items():
                setattr(self, name, value)
        self._line.push()

    # -- in the thread --

    def _status(self) -> dict[str, Any]:
        with self._changed:
            newest = 0 if self.newest is None else self.newest.number
            status: dict[str, Any] = {"secret": self._secret, "newest": newest, "confirmed": self._confirmed}
            if self._suspects and self._suspected_in == newest:
                status["suspects"] = newest, self._suspects
            if self._question:
                status["answered"] = self._question
            for name in ("ready", "leaving", "alike", "entered"):
                if value := getattr(self, f"_{name}"):
                    status[name] = value
            if self._finished is not None:
                status["finished"] = self._finished
            if self._introduce:
                status |= self._introduction
                if self.number >= 0:
                    status["number"] = self.number
                for name, generation in (("in_force", self._in_force), ("proposal", self.newest)):
                    status[name] = None if generation is None else generation.to_json()
            return status

    def _read(self, letter: dict[str, Any]) -> bool:
        with self._changed:
            again = self._take_in(letter)
            self._changed.notify_all()
        self._notify()
        return again

    def _take_in(self, letter: dict[str, Any]) -> bool:
        """Note what the rendezvous says; returns whether it waits for an answer."""
        if "refused" in letter:
            self._refused = str(letter["refused"])
            if self.number >= 0:  # by a rendezvous that was started anew
                self._failed = self._failed or self._refused
            return False
        if "introduce" in letter:
            self._introduce = True
            return True
        if "question" in letter:
            self._question = int(letter["question"])
            return True
        for name, failure in (("stop", RunStopped), ("fenced", Fenced)):
            if name in letter and not self._failed:
                self._failed, self._failure = str(letter[name]), failure
        self._waiting = str(letter.get("waiting", ""))
        if "number" not in letter:
            return False
        self._introduce, self.number = False, int(letter["number"])
        self.silent_limit = float(letter["silent"])
        self._line.interval = min(self.silent_limit / 8, 1.0)
        fresh = False
        if "generation" in letter:
            generation = Generation.from_json(letter["generation"])
            if self.newest is None or generation.number > self.newest.number:
                self.newest, fresh = generation, True
        if self.newest is not None and letter.get("in_force") == self.newest.number:
            steps = {int(number): int(step) for number, step in letter["steps"].items()}
            if steps.keys() >= set(self.newest.numbers):
                self._in_force, self._steps = self.newest, steps
        return fresh


class Agent:
    """The launcher's side: reports the end of its children, and learns which of them to kill.

    Args:
        rendezvous: HOST:PORT.
        key: CURVE secret key in Z85, the same in all processes; None: the network is trusted.
    """

    def __init__(self, rendezvous: str, key: bytes | None):
        self.kill: set[str] = set()  # children that hang and were taken out of the fleet
        self.over = False  # the run has ended
        self._ended: dict[str, tuple[str, bool, bool]] = {}
        self._name = secrets.token_hex(8)
        self._line = _Line(rendezvous, key, self._status, self._read)
        self._line.start()

    def ended(self, child: str, how: str, joins: bool, clean: bool) -> None:
        """Report the end of a child.

        Args:
            child: its name, as in HETJAX_CHILD.
            how: words that follow "its process", such as "was killed by SIGKILL".
            joins: it was to enter a run that was under way.
            clean: it ended with exit code 0.
        """
        kept = list(self._ended.items())[-_REMEMBERED:]
        self._ended = {**dict(kept), child: (how, joins, clean)}
        self._line.push()

    def close(self) -> None:
        """End the connection."""
        self._line.close()

    def _status(self) -> dict[str, Any]:
        return {"agent": self._name, "ended": self._ended}

    def _read(self, letter: dict[str, Any]) -> bool:
        self._line.interval = 0.25
        self.kill, self.over = set(letter.get("kill", ())), bool(letter.get("over"))
        return False
