"""Members of an elastic fleet as plain objects around a registry: no sockets, and time only when a test says so."""

import itertools

from hetjax.fleet.generations import Generation
from hetjax.fleet.registry import Patience, Registry

LIMITS = Patience(silent=10.0, answer=2.0, confirm=60.0)


class FakeMember:
    def __init__(self, name, joins=False, wish=None, **description):
        self.secret, self.number, self.newest, self.in_force = name, None, None, None
        self.steps = {}
        self.failed = self.refused = ""
        self.joins, self.wish = joins, wish
        self.description = {"version": "1", "child": name, **description}
        self.confirmed, self.suspects, self.step = (0, 0), None, 0
        self.ready = self.leaving = self.finished = False
        self.introduce, self.question, self.kills = True, 0, []
        self.cut = self.stopped = self.dead = False  # from the network; SIGSTOP; SIGKILL
        self.confirms = self.works = True  # confirms proposals; works in the generation in force

    @property
    def active(self):
        """Whether it may take part in a step of the generation in force that it knows."""
        settled = self.in_force is not None and self.newest is self.in_force and self.confirmed[0] == self.newest.number
        return settled and not (self.failed or self.stopped or self.dead or self.leaving or self.finished)

    def status(self):
        newest = 0 if self.newest is None else self.newest.number
        status = {"secret": self.secret, "newest": newest, "confirmed": list(self.confirmed)}
        status["entered"] = self.in_force.number if self.in_force is not None and self.works else 0
        if self.suspects is not None and self.suspects[0] == newest:
            status["suspects"] = self.suspects
        if self.question:
            status["answered"] = self.question
        status |= {"ready": self.ready, "leaving": self.leaving}
        status |= {"finished": self.in_force.number if self.finished else None}
        if self.introduce:
            status |= {"address": f"tcp://{self.secret}", "description": self.description, "joins": self.joins}
            status |= {"wish": self.wish, "number": self.number}
            status |= {"in_force": self.in_force and self.in_force.to_json()}
            status |= {"proposal": self.newest and self.newest.to_json()}
        return status

    def read(self, letter):
        """Returns whether to answer at once."""
        self.refused = letter.get("refused", self.refused)
        self.failed = self.failed or letter.get("stop", "") or letter.get("fenced", "")
        self.introduce = "introduce" in letter
        if self.introduce:
            return True
        if "question" in letter:
            self.question = letter["question"]
            return True
        self.number = letter.get("number", self.number)
        fresh = False
        if "generation" in letter:
            generation = Generation.from_json(letter["generation"])
            if self.newest is None or generation.number > self.newest.number:
                self.newest, fresh = generation, True
        if self.newest is not None and letter.get("in_force") == self.newest.number:
            steps = {int(n): step for n, step in letter["steps"].items()}
            if steps.keys() >= set(self.newest.numbers):
                self.in_force, self.steps = self.newest, steps
        return fresh

    def suspect(self, *numbers):
        self.suspects = (self.newest.number, {str(n): "silence" for n in numbers})


class World:
    """A registry, its members, and messages that arrive at once."""

    def __init__(self, processes, saves=True, **options):
        self.now, self.options, self.processes, self.saves = 100.0, options, processes, saves
        self.members, self.log, self.saved, self.away = [], [], None, False
        self.ended = {}
        self.killed = set()
        self.history = []  # generations in force, as members learned of them
        self._counter = itertools.count()
        self.registry = self._registry()

    def _registry(self):
        return Registry(self.processes, self.now, limits=LIMITS, saved=self.saved, **self.options)

    def start(self, count):
        for index in range(count):
            self.add(FakeMember(f"p{index}", wish=index))
        self.settle()
        return self.members

    def add(self, member):
        self.members.append(member)
        self.say(member)
        return member

    def say(self, member):
        """Bring a member's status to the registry."""
        if not (self.away or member.cut or member.stopped or member.dead or member.failed or member.refused):
            self.registry.report(member.secret.encode(), member.status(), self.now)

    def deliver(self):
        """Hand out all letters, and what members answer at once."""
        while letters := self._letters():
            for visitor, letter in letters:
                if visitor == b"agent":
                    self.killed |= set(letter["kill"])
                    continue
                member = next(m for m in self.members if m.secret.encode() == visitor)
                if member.cut or member.stopped or member.dead:
                    continue
                before = member.in_force
                if member.read(letter):
                    if member.confirms and member.newest is not None and not member.leaving:
                        member.confirmed = (member.newest.number, member.step)
                    self.say(member)
                if member.in_force is not before:
                    self.history.append(member.in_force)
        self.log += self.registry.log
        self.registry.log = []

    def _letters(self):
        if self.away:
            return []
        self.saved = self.registry.to_json() if self.saves else None
        return self.registry.letters()

    def settle(self, seconds=0.0):
        """Let time pass in steps of a second, with everybody's heartbeats."""
        for second in range(int(seconds) + 1):
            self.now += 1.0 if second else 0.0
            for member in self.members:
                self.say(member)
            if not self.away:
                self.registry.report(b"agent", {"agent": "a", "ended": dict(self.ended)}, self.now)
                self.registry.tick(self.now)
            self.deliver()
            for member in self.members:  # statuses that follow from what was just learned
                self.say(member)
            self.deliver()

    def die(self, *members, known=True, how="was killed by SIGKILL"):
        for member in members:
            member.dead = True
            if known:
                self.ended[member.secret] = (how, member.joins, False)

    def join(self, name):
        member = self.add(FakeMember(name, joins=True))
        self.deliver()
        member.ready = True
        return member

    def restart(self):
        """The rendezvous dies and comes back."""
        self.away = False
        self.registry = self._registry()

    def numbers(self):
        """Members of the newest generation in force."""
        return None if self.registry.in_force is None else self.registry.in_force.numbers
