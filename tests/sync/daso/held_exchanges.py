"""Exchanges between processes that are held until they are received, and seem to take longer than any training."""

import threading
from dataclasses import replace
from unittest import mock

from hetjax.sync.daso import across


class HeldExchange(across.BackgroundExchange):
    """Stays pending until its result is asked for; a step that waited for it in any other way would never end."""

    def __init__(self):
        super().__init__()
        self.received = threading.Event()

    def set(self, result, exception=None):
        self.received.wait()
        super().set(result and replace(result, seconds=1e6), exception)

    def result(self):
        self.received.set()
        return super().result()


def held_exchanges():
    """A context in which all exchanges between processes are held."""
    return mock.patch.object(across, "BackgroundExchange", HeldExchange)
