"""A link to processes that do not exist: acts as one process of several, with given answers of the others."""

import json

from hetjax import processes


class FakeLink:
    """Joins nothing; what a test wants to hear of other processes is given as functions."""

    def __init__(self, index, count, gathered=None, broadcast=None, transport="host"):
        self.index, self.count, self.transport = index, count, transport
        self.first, self.elastic = index == 0, 0
        self._gathered, self._broadcast = gathered, broadcast

    def gather(self, content):
        rows = self._gathered(json.loads(content))
        return [json.dumps(row).encode() for row in rows]

    def broadcast(self, content):
        return self._broadcast(content)


def act_as(monkeypatch, index, count=2, **answers):
    """Be process `index` until the test ends."""
    monkeypatch.setattr(processes, "_link", FakeLink(index, count, **answers))
