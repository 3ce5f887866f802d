"""Exchanges between processes, each of which is a node: carried out in the background, by way of the hosts.

A thread reads the parameters from the node's first worker and reduces them over the carrier, beside the steps. XLA
could overlap a collective with the computation of the same program, but all nodes would have to enter that one program
together: they would wait for each other in every such step, a straggler would stop all, and no node could have its own
engine, counts, kind of device or number of steps.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from hetjax.fleet.slice_exchange import SliceExchange
from hetjax.processes import ProcessLink
from hetjax.sync.daso.averaging import Leaves, bytes_sent, combine, incoming, outgoing
from hetjax.sync.daso.exchange import ExchangeResult


class BackgroundExchange:
    """A pending exchange between processes; the exchange thread sets its result or its exception."""

    def __init__(self) -> None:
        self._done = threading.Event()
        self._result: ExchangeResult | None = None
        self._exception: BaseException | None = None

    def set(self, result: ExchangeResult | None, exception: BaseException | None = None) -> None:
        """Complete the exchange."""
        self._result, self._exception = result, exception
        self._done.set()

    @property
    def done(self) -> bool:
        return self._done.is_set()

    def result(self) -> ExchangeResult:
        self._done.wait()  # the thread has limits for all that it waits for
        if self._exception is not None:
            raise self._exception
        assert self._result is not None
        return self._result


class CrossProcessExchange:
    """Exchanges between processes.

    Args:
        link: joins the processes, which are the nodes.
        limit: seconds that an exchange may take, straggling nodes included.
        bandwidth: bits per second of a simulated link between nodes; None: no simulation.
    """

    def __init__(self, link: ProcessLink, limit: float, bandwidth: float | None = None):
        self.nodes, self.limit, self.bandwidth = link.count, limit, bandwidth
        self.slices = SliceExchange(link)
        self._base: list[np.ndarray] = []
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=self._serve, name="hetjax-exchange", daemon=True).start()

    def rebase(self, leaves: Leaves) -> None:
        self._base = [np.asarray(leaf) for leaf in leaves]

    def start(
        self, kind: str, leaves_n: Sequence[Leaves], weight_n: Sequence[float], message_nxK: np.ndarray
    ) -> BackgroundExchange:
        pending = BackgroundExchange()
        self._queue.put((pending, kind, leaves_n[0], np.array([weight_n[0], *message_nxK[0]], np.float64)))
        return pending

    def close(self) -> None:
        """End the thread after the exchanges already started."""
        self._queue.put(None)

    # -- in the thread --

    def _serve(self) -> None:
        while (item := self._queue.get()) is not None:
            pending, *arguments = item
            try:
                pending.set(self._run(*arguments))
            except BaseException as error:  # raised in the thread that waits for this exchange
                pending.set(None, error)

    def _run(self, kind: str, leaves: Leaves, message: np.ndarray) -> ExchangeResult:
        began = time.perf_counter()
        sent = outgoing(kind, leaves, self._base)
        weights = lambda messages: np.array([np.frombuffer(each, np.float64)[0] for each in messages])
        reduced, messages = self.slices(
            sent, lambda _, part_N, messages: combine(kind, part_N, weights(messages)), message.tobytes(), self.limit
        )
        result = incoming(kind, reduced, leaves, self._base)
        if kind == "compressed":
            self._base = result
        size = bytes_sent(kind, leaves, self.nodes)
        if self.bandwidth is not None:
            time.sleep(max(0.0, began + 8 * size / self.bandwidth - time.perf_counter()))
        message_NxK = np.array([np.frombuffer(each, np.float64)[1:] for each in messages])
        return ExchangeResult(result, message_NxK, time.perf_counter() - began, size)
