"""Which processes are alive: by their messages, their heartbeats and their connections. Clocks are given."""

from __future__ import annotations

import math
from collections.abc import Iterable

_GRACE = 0.3  # seconds between a closed connection and the goodbye that may still arrive


class Pulse:
    """Signs of life of the other processes.

    Args:
        peers: the other processes.
        limit: seconds after which a silent process counts as lost.
        now: seconds of a monotonic clock.
        patient: whether silence counts only after a process was heard for the first time.
    """

    def __init__(self, peers: Iterable[int], limit: float, now: float, patient: bool = False):
        self.limit = limit
        self._heard = dict.fromkeys(peers, math.inf if patient else now)
        self._goodbyes: set[int] = set()
        self._closed: dict[int, float] = {}  # peers that closed their connection, and when
        self._reported: set[int] = set()  # those of them that were found lost
        self._next_beat, self._checked = now, now

    def __contains__(self, peer: int) -> bool:
        return peer in self._heard

    @property
    def hurried(self) -> bool:
        """Whether something has to be checked soon."""
        return not self._closed.keys() <= self._reported

    def heard(self, peer: int, now: float) -> None:
        """Note any message of a process."""
        self._heard[peer] = now

    @property
    def present(self) -> set[int]:
        """Processes that have neither announced their end nor closed their connection."""
        return {peer for peer in self._heard if peer not in self._goodbyes and peer not in self._closed}

    def goodbye(self, peer: int) -> None:
        """Note that a process leaves on purpose."""
        self._goodbyes.add(peer)

    def disconnected(self, peer: int, now: float) -> None:
        """Note that a connection was closed."""
        self._closed.setdefault(peer, now)

    def beat_is_due(self, now: float) -> bool:
        """Whether to send a heartbeat now."""
        due = now >= self._next_beat
        if due:
            self._next_beat = now + self.limit / 4
        return due

    def lost(self, now: float) -> dict[int, str]:
        """Processes that are lost, and why."""
        pause, self._checked = now - self._checked, now
        if pause > self.limit / 2:  # this process was stopped or starved: what others sent meanwhile is still unread
            self._heard = {peer: max(heard, now - self.limit / 2) for peer, heard in self._heard.items()}
        self._reported |= {peer for peer, at in self._closed.items() if now - at > _GRACE}
        gone = {peer: "ended, or its connection broke" for peer, at in self._closed.items() if now - at > _GRACE}
        for peer, heard in self._heard.items():
            if now - heard > self.limit:
                gone.setdefault(peer, f"has not answered for {self.limit:g} s: it hangs, or its connection broke")
        return {peer: reason for peer, reason in gone.items() if peer not in self._goodbyes}
