"""Exchanges between processes, each of which is a node: carried out beside the training, by a device of their own.

On a CPU a collective and compute on the same device run one after the other, so that nothing would overlap; a second
CPU device of the process does nothing but the exchanges, and a thread waits for it. The same device serves the nodes
whose workers are GPUs or TPUs: parameters then travel by way of the host, beside the steps. XLA could hide a collective
behind the compute of the same program there, but that program would have to be one and the same on all nodes, entered
by all of them at once: nodes would wait for each other in every step that carries a part of an exchange, a late one
would stop all, and none could have engines, counts, kinds of device or a number of steps of its own.

Who has not come to an exchange yet: a collective that waits does not say for whom.
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
from hetjax.sync.daso.exchange import KINDS, Arrived, NodeMessage, as_words, from_words, on_node, weight_type


class Attendance:
    """Every process notes the number of the last exchange it came to, in the key-value store of `jax.distributed`."""

    def __init__(self, meeting: int, nodes: int):
        self.folder, self.nodes = f"hetjax/exchanges/{meeting}", nodes

    def announce(self, number: int) -> None:
        client = _client()
        if client is not None:
            client.key_value_set(f"{self.folder}/{jax.process_index()}", str(number), allow_overwrite=True)

    def missing(self, number: int) -> list[int]:
        """The nodes that have not come to this exchange."""
        client = _client()
        if client is None:
            return []
        return [node for node in range(self.nodes) if self._last(client, node) < number]

    def _last(self, client: Any, node: int) -> int:
        try:
            return int(client.key_value_try_get(f"{self.folder}/{node}"))
        except Exception:  # it never came; the store has an error of its own kind for that
            return 0

    def sentence(self, number: int, limit: float) -> str:
        missing = self.missing(number)
        who = f"node {', '.join(map(str, missing))} did not come" if missing else "its data did not arrive"
        return (
            f"Exchange {number} between the nodes is not over after {limit:.0f} s: {who}. It may have stopped, be very "
            "slow or cut off. Look at that process; start again from the last checkpoint, or raise wait_limit."
        )


def _client() -> Any:
    from jax._src.distributed import global_state

    return global_state.client


_meetings = itertools.count()  # all processes open their exchanges in the same order


class ProcessExchange:
    """An exchange under way. Its thread sets what arrived, or what went wrong."""

    def __init__(self, number: int, limit: float, attendance: Attendance):
        self.number, self.limit, self.attendance = number, limit, attendance
        self._done = threading.Event()
        self._arrived: Arrived | None = None
        self._failure: BaseException | None = None

    def set(self, arrived: Arrived | None, failure: BaseException | None = None) -> None:
        self._arrived, self._failure = arrived, failure
        self._done.set()

    @property
    def done(self) -> bool:
        return self._done.is_set()

    def result(self) -> Arrived:
        if not self._done.wait(self.limit):
            raise TimeoutError(self.attendance.sentence(self.number, self.limit))
        if self._failure is not None:
            raise self._failure
        assert self._arrived is not None
        return self._arrived


class AcrossProcesses:
    """carriers: the device of each process that carries the exchanges; limit: most seconds to wait for one.

    link: bits a second of a simulated link between nodes, for studies on one machine; None for what there is.
    """

    def __init__(self, carriers: Sequence[jax.Device], limit: float, link: float | None = None):
        self.nodes, self.limit, self.link = len(carriers), limit, link
        self.carrier = carriers[jax.process_index()]
        mesh = Mesh(np.array(carriers), (NODE,), axis_types=(AxisType.Auto,))
        self._sharded, self._replicated = NamedSharding(mesh, P(NODE)), NamedSharding(mesh, P())
        self._before: list[jax.Array] = []
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
        self._attendance = Attendance(next(_meetings), self.nodes)
        self._numbers = itertools.count(1)
        self._orders: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=self._serve, name="hetjax-exchange", daemon=True).start()

    def rebase(self, leaves: Sequence[Any]) -> None:
        self._before = [self._on_all(leaf) for leaf in leaves]

    def start(
        self, kind: str, leaves_n: Sequence[Sequence[Any]], weight_n: Sequence[float], notes_n: np.ndarray
    ) -> ProcessExchange:
        flight = ProcessExchange(next(self._numbers), self.limit, self._attendance)
        self._orders.put((flight, kind, leaves_n[0], weight_n[0], notes_n[0]))
        return flight

    def close(self) -> None:
        """End the thread, once it has done what it was asked for."""
        self._orders.put(None)

    def prepare(self, kind: str, shapes: Leaves) -> None:
        zeros = [np.zeros(x.shape, x.dtype) for x in shapes]
        self.rebase(zeros)
        self.start(kind, [zeros], [1.0], NodeMessage().array()[None]).result()

    # -- in the thread --

    def _serve(self) -> None:
        while (order := self._orders.get()) is not None:
            flight, *what = order
            try:
                flight.set(self._carry(flight.number, *what))
            except BaseException as error:  # it belongs to whoever waits for this flight
                flight.set(None, error)

    def _carry(self, number: int, kind: str, leaves: Leaves, weight: float, notes: np.ndarray) -> Arrived:
        self._attendance.announce(number)
        began = time.perf_counter()
        sent = [self._own(leaf) for leaf in leaves]
        said = self._own(as_words(notes)[None])
        before = self._before if kind == "short" else []
        with expected():
            found, words = self._programs[kind](sent, self._own(np.full(1, weight, weight_type())), before, said)
        jax.block_until_ready(found)
        if kind == "short":
            self._before = found
        table = from_words(np.asarray(words.addressable_data(0)))
        size = bytes_sent(kind, leaves, self.nodes)
        if self.link is not None:
            time.sleep(max(0.0, began + 8 * size / self.link - time.perf_counter()))
        return Arrived([x.addressable_data(0) for x in found], table, time.perf_counter() - began, size)

    def _own(self, x: Any) -> jax.Array:
        """This process's part [1, ...] of an array over all nodes."""
        placed = jax.device_put(x, self.carrier)
        return jax.make_array_from_single_device_arrays((self.nodes, *x.shape[1:]), self._sharded, [placed])

    def _on_all(self, x: Any) -> jax.Array:
        """An array that is the same in all processes."""
        return jax.make_array_from_single_device_arrays(x.shape, self._replicated, [jax.device_put(x, self.carrier)])


def _on_carrier(
    kind: str, nodes: int, leaves: Leaves, weight_1: jax.Array, before: Leaves, words_1xK: jax.Array
) -> tuple[Leaves, jax.Array]:
    return on_node(kind, nodes, leaves, weight_1[0], before), gathered(words_1xK[0])
