"""The events of bench_faults: what is done to the fleet, and what is measured of it."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from benches.fault_fleet import Fleet, Member

SMALLEST, LARGEST = 3, 6  # members, before an event
LEFT = 2  # members, after an event
STARTING = 3  # processes that start at the same time at most
# kind -> (how often, what happens in the same moment)
KINDS: dict[str, tuple[int, Sequence[str]]] = {
    "kill": (8, ["kill"]),
    "crash": (6, ["crash"]),
    "leave": (4, ["leave"]),
    "hang": (2, ["hang"]),
    "wake": (2, ["wake"]),
    "rendezvous": (3, ["rendezvous"]),
    "newcomer": (3, ["newcomer"]),
    "two": (5, ["kill", "kill"]),
    "both": (4, ["kill", "rendezvous"]),
    "mixed": (4, []),
}
_MIXED = ("kill", "crash", "leave", "hang", "wake", "rendezvous", "newcomer")
_SILENT = ("crash", "hang", "wake")  # not reported by a launcher: these victims still count for the majority


class Events:
    """Lets random events happen one after the other, and starts new processes in place of lost ones.

    Args:
        fleet: the fleet.
        seed: of all that is random.
        kinds: those that may happen; None: all.
        tell: called with every event.
    """

    def __init__(self, fleet: Fleet, seed: int, kinds: Sequence[str] | None, tell: Callable[[dict[str, Any]], None]):
        self.fleet, self.tell = fleet, tell
        self.chance = random.Random(seed)
        self.weights = {kind: weight for kind, (weight, _) in KINDS.items() if kinds is None or kind in kinds}
        self._deck: list[str] = []  # kinds that are to happen, in this order where it is possible
        self.found: list[dict[str, Any]] = []

    def next(self) -> None:
        """Wait for as many members as chance wants, and let something happen to them."""
        fleet, wanted = self.fleet, self.chance.randint(SMALLEST, LARGEST)

        def enough() -> bool:
            self.greet()
            size, starting = len(fleet.training), len(fleet.starting)
            if size + starting < LARGEST and starting < STARTING:
                fleet.start(joins=True)
            return size >= wanted

        fleet.wait(enough, f"{wanted} members")
        if len(self._deck) < len(self.weights):  # the first ones: each kind once
            more = [kind for kind, weight in self.weights.items() for _ in range(weight if self._deck else 1)]
            self._deck += self.chance.sample(more, len(more))
        for place, kind in enumerate(self._deck):
            if self._happen(kind):
                del self._deck[place]
                break
        self.greet()

    def greet(self) -> None:
        """Note the joins since the last call: until a newcomer's first step, and how long that kept the others."""
        for member in self.fleet.running:
            if member.rows and not member.greeted:
                member.greeted = True
                if member.joins:
                    first = member.rows[0]
                    gaps = [_gap(other, first.step) for other in self.fleet.running if other is not member]
                    self._note("join", first.step, member.started, first.at, max(gaps, default=0.0))

    def _happen(self, kind: str) -> bool:
        """Let a kind of event happen, and wait until the run has gone on; returns whether it was possible."""
        fleet, chance = self.fleet, self.chance
        acts = KINDS[kind][1] or chance.sample(_MIXED, 2)
        training, starting = fleet.training, fleet.starting
        leaves = [act for act in acts if act not in ("rendezvous", "newcomer")]
        silent = sum(act in _SILENT for act in acts)
        if len(training) - len(leaves) < LEFT or 2 * silent >= len(training):
            return False
        chosen = chance.sample(training, len(leaves))
        before, began = fleet.newest, time.monotonic()
        for act, victim in zip(leaves, chosen, strict=True):
            _harm(act, victim)
        if "newcomer" in acts:
            _harm("kill", chance.choice(starting or [fleet.start(joins=True)]))
        if "rendezvous" in acts:
            fleet.restart_rendezvous()
        lost = {victim.number for victim in chosen}
        others = [member for member in training if member not in chosen]

        def gone_on(member: Member) -> float | None:
            """End of its first step without the victims; if there are none, of the step after next."""
            after = lambda row: not lost & row.numbers if lost else row.step >= before + 2
            return min((row.at for row in member.since(began) if row.at > began and after(row)), default=None)

        fleet.wait(lambda: all(map(gone_on, others)), f"a step after {kind} ({', '.join(acts)})")
        ends = [end for end in map(gone_on, others) if end is not None]
        for act, victim in zip(leaves, chosen, strict=True):
            if act == "wake":
                victim.send(signal.SIGCONT)
        times = [[row.at for row in m.since(began) if row.at <= end] for m, end in zip(others, ends, strict=True)]
        still = max((gap for each in times for gap in -np.diff(each)), default=0.0)
        self._note(kind, before, began, min(ends), float(still), acts)
        return True

    def _note(
        self, kind: str, step: int, began: float, ended: float, still: float, acts: Sequence[str] = ("join",)
    ) -> None:
        event = {"kind": kind, "step": step, "at": began, "seconds": ended - began, "standstill": still}
        self.found.append(event | {"acts": [*acts], "members": len(self.fleet.training)})
        self.tell(self.found[-1])


def _harm(act: str, victim: Member) -> None:
    """Do something to a member."""
    if act in ("kill", "crash"):
        victim.silent, victim.stopped = act == "crash", True
        victim.send(signal.SIGKILL)
    elif act == "leave":
        victim.leaving = True
        victim.send(signal.SIGTERM)
    else:
        victim.spared, victim.stopped = act == "wake", True
        victim.send(signal.SIGSTOP)


def _gap(member: Member, step: int) -> float:
    """Seconds that a member took for a step; 0 if that is unknown."""
    found = [row.at for row in member.rows[-100:] if row.step in (step - 1, step)]
    return found[-1] - found[0] if len(found) == 2 else 0.0


def summary(events: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Median, 95th percentile and worst of the seconds, for each kind."""
    result = {}
    for kind in (*KINDS, "join"):
        some = [event for event in events if event["kind"] == kind]
        if some:
            result[kind] = {"events": len(some)} | {
                f"{name}{label}": round(float(np.percentile([event[key] for event in some], share)), 3)
                for key, name in (("seconds", ""), ("standstill", "standstill_"))
                for label, share in (("median_s", 50), ("p95_s", 95), ("worst_s", 100))
            }
    return result
