"""The carrier of an elastic fleet: exchanges between whatever members the present generation has.

Every message carries the generation it belongs to; messages of earlier ones are dropped, those of the next one wait
until this process has entered it. As soon as a newer generation is proposed in which a member is missing, the thread
confirms it, and whatever still exchanges something in the old one ends with `GenerationChanged`. Nothing of an old
generation is read after that, so the others may go on. One that lets others in (`entry`) is entered between two steps,
the same in all members: `hetjax.recovery` decides when.

Before its first generation a process is alone: it compiles, and joins the others when it is ready.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import zmq

from hetjax.fleet.carrier import Carrier, MessageKey
from hetjax.fleet.channel import Buffer, Mail
from hetjax.fleet.generations import Generation, Superseded
from hetjax.fleet.protocol import BYE, unpacked
from hetjax.fleet.pulse import Pulse
from hetjax.fleet.registration import Registration
from hetjax.fleet.rendezvous import own_address_towards, split_address, url
from hetjax.fleet.sockets import Sockets, local_address

log = logging.getLogger("hetjax")

_LOOK = 0.02  # seconds between looks at the registration while a message is awaited
_PER_MEETING = 2**8  # channels that are opened between two gathers
_MOST_EARLY = 2**16  # messages kept of members that have entered the next generation before this one


class GenerationChanged(Exception):
    """A newer generation was proposed: what was going on has to be done again in it."""


class ElasticCarrier(Carrier):
    """Joins this process with the other members of an elastic fleet.

    `index` is the position of this process among the members of the generation, and `count` their number.

    Args:
        register: (place, notify) -> the registration of this process. The place is its address (`address`, and on the
            same host `local` and `host`); `notify` is called when there is something new.
        rendezvous: HOST:PORT of the rendezvous; the inbox listens on the address that leads there.
        key: CURVE secret key in Z85, the same in all processes; None: the network is trusted.
        expected: number of processes expected, which decides the sizes of microbatches.
        holders: processes that keep the optimizer state of a slice, 1 or 2.
        joins: whether this process joins a fleet that trains already.
        wait_limit: seconds to wait for a message.
    """

    def __init__(
        self,
        register: Callable[[dict[str, str], Callable[[], None]], Registration],
        rendezvous: str,
        *,
        key: bytes | None = None,
        expected: int = 1,
        holders: int = 2,
        joins: bool = False,
        wait_limit: float = 600.0,
    ):
        self._prepare(0, 1, wait_limit, 1.0)
        self.rendezvous, self.elastic, self.holders, self.joins = rendezvous, expected, holders, joins
        self.step = 0  # number of steps that this process has made, for the rendezvous
        self.entered: Generation | None = None
        self._confirmed = 0  # newest generation: nothing of an older one is read or sent any more
        self._suspected: dict[int, float] = {}
        self._sockets = Sockets(key)
        self.registration: Registration | None = None
        try:
            self.registration = register(self._open(None), self._wake_thread)
            self._pulse = Pulse((), self.registration.silent_limit, time.monotonic())
            self._start_thread()
            self._control = self.channel()
        except BaseException:
            self.close(together=False)
            raise

    @property
    def number(self) -> int:
        """The number of this member, which is never given to another process."""
        assert self.registration is not None
        return self.registration.number

    @property
    def first(self) -> bool:
        """Whether this process prints and writes files: the one with the smallest number."""
        known = self.entered or (self.registration.newest if self.registration is not None else None)
        return self.number == (known.numbers[0] if known is not None else 0) and not (known is None and self.joins)

    # -- generations --

    def enter_next(self) -> Generation:
        """Wait until a generation newer than the present one is in force, and enter it.

        Raises:
            TimeoutError: if none comes into force within the limit.
            Fenced: if this process is no longer a member.
        """
        registration, than = self.registration, self.generation
        assert registration is not None
        while True:
            generation = registration.wait_newer(than, self.wait_limit)
            than = generation.number - 1
            self._confirm(generation)
            try:
                registration.wait_confirmed(generation.number, self.wait_limit)
            except Superseded:
                than = generation.number
                continue
            self._enter(generation)
            return generation

    def _enter(self, generation: Generation) -> None:
        addresses, own = [], next(member for member in generation.members if member.number == self.number)
        for member in generation.members:
            near = member.local is not None and member.host == own.host
            addresses.append(member.local if near and member.local is not None else member.address)
        with self._arrived:
            self._mail.clear()
            self._wanted.clear()
            self._lost.clear()
            self._suspected.clear()
            self.index, self.count = generation.members.index(own), len(generation.members)
            self.others = [peer for peer in range(self.count) if peer != self.index]
            self.table = [dict(member.description) for member in generation.members]
            self._connect_others(addresses)
            self.entered, self._token, self.generation = generation, generation.token, generation.number
            self._control.round = 0
        self._wake_thread()  # files what came early
        assert self.registration is not None
        self.registration.enter(generation.number)

    def _confirm(self, generation: Generation) -> None:
        with self._arrived:
            if generation.number <= self._confirmed:
                return
            self._confirmed = generation.number
            self._arrived.notify_all()
        assert self.registration is not None
        self.registration.confirm(generation.number, self.step)

    def _lets_in(self, generation: Generation) -> bool:
        return self.entered is not None and not set(generation.numbers) <= set(self.entered.numbers)

    @property
    def entry(self) -> int:
        """Number of the newest generation, if it lets others in and was not confirmed yet; otherwise 0."""
        newest = None if self.registration is None else self.registration.newest
        return newest.number if newest and newest.number > self._confirmed and self._lets_in(newest) else 0

    def _check_generation(self) -> None:
        if self._confirmed > self.generation:
            raise GenerationChanged(f"Generation {self._confirmed} was proposed.")

    # -- messages --

    def gather(self, content: bytes, limit: float | None = None) -> list[bytes]:
        """The content of every member, in their order. Collective.

        Members open channels in the same order from here on, whatever each has opened before.
        """
        gathered = super().gather(content, limit)
        self._channels = itertools.count(self._control.round * _PER_MEETING % 2**31)
        return gathered

    def send(self, to: int, channel: int, round_: int, piece: int, buffers: Sequence[Buffer]) -> zmq.MessageTracker:
        """Send buffers to a member without copying them.

        Raises:
            GenerationChanged: if a newer generation was proposed.
        """
        with self._arrived:
            self._check_generation()
        return super().send(to, channel, round_, piece, buffers)

    def _await(self, keys: Sequence[MessageKey], limit: float | None, take: bool) -> tuple[MessageKey, Mail | None]:
        """See `Carrier`; a sender that is lost is reported, and a newer generation awaited.

        Raises:
            GenerationChanged: if a newer generation was proposed.
            TimeoutError: if neither the message nor a newer generation came within the limit.
        """
        limit, sender = self.wait_limit if limit is None else limit, keys[0][-1]
        assert self.registration is not None
        deadline = time.monotonic() + limit
        while True:
            with self._arrived:
                self._check_thread()
                self._check_generation()
                if (found := self._found(keys)) is not None:
                    return found, self._mail.pop(found) if take else None
                self._wanted.update(keys)
                self._arrived.wait(_LOOK)
                lost = self._lost.get(sender)
            late = time.monotonic() > deadline
            if lost is not None or late:
                self._suspect(sender, lost or f"sent nothing for {limit:g} s")
                with suppress(TimeoutError):  # raises Fenced if it is this member that is lost
                    self.registration.wait_newer(self._confirmed, 0.0)
            if time.monotonic() > deadline + self._pulse.limit:
                raise TimeoutError(
                    f"Member {self._number_of(sender)} sent nothing for {limit:g} s, and the rendezvous at "
                    f"{self.rendezvous} did not say that it is lost. Check that the rendezvous runs."
                )

    def _number_of(self, peer: int) -> int:
        assert self.entered is not None
        return self.entered.members[peer].number

    def _suspect(self, peer: int, reason: str) -> None:
        now = time.monotonic()
        if now - self._suspected.get(peer, -1e9) < self._pulse.limit:
            return
        self._suspected[peer] = now
        assert self.registration is not None
        self.registration.suspect([self._number_of(peer)], f"Member {self._number_of(peer)} {reason}.")

    # -- the end --

    def leave(self) -> None:
        """Leave the fleet, which goes on without this member."""
        assert self.registration is not None
        self.registration.leave()

    def close(self, together: bool) -> None:
        """End the carrier; `together`: the run has ended for all members."""
        if self._ending:
            return
        with self._sending:
            for outbox in self._outboxes.values():
                with suppress(zmq.ZMQError):
                    outbox.send(self._header(BYE), zmq.NOBLOCK)
        if self.registration is not None:
            with suppress(Exception):
                self.registration.close(finished=together, generation=self.generation)
        super().close(together=False)

    # -- in the thread --

    def _open(self, bind: str | None) -> dict[str, Any]:
        self._open_inbox()
        local, host = local_address(), own_address_towards(self.rendezvous)
        port = self._inbox.bind_to_random_port(url(host, None))
        if local:
            self._inbox.bind(local["local"])
        return {"address": url(*split_address(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")), **local}

    def _file(self, frames: Sequence[zmq.Frame], visitor: bytes = b"") -> None:
        header = unpacked(bytes(frames[0].buffer)) if frames else None
        with self._arrived:  # an entry, by another thread, changes what belongs
            belongs = header is not None and (header.token == self._token or self.entered is None)
            if header is not None and belongs and header.generation != self.generation:
                if header.generation > self.generation and len(self._early) < _MOST_EARLY:
                    self._early.append(frames)
                return
            super()._file(frames, visitor)

    def _check_peers(self, now: float) -> None:
        registration = self.registration
        newest = None if registration is None else registration.newest
        if newest is not None and newest.number > self._confirmed and not self._lets_in(newest):
            self._confirm(newest)
        if self.entered is not None:
            early, self._early = self._early, []  # of the generation that was entered, or kept for the next one
            for frames in early:
                self._file(frames)
            super()._check_peers(now)
