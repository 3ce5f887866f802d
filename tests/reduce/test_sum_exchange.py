"""One exchange of sums with messages in any order: the same bits, and nothing that has come waits for the last one."""

from functools import reduce
from types import SimpleNamespace

import numpy as np
import pytest

from hetjax.reduce.exchange import SumExchange
from hetjax.reduce.finite import NONFINITE
from hetjax.reduce.host import LEVEL, HostSums
from hetjax.reduce.layout import SLOTS

SEED, PROCESSES, PIECES, SIZE = 7, 4, 3, 50


class Channel:
    """Messages of others, which come one by one, in a given order, when nothing else is there."""

    def __init__(self, messages, order):
        self.messages, self.order, self.mail = messages, list(order), {}
        self.carrier, self.round = SimpleNamespace(wait_limit=1), 0

    def _come(self):
        key = self.order.pop(0)
        self.mail[key] = [memoryview(self.messages[key].tobytes())]

    def first_arrived(self, keys):
        while not any(key in self.mail for key in keys):
            self._come()
        return next(key for key in keys if key in self.mail)

    def receive(self, *key):
        self.first_arrived([key])
        return self.mail.pop(key)

    def take(self, *key):
        return self.mail.pop(key, None)

    def send(self, to, piece, buffers):
        return SimpleNamespace(done=True, wait=lambda limit: None)


def exchange_of(me, order=None, value=None):
    """The exchange of this process, its own parts, and the tails and pieces of all."""
    rng = np.random.default_rng(SEED)
    parts_P = [(rng.normal(size=PIECES * SIZE) * 10.0 ** rng.integers(-6, 6)).astype(np.float32) for _ in range(4)]
    if value is not None:
        parts_P[2][:] = value
    pieces = [parts.reshape(PIECES, SIZE) for parts in parts_P]
    tails = rng.normal(size=(PROCESSES, 2)).astype(np.float32)
    messages = {(p, 0): tails[p] for p in range(PROCESSES)}
    messages |= {(p, 1 + k): pieces[p][k] for p in range(PROCESSES) for k in range(PIECES)}
    theirs = [key for key in messages if key[0] != me]
    order = [theirs[i] for i in rng.permutation(len(theirs))] if order is None else order(theirs)
    runs = [[(0, k * SIZE, (k + 1) * SIZE)] for k in range(PIECES)]
    exchange = SumExchange(Channel(messages, order), me, runs, np.float32)
    return exchange, [parts_P[me]], tails, pieces


def reading(scratch):
    """As pieces that travel cut are read: into memory that is used again."""

    def read(frames, sender):
        scratch[:] = np.frombuffer(frames[0], np.float32)
        return [scratch]

    return read


@pytest.mark.parametrize("me", range(PROCESSES))
@pytest.mark.parametrize("cut", [False, True])
def test_sums_have_the_same_bits_in_any_order_of_arrival(me, cut):
    exchange, parts, tails, pieces = exchange_of(me)
    given = parts, range(PROCESSES), reading(np.empty(SIZE, np.float32)) if cut else None
    add = lambda: [message for k in exchange.own for message in exchange.add_arrived(k, *given)]
    tail = exchange.tail(tails[me], range(PROCESSES), add)
    np.testing.assert_array_equal(tail, reduce(np.add, list(tails)))
    for k in range(PIECES):
        (total,) = exchange.total(k, *given)
        np.testing.assert_array_equal(total, reduce(np.add, [pieces[p][k] for p in range(PROCESSES)]))
    assert not exchange.channel.mail


def test_what_has_come_is_added_before_the_last_tail():
    """Process 3 is the slowest: by its tail all the others have been added."""
    last_at_the_end = lambda keys: sorted(keys, key=lambda key: (key[0] == 3, key))
    exchange, parts, tails, _ = exchange_of(1, last_at_the_end)
    add = lambda: [message for k in exchange.own for message in exchange.add_arrived(k, parts, range(PROCESSES))]
    exchange.tail(tails[1], range(PROCESSES), add)
    assert {key[0] for key in exchange.channel.order} == {3}
    assert not exchange.channel.mail


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_the_rest_of_sums_that_nobody_needs_is_taken(value):
    exchange, parts, tails, _ = exchange_of(0, value=value)
    add = lambda: [message for k in exchange.own for message in exchange.add_arrived(k, parts, range(PROCESSES))]
    exchange.tail(tails[0], range(PROCESSES), add)
    for k in range(PIECES):
        exchange.drop(k, range(PROCESSES))
    assert not exchange.channel.mail
    assert not exchange.channel.order


class ThreeWorkers:
    local = range(3)

    def __len__(self):
        return 3


def test_only_workers_whose_sums_are_not_finite_are_reported():
    """Not one whose squares overflow."""
    own = SimpleNamespace(
        workers=ThreeWorkers(), layout=SimpleNamespace(values=2), me=0, everyone=[0],
        exchange=SimpleNamespace(vector_sum=lambda own_W, *_, **__: own_W, send_arrays=lambda *_: None, end=int),
    )  # fmt: skip
    parts_w = [(np.full((1, 4), value, np.float32), np.ones((1, 2), np.float32)) for value in (1e30, np.nan, -np.inf)]
    tail = np.zeros(2 + 3 * len(SLOTS), np.float32)
    tail = HostSums.report_bad(own, tail, NONFINITE, False, parts_w, [0])
    assert tail[2:].reshape(3, -1)[:, LEVEL].tolist() == [0, NONFINITE, NONFINITE]
