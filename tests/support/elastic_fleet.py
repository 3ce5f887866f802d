"""Members of an elastic fleet as threads of one process, with a rendezvous that needs no network."""

import threading
import time

from hetjax import processes
from hetjax.fleet.elastic import ElasticCarrier
from hetjax.fleet.generations import Fenced, Generation, Member, Superseded
from hetjax.recovery import Left

TOKEN = b"thetoken"


class Rendezvous:
    """What `hetjax.fleet.rendezvous` decides, without heartbeats: who is suspected is lost if its thread has ended."""

    def __init__(self, founders, holders=2, heartbeat_limit=30.0):
        self.founders, self.holders, self.heartbeat_limit = founders, holders, heartbeat_limit
        self.changed = threading.Condition()
        self.members, self.gone, self.next, self.outside = {}, set(), 0, {}
        self.proposals, self.confirmed = [], {}

    def propose(self, reason):
        members = tuple(self.members[number] for number in sorted(self.members))
        self.proposals.append(Generation(len(self.proposals) + 1, TOKEN, members, reason))
        self.confirmed[len(self.proposals)] = {}
        self.changed.notify_all()

    def lose(self, number, reason="was lost"):
        """Take a member out."""
        with self.changed:
            if number in self.members:
                del self.members[number]
                self.gone.add(number)
                self.propose(f"Member {number} {reason}.")

    def register(self, place, joins):
        with self.changed:
            number, self.next = self.next, self.next + 1
            member = Member(number, place["address"], place.get("local"), place.get("host", ""))
            if joins:
                self.outside[number] = member
            else:
                self.members[number] = member
                if len(self.members) == self.founders and not self.proposals:
                    self.propose("The run starts.")
            return Registration(self, number)


class Registration:
    def __init__(self, rendezvous, number):
        self.rendezvous, self.number, self.closed = rendezvous, number, False

    @property
    def newest(self):
        there = [g for g in self.rendezvous.proposals if self.number in g.numbers]
        return there[-1] if there else None

    def wait_newer(self, than, limit):
        meet = self.rendezvous
        found = lambda: self.newest is not None and self.newest.number > than
        with meet.changed:
            if not meet.changed.wait_for(lambda: found() or self.number in meet.gone, limit):
                raise TimeoutError(f"No generation newer than {than}.")
            if self.number in meet.gone:
                raise Fenced(f"Member {self.number} was taken for lost.")
            return self.newest

    def confirm(self, generation, step):
        with self.rendezvous.changed:
            self.rendezvous.confirmed[generation][self.number] = step
            self.rendezvous.changed.notify_all()

    def wait_confirmed(self, generation, limit):
        meet = self.rendezvous
        wanted = set(meet.proposals[generation - 1].numbers)
        with meet.changed:
            newer = lambda: len(meet.proposals) > generation
            if not meet.changed.wait_for(lambda: newer() or set(meet.confirmed[generation]) == wanted, limit):
                raise TimeoutError(f"Generation {generation}: {wanted - set(meet.confirmed[generation])} missing.")
            if newer():
                raise Superseded(str(generation))
            return dict(meet.confirmed[generation])

    def suspect(self, members, reason):
        """Nobody is lost by a suspicion: tests say who is."""

    def ready(self):
        with self.rendezvous.changed:
            self.rendezvous.members[self.number] = self.rendezvous.outside.pop(self.number)
            self.rendezvous.propose(f"Member {self.number} joined.")

    def leave(self):
        self.rendezvous.lose(self.number, "left")

    def close(self):
        self.closed = True


class Killed(BaseException):
    """Ends the thread of a member, as SIGKILL ends a process."""


class PerThread:
    """The link of the thread that asks, where threads stand for processes."""

    local = threading.local()

    def __getattr__(self, name):
        return getattr(self.local.link, name)

    def __setattr__(self, name, value):
        setattr(self.local.link, name, value)


class Fleet:
    """Runs members, each a function of its carrier, in threads.

    Args:
        work: (carrier) -> result.
        members: number of founders.
    """

    def __init__(self, work, members, **options):
        self.rendezvous, self.work = Rendezvous(members, **options), work
        self.threads, self.results, self.errors, self.links = [], {}, {}, {}
        self.shared = PerThread()

    def start(self, joins=False, work=None):
        thread = threading.Thread(target=self._run, args=(joins, work or self.work), daemon=True)
        self.threads.append(thread)
        thread.start()
        return thread

    def _run(self, joins, work):
        meet = self.rendezvous
        link = ElasticCarrier(
            lambda place, notify: meet.register(place, joins),
            "127.0.0.1:1",
            expected=meet.founders,
            holders=meet.holders,
            joins=joins,
            wait_limit=60.0,
            heartbeat_limit=meet.heartbeat_limit,
        )
        self.shared.local.link, number = link, link.number
        self.links[number] = link
        try:
            self.results[number] = work(link)
            link.close(together=True)
        except Left:
            link.close(together=False)
        except Killed:
            link.close(together=False)
            meet.lose(number)
        except BaseException as error:
            self.errors[number] = error
            link.close(together=False)
            meet.lose(number, f"ended with {type(error).__name__}: {error}")

    def end(self, limit=120.0):
        """The results by member, after all have ended."""
        deadline = time.monotonic() + limit
        while any(thread.is_alive() for thread in self.threads) and time.monotonic() < deadline and not self.errors:
            time.sleep(0.01)
        alive = [k for k, thread in enumerate(self.threads) if thread.is_alive()]
        if self.errors:
            raise next(iter(self.errors.values()))
        assert not alive, f"threads {alive} hang"
        return self.results

    def __enter__(self):
        processes.join(self.shared)
        for _ in range(self.rendezvous.founders):
            self.start()
        return self

    def __exit__(self, *_):
        processes.join(None)
