"""Exchanges between processes, each of which is a node: carried out in the background, on a device of their own.

On a CPU a collective and computation on the same device run one after the other, so nothing would overlap. A second CPU
device of the process, the carrier, therefore does nothing but exchanges, and a thread waits for it. It also serves
nodes whose workers are GPUs or TPUs: their parameters travel through the host, beside the steps. XLA could overlap a
collective with the computation of the same program there, but all nodes would have to enter that one program together:
they would wait for each other in every such step, a straggler would stop all, and no node could have its own engine,
counts, kind of device or number of steps.
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from hetjax.devices.compile import expected
from hetjax.sync.daso.averaging import NODE, Leaves, bytes_sent, gathered
from hetjax.sync.daso.exchange import (
    KINDS,
    ExchangeResult,
    NodeMessage,
    as_words,
    from_words,
    reduce_over_nodes,
    weight_type,
)


class ExchangeProgress:
    """The last exchange that each process has entered, in the key-value store of `jax.distributed`.

    A blocked collective does not say which process is missing; this does.
    """

    def __init__(self, session: int, nodes: int):
        """session: distinguishes the exchanges of several runs in one process."""
        self.folder, self.nodes = f"hetjax/exchanges/{session}", nodes

    def announce(self, number: int) -> None:
        """Record that this process enters an exchange."""
        client = _client()
        if client is not None:
            client.key_value_set(f"{self.folder}/{jax.process_index()}", str(number), allow_overwrite=True)

    def missing(self, number: int) -> list[int]:
        """The nodes that have not entered this exchange."""
        if _client() is None:
            return []
        return [node for node in range(self.nodes) if self.last(node) < number]

    def last(self, node: int) -> int:
        """The last exchange that a node has entered, counted from 1; 0 if none."""
        try:
            return int(_client().key_value_try_get(f"{self.folder}/{node}"))
        except Exception:  # no entry yet; the store's exception for that is private
            return 0

    def timeout_message(self, number: int, limit: float) -> str:
        """The error message for an exchange that exceeded its time limit."""
        missing = self.missing(number)
        cause = f"node {', '.join(map(str, missing))} did not enter it" if missing else "its data did not arrive"
        return (
            f"Exchange {number} between the nodes did not complete within {limit:.0f} s: {cause}. The node may have "
            "stopped, be very slow, or have lost its connection. Check that process; restart from the last checkpoint, "
            "or raise wait_limit."
        )


def _client() -> Any:
    from jax._src.distributed import global_state

    return global_state.client


_sessions = itertools.count()  # equal in all processes, since all open their exchanges in the same order


class BackgroundExchange:
    """A pending exchange between processes; the exchange thread sets its result or its exception."""

    def __init__(self, number: int, limit: float, progress: ExchangeProgress):
        self.number, self.limit, self.progress = number, limit, progress
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
        if not self._done.wait(self.limit):
            raise TimeoutError(self.progress.timeout_message(self.number, self.limit))
        if self._exception is not None:
            raise self._exception
        assert self._result is not None
        return self._result


class CrossProcessExchange:
    """Exchanges between processes.

    Args:
        carriers: the device of each process that carries out the exchanges.
        limit: seconds to wait for an exchange.
        link: bandwidth in bits per second of a simulated link between nodes; None: no simulation.
    """

    def __init__(self, carriers: Sequence[jax.Device], limit: float, link: float | None = None):
        self.nodes, self.limit, self.link = len(carriers), limit, link
        self.carrier = carriers[jax.process_index()]
        mesh = Mesh(np.array(carriers), (NODE,), axis_types=(AxisType.Auto,))
        self._sharded, self._replicated = NamedSharding(mesh, P(NODE)), NamedSharding(mesh, P())
        self._base: list[jax.Array] = []
        self._programs = {
            kind: jax.jit(
                jax.shard_map(
                    partial(_on_carrier, kind, self.nodes),
                    mesh=mesh,
                    in_specs=(P(NODE), P(NODE), P(), P(NODE)),
                    out_specs=(P(), P()),
                    check_vma=False,
                )
            )
            for kind in KINDS
        }
        self.progress = ExchangeProgress(next(_sessions), self.nodes)
        self._numbers = itertools.count(1)
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=self._serve, name="hetjax-exchange", daemon=True).start()

    def rebase(self, leaves: Sequence[Any]) -> None:
        self._base = [self._on_all(leaf) for leaf in leaves]

    def start(
        self, kind: str, leaves_n: Sequence[Sequence[Any]], weight_n: Sequence[float], message_nxK: np.ndarray
    ) -> BackgroundExchange:
        pending = BackgroundExchange(next(self._numbers), self.limit, self.progress)
        self._queue.put((pending, kind, leaves_n[0], weight_n[0], message_nxK[0]))
        return pending

    def close(self) -> None:
        """End the thread after the exchanges already started."""
        self._queue.put(None)

    def prepare(self, kind: str, shapes: Leaves) -> None:
        zeros = [np.zeros(x.shape, x.dtype) for x in shapes]
        self.rebase(zeros)
        self.start(kind, [zeros], [1.0], NodeMessage().array()[None]).result()

    # -- in the thread --

    def _serve(self) -> None:
        while (item := self._queue.get()) is not None:
            pending, *arguments = item
            try:
                pending.set(self._run(pending.number, *arguments))
            except BaseException as error:  # raised in the thread that waits for this exchange
                pending.set(None, error)

    def _run(self, number: int, kind: str, leaves: Leaves, weight: float, message: np.ndarray) -> ExchangeResult:
        self.progress.announce(number)
        began = time.perf_counter()
        sent = [self._own(leaf) for leaf in leaves]
        words = self._own(as_words(message)[None])
        base = self._base if kind == "compressed" else []
        with expected():
            reduced, words_NxK = self._programs[kind](sent, self._own(np.full(1, weight, weight_type())), base, words)
        jax.block_until_ready(reduced)
        if kind == "compressed":
            self._base = reduced
        message_NxK = from_words(np.asarray(words_NxK.addressable_data(0)))
        size = bytes_sent(kind, leaves, self.nodes)
        if self.link is not None:
            time.sleep(max(0.0, began + 8 * size / self.link - time.perf_counter()))
        return ExchangeResult([x.addressable_data(0) for x in reduced], message_NxK, time.perf_counter() - began, size)

    def _own(self, x: Any) -> jax.Array:
        """This process's part [1, ...] of an array over all nodes."""
        placed = jax.device_put(x, self.carrier)
        return jax.make_array_from_single_device_arrays((self.nodes, *x.shape[1:]), self._sharded, [placed])

    def _on_all(self, x: Any) -> jax.Array:
        """A replicated array, from the equal copies of all processes."""
        return jax.make_array_from_single_device_arrays(x.shape, self._replicated, [jax.device_put(x, self.carrier)])


def _on_carrier(
    kind: str, nodes: int, leaves: Leaves, weight_1: jax.Array, base: Leaves, words_1xK: jax.Array
) -> tuple[Leaves, jax.Array]:
    return reduce_over_nodes(kind, nodes, leaves, weight_1[0], base), gathered(words_1xK[0])
