"""Members of an elastic fleet as threads of one process, with a rendezvous of their own."""

import threading
import time

from hetjax import processes
from hetjax.fleet.elastic import ElasticCarrier
from hetjax.fleet.registration import Registration
from hetjax.fleet.registry import Patience
from hetjax.fleet.rendezvous import free_port
from hetjax.fleet.service import Rendezvous
from hetjax.recovery import Left

LIMITS = Patience(silent=60.0, answer=60.0, confirm=60.0)


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
        holders: processes that hold each piece of the optimizer state.
        min_members: the run stops when fewer are left.
    """

    def __init__(self, work, members, holders=2, min_members=1):
        self.work, self.members, self.holders, self.min_members = work, members, holders, min_members
        self.threads, self.results, self.errors, self.links = [], {}, {}, {}

    def start(self, joins=False):
        thread = threading.Thread(target=self._run, args=(joins,), daemon=True)
        self.threads.append(thread)
        thread.start()

    def join(self, link, limit=60.0):
        """Let one more member join, and wait until it is proposed to all that train; `link`: one of them."""
        before, deadline = link.registration.newest.numbers, time.monotonic() + limit
        self.start(joins=True)
        knows = lambda number: set(self.links[number].registration.newest.numbers) > set(before)
        while not all(map(knows, before)) and not self.errors:
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def _run(self, joins):
        register = lambda place, notify: Registration(self.address, joins=joins, notify=notify, **place)
        link = ElasticCarrier(
            register, self.address, expected=self.members, holders=self.holders, joins=joins, wait_limit=60.0
        )
        PerThread.local.link, number = link, link.number
        self.links[number], finished = link, False
        try:
            self.results[number] = self.work(link)
            finished = True
        except (Left, Killed):
            pass
        except BaseException as error:
            self.errors[number] = error
        link.close(together=finished)

    def end(self, limit=60.0):
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
        self.address = f"127.0.0.1:{free_port('127.0.0.1')}"
        self.rendezvous = Rendezvous(self.address, self.members, min_members=self.min_members, limits=LIMITS)
        processes.join(PerThread())
        for _ in range(self.members):
            self.start()
        return self

    def __exit__(self, *_):
        processes.join(None)
        self.rendezvous.close()
