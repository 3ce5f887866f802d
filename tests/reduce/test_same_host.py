"""Memory that processes of one host share: what others read, and who cannot."""

import os
import subprocess
import sys
import threading

import numpy as np
import pytest

from hetjax import processes
from hetjax.reduce import same_host
from hetjax.reduce.same_host import SameHost

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="memfd is of Linux")


class Meeting:
    """`processes.gather` and `processes.index` for threads that stand for processes."""

    def __init__(self, count):
        self.count, self.barrier, self.values, self.own = count, threading.Barrier(count), {}, threading.local()

    def index(self):
        return self.own.index

    def gather(self, value):
        self.values[self.own.index] = value
        self.barrier.wait(10)
        found = [self.values[k] for k in range(self.count)]
        self.barrier.wait(10)
        return found


def made(count, monkeypatch, sizes=(5, 100, 3), network=None, turns=1):
    """The shared memory of each of these processes."""
    meeting, found = Meeting(count), {}
    monkeypatch.setattr(processes, "gather", meeting.gather)
    monkeypatch.setattr(processes, "index", meeting.index)
    if network is not None:
        monkeypatch.setattr(same_host, "host_name", lambda: network[meeting.index()])

    def run(k):
        meeting.own.index = k
        found[k] = SameHost(sizes, np.dtype(np.float32), turns)

    threads = [threading.Thread(target=run, args=(k,)) for k in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[k] for k in range(count)]


def test_others_read_what_a_process_writes_and_nothing_overlaps(monkeypatch):
    all_of = made(3, monkeypatch)
    for k, own in enumerate(all_of):
        assert own.readers == {0, 1, 2} - {k}
        for piece in range(3):
            own.sums(piece)[:] = 100 * k + piece
            own.result(piece)[:] = 1000 + 100 * k + piece
    for k, reader in enumerate(all_of):
        for peer in {0, 1, 2} - {k}:
            for piece, size in enumerate((5, 100, 3)):
                np.testing.assert_array_equal(reader.sums(piece, peer), np.full(size, 100 * peer + piece))
                np.testing.assert_array_equal(reader.result(piece, peer), np.full(size, 1000 + 100 * peer + piece))
                assert not reader.sums(piece, peer).flags.writeable


def test_sums_of_the_step_before_can_still_be_read(monkeypatch):
    """As a second holder does, for whom the sender does not wait."""
    sender, reader = made(2, monkeypatch, turns=2)
    for step in range(4):
        for one in (sender, reader):
            one.begin()
        before = reader.sums(1, 0).copy(), reader.sums(1, 0)
        sender.begin()  # it is ahead of the reader
        sender.sums(1)[:] = step
        np.testing.assert_array_equal(*before)
        sender.begin()


def test_another_network_counts_as_another_host(monkeypatch):
    """Otherwise shared memory would get around the link between two namespaces of one machine."""
    first, second, third = made(3, monkeypatch, network=["a", "b", "a"])
    assert (first.readers, second.readers, third.readers) == ({2}, frozenset(), {0})


def test_the_file_of_a_process_that_is_none_of_ours_is_not_read():
    sleeper = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert same_host._mapped(sleeper.pid, 1, b"0" * 16) is None
        assert same_host._mapped(2**22 + 1, 3, b"0" * 16) is None
        assert same_host._mapped(os.getpid(), 0, b"0" * 16) is None
    finally:
        sleeper.communicate(b"\n")
    memory, descriptor = same_host._created(8192, b"1" * 16)
    assert same_host._mapped(os.getpid(), descriptor, b"0" * 16) is None  # another run
    assert same_host._mapped(os.getpid(), descriptor, b"1" * 16) is not None
    os.close(descriptor)
    assert memory is not None
