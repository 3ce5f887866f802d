"""Who belongs to an elastic fleet: the rules of the rendezvous, without sockets and clocks.

Members send their whole status again and again, and receive the whole state; so a lost message, or a rendezvous that
is started anew, heals by itself. A change of membership is a proposal; it is in force once all its members have
confirmed that they work in no older generation. Each generation in force shares a member with the one before, which
has stopped working there: two can never make progress at once.

A proposal either takes members out or lets others in, never both. One that lets others in waits for as long as the
members evaluate, save, or do whatever else is not to be interrupted, and is given up for one that takes members out.
"""

from __future__ import annotations

import hashlib
import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hetjax.fleet.generations import Generation, Member
from hetjax.fleet.reception import first_difference

_STRIKES = 3  # generations without progress in which two members lost touch, before one of them is dropped
_SKIPPED = 16  # numbers that may have been given by a rendezvous before, to members that have not come back
_MOST_OUTSIDE = 1024  # processes that may wait outside

Message = Mapping[str, Any]


@dataclass(frozen=True)
class Patience:
    """Seconds after which the rendezvous gives a process up."""

    silent: float = 10.0  # without any message
    answer: float = 2.0  # without an answer of a member that others suspect
    confirm: float = 300.0  # without a confirmation of a proposal, by a member that answers


@dataclass
class _Known:
    """What is known of one process."""

    member: Member
    heard: float
    joins: bool = False
    visitor: bytes = b""
    child: str = ""  # by which its launcher names it
    ready: bool = False  # a joiner that can be let in
    gone: str = ""  # why it is no member any more
    certain: bool = False  # it is gone and takes no further step: it left, finished, or its process has ended
    finished: bool = False
    finished_in: int = 0  # generation that it worked in last
    newest: int = 0  # generation that it knows
    confirmed: tuple[int, int] = (0, 0)  # generation, and its newest complete step
    entered: int = 0  # generation that it works in
    hung: bool = False  # its launcher shall kill it
    question: int = 0  # asked because others suspect it; 0: none
    asked_at: float = 0.0
    asked_in: int = 0  # generation
    accusers: set[int] = field(default_factory=set)


class Registry:
    """The state of a rendezvous. Times are seconds of a monotonic clock.

    Args:
        processes: number of processes with which the run starts.
        now: the time.
        min_members: the run stops, with a checkpoint, when fewer are left.
        limits: when members are given up.
        saved: what `to_json` returned before a restart.
    """

    def __init__(
        self,
        processes: int,
        now: float,
        *,
        min_members: int = 1,
        limits: Patience = Patience(),
        saved: Message | None = None,
    ):
        self.processes, self.min_members, self.limits = processes, min_members, limits
        self.epoch = secrets.token_hex(8)  # of this start of the rendezvous
        self.token = secrets.token_bytes(8)  # of the run
        self.in_force: Generation | None = None
        self.proposal: Generation | None = None  # newer than the one in force
        self.stopped = ""  # why the run stops
        self.log: list[str] = []  # sentences for the user
        self._known: dict[int, _Known] = {}
        self._numbers: dict[str, int] = {}  # of members, by their proof
        self._agents: dict[str, bytes] = {}
        self._ended: dict[str, str] = {}  # children whose end was reported
        self._letters: list[tuple[bytes, dict[str, Any]]] = []
        self._next_number, self._highest = 0, 0  # of a member; of a generation
        self._proposed_at = self._ticked = now
        self._short_since: float | None = None  # since when those that are left are no majority
        self._renew = ""  # why a new generation is needed although the members stay
        self._questions = 0
        self._strikes: Counter[tuple[int, int]] = Counter()
        self._progress = -1
        self._recovering_since: float | None = None
        self._saved = saved is not None
        if saved is not None:
            self._next_number, self._highest = int(saved["next_number"]), int(saved["highest"])
            self.token = bytes.fromhex(saved["token"])
            if saved["in_force"] is not None:
                self._adopt(Generation.from_json(saved["in_force"]), now)

    def to_json(self) -> dict[str, Any]:
        """What a restarted rendezvous has to know; to be saved before letters are sent."""
        in_force = None if self.in_force is None else self.in_force.to_json()
        numbers = {"next_number": self._next_number, "highest": self._highest}
        return {"token": self.token.hex(), "in_force": in_force, **numbers}

    def letters(self) -> list[tuple[bytes, dict[str, Any]]]:
        """Messages to be sent now, with the visitor that gets each."""
        letters, self._letters = self._letters, []
        return letters

    @property
    def over(self) -> bool:
        """Whether the run has started and no member is left."""
        current = self.proposal or self.in_force
        return current is not None and all(self._certain(number) for number in current.numbers)

    @property
    def _ending(self) -> str:
        """Why the run stops, or "" if it does not."""
        current = self.proposal or self.in_force
        return self.stopped or (f"The run stops: {current.stop}" if current is not None and current.stop else "")

    # -- what others report --

    def report(self, visitor: bytes, status: Message, now: float) -> None:
        """Take in the status of a process, and answer it.

        Raises:
            ValueError, TypeError, KeyError: if it is none; nothing was changed.
        """
        if "agent" in status:
            self._hear_agent(visitor, status, now)
            return
        proof = hashlib.sha256(str(status["secret"]).encode()).hexdigest()
        if proof not in self._numbers:
            if "address" not in status:
                self._letters.append((visitor, {"epoch": self.epoch, "introduce": True}))
                return
            begun = (self.proposal or self.in_force) is not None and self._recovering_since is None
            if status.get("joins") and status.get("number") is None and not begun:
                self._letters.append(
                    (visitor, {"epoch": self.epoch, "waiting": "there is no run yet that it can join"})
                )
                return
            if (refusal := self._introduce(proof, status, now)) is not None:
                self._letters.append((visitor, {"epoch": self.epoch, "refused": refusal}))
                return
        number = self._numbers[proof]
        known = self._known.get(number)
        if known is None:
            self._letters.append((visitor, {"epoch": self.epoch, "fenced": _fenced(number, "it is no longer known")}))
            return
        known.visitor, known.heard = visitor, now
        known.newest = max(known.newest, int(status.get("newest", 0)))
        known.ready = bool(status.get("ready"))
        self._hear(number, known, status, now)
        self._decide(now)
        self._tell(known)

    def tick(self, now: float) -> None:
        """Decide what follows from the time that has passed; to be called several times within every limit."""
        pause, self._ticked = now - self._ticked, now
        if pause > self.limits.silent / 2:  # the rendezvous itself was stopped: what came meanwhile is still unread
            for known in self._known.values():
                known.heard = max(known.heard, now - self.limits.silent / 2)
                known.asked_at = max(known.asked_at, now - self.limits.answer / 2)
        self._decide(now)

    def _hear(self, number: int, known: _Known, status: Message, now: float) -> None:
        """Note what a member reports of itself and of others."""
        newest = self.proposal or self.in_force
        if known.gone and not known.certain:
            if self._short_since is None or newest is None or number not in newest.numbers:
                return
            known.gone, known.hung = "", False  # nothing was decided without it
            self._renew = self._renew or f"Member {number} answers again."
        before = known.member.description.get("alike", {})
        if isinstance(alike := status.get("alike"), dict) and {**before, **alike} != before:
            known.member = replace(known.member, description={**known.member.description, "alike": {**before, **alike}})
            if (refusal := self._misfit(known.member)) is not None:
                self._lose(number, refusal.removesuffix("."))
        generation, step = status.get("confirmed") or (0, 0)
        known.confirmed = (int(generation), int(step))
        known.entered = int(status.get("entered", 0))
        if known.question and status.get("answered") == known.question:
            if newest is not None and known.asked_in == newest.number:  # it lives: only connections broke
                self._strikes.update((accuser, number) for accuser in known.accusers)
                accusers = _names(sorted(known.accusers))
                self._renew = self._renew or f"{accusers} lost touch with member {number}, which answers."
            known.question, known.accusers = 0, set()
        accused_in, accused = status.get("suspects") or (0, {})
        if newest is not None and accused_in == newest.number and number in newest.numbers:
            for peer in map(int, accused):
                other = self._known.get(peer)
                if other is not None and peer in newest.numbers and not other.gone and number not in other.accusers:
                    if not other.question:
                        self._questions += 1
                        other.question, other.asked_at, other.asked_in = self._questions, now, newest.number
                        self._letters.append((other.visitor, {"epoch": self.epoch, "question": other.question}))
                    other.accusers.add(number)
        if status.get("leaving") and not known.certain:  # also if it has ended meanwhile: the others have not
            known.certain, known.gone = True, "left"
        elif status.get("finished") is not None and not known.certain:
            known.finished = known.certain = True
            known.gone, known.finished_in = "finished", int(status["finished"])

    def _hear_agent(self, visitor: bytes, status: Message, now: float) -> None:
        """Note the children of a launcher that have ended; answer with those to kill."""
        self._agents[str(status["agent"])] = visitor
        children = {known.child: number for number, known in self._known.items() if known.child}
        for child, (how, joins, clean) in status.get("ended", {}).items():
            if child not in self._ended:
                self._ended[str(child)] = str(how)
                if not joins and self.in_force is None and self.proposal is None:
                    self.processes -= 1
            if child in children:
                known = self._known[children[child]]
                if not known.gone:
                    known.finished, known.gone = bool(clean), f"its process {how}"
                    known.finished_in = known.confirmed[0]
                known.certain = True
        self._decide(now)
        kill = [known.child for known in self._known.values() if known.child and known.hung and not known.certain]
        over = bool(self._ending) or self.over
        self._letters.append((visitor, {"epoch": self.epoch, "kill": kill, "over": over}))

    def _introduce(self, proof: str, status: Message, now: float) -> str | None:
        """Let a process in that is not known yet, or was known before a restart; a sentence if it is refused."""
        member = Member.from_json({**{name: status.get(name) for name in ("address", "local", "description")},
                                   "host": status.get("host") or "", "number": status.get("number") or 0,
                                   "proof": proof})  # fmt: skip
        known = _Known(member, now, bool(status.get("joins")), child=str(member.description.get("child", "")))
        if self.over or self.stopped or (self._ending and status.get("number") is None):
            return self._ending or "The run has ended."
        if len(self._known) >= len((self.in_force or Generation(0, b"", ())).members) + _MOST_OUTSIDE:
            return "Too many processes wait at this rendezvous."
        if status.get("number") is not None:
            return self._welcome_back(known, status, now)
        if known.child in self._ended:
            return "Its launcher has reported its end."
        if (problem := member.description.get("problem")) is not None:
            return str(problem)
        if (refusal := self._misfit(member)) is not None:
            return refusal
        if not known.joins and (self.in_force is not None or len(self._founders()) >= self.processes):
            return "The run has already started: join it with hetjax launch --join."
        asked = status.get("wish")
        free = isinstance(asked, int) and 0 <= asked < self.processes and asked not in self._known
        number = asked if free and self.in_force is None and self._highest == 0 else self._next_number
        assert isinstance(number, int)
        known.member = replace(member, number=number)
        self._note(number, known)
        return None

    def _welcome_back(self, known: _Known, status: Message, now: float) -> str | None:
        """A process that was known before this rendezvous was started."""
        number, proof = known.member.number, known.member.proof
        claims = [Generation.from_json(status[name]) for name in ("in_force", "proposal") if status.get(name)]
        inside = [generation for generation in claims if number in generation.numbers]
        current = self.proposal or self.in_force
        if inside and inside[0].token != self.token and (current is not None or self._highest):
            return "It belongs to another run."
        self._highest = max([self._highest, *(generation.number for generation in claims)])
        recovering = self._recovering_since is not None or (current is None and not self._known)
        if recovering and inside and status.get("in_force"):
            if self.in_force is None or claims[0].number > self.in_force.number:
                self._adopt(claims[0], now)
        elif recovering and inside and self.in_force is None:  # the first proposal was not in force yet
            self._adopt(replace(claims[0], number=0), now)
        proofs = {m.number: m.proof for g in (self.in_force, self.proposal, *claims) if g for m in g.members}
        if proofs.get(number, proof) != proof or number in self._known:
            return f"Another process is member {number}."
        valid = [g for g in (self.in_force, self.proposal) if g is not None and number in g.numbers]
        late = self.in_force is not None and all(g.number <= self.in_force.number for g in inside)
        worked = not known.joins or status.get("in_force")  # else it was only proposed, and can be let in later
        if inside and not valid and worked and (late or not recovering):
            return _fenced(number, "the others went on without it")
        if recovering and claims and (newest := claims[-1]).number > (self.in_force or newest).number:
            self._renew = "The rendezvous was started anew."
        known.ready = bool(status.get("ready"))
        self._note(number, known)
        return None

    def _adopt(self, generation: Generation, now: float) -> None:
        """Go on, after a restart, from a generation that was in force."""
        self.in_force, self.token = generation, generation.token
        self._highest = max(self._highest, generation.number)
        self._next_number = max(self._next_number, *(number + 1 for number in generation.numbers))
        if self._recovering_since is None:
            self._recovering_since = now
            self._known, self._numbers = {}, {}  # processes that took this for the start of a run

    def _note(self, number: int, known: _Known) -> None:
        self._known[number], self._numbers[known.member.proof] = known, number
        self._next_number = max(self._next_number, number + 1)

    def _misfit(self, member: Member) -> str | None:
        """In what a process differs from the members, as a sentence."""
        current = self.proposal or self.in_force
        others = [known.member for known in self._known.values() if not known.gone] + list(
            () if current is None else current.members
        )
        for other in others:
            if other.proof == member.proof:
                continue
            names = set(member.description.get("alike", {})) & set(other.description.get("alike", {}))
            alike = {name: other.description["alike"][name] for name in sorted(names)}
            reference = {**other.description, "alike": alike}
            if (differs := first_difference(reference, dict(member.description), "version")) is not None:
                return f"This process differs from the members in its {differs}"
        return None

    # -- decisions --

    def _founders(self) -> list[int]:
        return sorted(number for number, known in self._known.items() if not known.joins and not known.gone)

    def _decide(self, now: float) -> None:
        if self.stopped or not self._settled(now):
            return
        self._find_lost(now)
        entering = self._entering()
        current = self.in_force if entering else self.proposal or self.in_force
        if current is None:
            self._start(now)
            return
        wanted = [number for number in current.numbers if self._present(number)]
        joiners = [number for number in entering if self._present(number)]
        if self.proposal is None and not current.stop:
            outside = [number for number in self._known if number not in current.numbers]
            joiners = [n for n in sorted(outside) if self._known[n].ready and self._present(n)]
        lacking = [number for number in [*current.numbers, *entering] if number not in [*wanted, *joiners]]
        needed = any(not self._finished(number) for number in lacking)
        # Some have confirmed this generation, but ended in an older one: those who work in it wait for them.
        needed = needed or (bool(wanted) and any(self._known[n].finished_in < current.number for n in lacking))
        if self.proposal is not None and not entering:
            needed = needed or bool(lacking)
        out = needed or bool(self._renew)
        over = all(self._certain(number) for number in current.numbers)
        at_work = not entering and all(self._known[number].entered == current.number for number in wanted)
        if out or (joiners and (over or at_work)):
            self._replace(current, wanted, joiners, lacking, now, out)
        current = self.proposal
        if current is not None and all(self._known[n].confirmed[0] == current.number for n in current.numbers):
            self.in_force, self.proposal = current, None
            for number in current.numbers:
                self._known[number].joins = False
            progress = max(self._known[number].confirmed[1] for number in current.numbers)
            if progress > self._progress:
                self._progress = progress
                self._strikes.clear()
            self._tell_all()

    def _entering(self) -> list[int]:
        """Processes that the proposal lets in."""
        if self.proposal is None or self.in_force is None:
            return []
        return [number for number in self.proposal.numbers if number not in self.in_force.numbers]

    def _start(self, now: float) -> None:
        """Propose the first generation once all are there whose end was not reported."""
        founders = self._founders()
        if self.processes < self.min_members:
            self._stop(_too_few(self.processes, self.min_members))
        elif founders and len(founders) >= self.processes:
            self._propose(founders, f"{_names(founders)} start{'s' * (len(founders) == 1)}.", now)

    def _settled(self, now: float) -> bool:
        """Whether enough members have come back after a restart of the rendezvous; others then count as lost."""
        if self._recovering_since is None:
            return True
        assert self.in_force is not None
        for member in self.in_force.members:
            if (child := member.description.get("child")) in self._ended and member.number not in self._known:
                gone = f"its process {self._ended[child]}"
                self._note(member.number, _Known(member, now, child=child, gone=gone, certain=True))
        missing = [number for number in self.in_force.numbers if number not in self._known]
        if missing and now - self._recovering_since <= self.limits.silent:
            return False
        if not self._majority([number for number in self.in_force.numbers if self._present(number)]):
            return False
        if not self._saved:
            self._highest, self._next_number = self._highest + _SKIPPED, self._next_number + _SKIPPED
        for member in self.in_force.members:
            if member.number in missing:
                gone = "it did not come back to the restarted rendezvous"
                child = str(member.description.get("child", ""))
                self._note(member.number, _Known(member, now, child=child, gone=gone, hung=True))
        if self.in_force.number == 0:
            self._renew = "The rendezvous was started anew."
        self._recovering_since = None
        return True

    def _find_lost(self, now: float) -> None:
        """Give up those that are silent, do not answer, do not confirm, or keep losing touch with others."""
        current = self.proposal or self.in_force
        numbers, entering = () if current is None else current.numbers, self._entering()
        for number, known in list(self._known.items()):
            silent = now - known.heard > self.limits.silent
            late = self.proposal is not None and not entering and now - self._proposed_at > self.limits.confirm
            if known.gone:
                if (
                    silent
                    and known.certain
                    and not any(number in g.numbers for g in (self.in_force, self.proposal) if g is not None)
                ):
                    del self._known[number]
            elif silent:
                self._lose(number, f"it was silent for {self.limits.silent:g} s", hung=True)
            elif known.question and now - known.asked_at > self.limits.answer:
                self._lose(
                    number, f"{_names(sorted(known.accusers))} heard nothing of it, nor does it answer", hung=True
                )
            elif late and number in numbers and known.confirmed[0] != self._highest:
                self._lose(number, f"it did not finish its step for {self.limits.confirm:g} s", hung=True)
        if any(count >= _STRIKES for count in self._strikes.values()):
            blame: Counter[int] = Counter()
            for (accuser, accused), count in self._strikes.items():
                blame.update({accuser: count, accused: count})
            present = [number for number in blame if number in numbers and self._present(number)]
            self._strikes.clear()
            if present:
                self._lose(max(present, key=lambda n: (blame[n], n)), "it and others lost touch again and again")

    def _lose(self, number: int, reason: str, hung: bool = False) -> None:
        known = self._known[number]
        known.gone, known.hung, known.question, known.accusers = reason, hung, 0, set()

    def _replace(
        self, current: Generation, wanted: list[int], joiners: list[int], lacking: Sequence[int], now: float, out: bool
    ) -> None:
        """Propose another generation, or stop where too few are left; `out`: joiners wait, as members are taken out."""
        if all(self._certain(number) for number in (self.in_force or current).numbers):
            if (wanted or joiners) and any(known.finished for known in self._known.values()):
                self.stopped = "The run has ended."
                self._tell_all()
            elif wanted or joiners or any(known.gone == "left" for known in self._known.values()):
                self._stop("no member is left that has the model.")
            return
        if not self._majority(wanted):
            self._short_since = now if self._short_since is None else self._short_since
            if now - self._short_since > self.limits.silent:
                silent = [number for number in lacking if not self._certain(number)]
                self._stop(
                    f"{_names(silent)} cannot be reached and may go on by themselves: those that are left are not the "
                    "larger part of the fleet."
                )
            return
        self._short_since = None
        stop = current.stop
        if len(wanted) + len(joiners) < self.min_members:
            stop, joiners = _too_few(len(wanted), self.min_members), []
        joiners = [] if out else joiners
        left = [number for number in lacking if self._known[number].gone == "left"]
        lost = [number for number in lacking if number not in left and not self._finished(number)]
        reasons = [f"Member {number} was lost: {self._known[number].gone}." for number in lost]
        reasons += [f"{_names(left)} left."] if left else []
        reasons += [f"{_names(joiners)} joined."] if joiners else []
        self._propose(sorted(wanted + joiners), " ".join(reasons) or self._renew or "Members finished.", now, stop)

    def _propose(self, numbers: Sequence[int], reason: str, now: float, stop: str = "") -> None:
        self._highest += 1
        members = tuple(self._known[number].member for number in numbers)
        self.proposal = Generation(self._highest, self.token, members, reason, stop)
        self._proposed_at, self._renew = now, ""
        self.log.append(f"Generation {self._highest}: members {', '.join(map(str, numbers))}. {reason}")
        if stop:
            self.log.append(self._ending)
        self._tell_all()

    def _stop(self, reason: str) -> None:
        self.stopped = f"The run stops: {reason}"
        self.log.append(self.stopped)
        self._tell_all()

    def _majority(self, wanted: Sequence[int]) -> bool:
        """Whether these may go on: more than half of those that may still be at work, or half with the smallest."""
        if self.in_force is None:
            return True
        base = [number for number in self.in_force.numbers if not self._certain(number)]
        inside = [number for number in base if number in wanted]
        return 2 * len(inside) > len(base) or (2 * len(inside) == len(base) > 0 and min(base) in inside)

    def _present(self, number: int) -> bool:
        return number in self._known and not self._known[number].gone

    def _certain(self, number: int) -> bool:
        return number in self._known and self._known[number].certain

    def _finished(self, number: int) -> bool:
        return number in self._known and self._known[number].finished

    # -- answers --

    def _tell_all(self) -> None:
        for known in self._known.values():
            self._tell(known)

    def _tell(self, known: _Known) -> None:
        """Send a process what concerns it."""
        if not known.visitor:
            return
        number, newest = known.member.number, self.proposal or self.in_force
        letter: dict[str, Any] = {"epoch": self.epoch, "number": number, "silent": self.limits.silent}
        if self.stopped:
            letter["stop"] = self.stopped
        elif known.gone and not known.certain:
            letter["fenced"] = _fenced(number, known.gone)
        elif newest is None:
            letter["waiting"] = f"{len(self._founders())} of {self.processes} processes are there"
        elif number in newest.numbers or known.certain:
            if known.newest < newest.number and self._recovering_since is None:
                letter["generation"] = newest.to_json()
            if newest is self.in_force:
                steps = {n: self._known[n].confirmed for n in newest.numbers if n in self._known}
                letter["in_force"] = newest.number
                letter["steps"] = {str(n): step for n, (g, step) in steps.items() if g == newest.number}
        self._letters.append((known.visitor, letter))


def _names(numbers: Sequence[int]) -> str:
    """Members in words."""
    if len(numbers) == 1:
        return f"Member {numbers[0]}"
    return f"Members {', '.join(map(str, numbers[:-1]))} and {numbers[-1]}" if numbers else "No member"


def _too_few(left: int, wanted: int) -> str:
    return f"{left} {'member is' if left == 1 else 'members are'} left, and at least {wanted} are wanted."


def _fenced(number: int, reason: str) -> str:
    return f"Member {number} does not belong to the run any more: {reason}."
