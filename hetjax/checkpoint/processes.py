"""Several processes and one checkpoint: the first one gathers and writes, and reads for all; its disk is enough."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from hetjax.devices.compile import expected

_PIECE = 2**26  # bytes sent at a time


def host_copy(leaf: Any) -> np.ndarray | None:
    """An array on the host of the first process, None on the others. All have to call this, in the same order.

    Really a copy: on a CPU a view of the buffer would keep the next step from using it again.
    """
    if isinstance(leaf, jax.Array) and not (leaf.is_fully_replicated or leaf.is_fully_addressable):
        with expected():
            whole = multihost_utils.process_allgather(leaf, tiled=True)
    else:
        whole = leaf if jax.process_index() == 0 else None
    return np.array(whole) if jax.process_index() == 0 else None


def from_first(content: bytes | None) -> bytes:
    """The bytes that the first process gives, on all of them. All have to call this; outside of steps."""
    if jax.process_count() == 1:
        assert content is not None
        return content
    given = b"" if content is None else content
    size = int.from_bytes(_sent(len(given).to_bytes(8, "little"), 8), "little")
    pieces = [_sent(given[place : place + _PIECE], min(_PIECE, size - place)) for place in range(0, size, _PIECE)]
    return b"".join(pieces)


def _sent(piece: bytes, size: int) -> bytes:
    """As a sum to which only the first process adds, over one device of each."""
    devices = {device.process_index: device for device in reversed(jax.devices())}
    mesh = Mesh([devices[process] for process in sorted(devices)], ("process",))
    mine = np.zeros((1, size), np.uint8)
    if jax.process_index() == 0:
        mine[0] = np.frombuffer(piece, np.uint8)
    placed = jax.device_put(mine, devices[jax.process_index()])
    spread, whole = (NamedSharding(mesh, PartitionSpec(*axis)) for axis in (("process",), ()))
    stacked = jax.make_array_from_single_device_arrays((len(devices), size), spread, [placed])
    with expected():
        total = jax.jit(lambda x: x.sum(0, dtype=np.uint8), out_shardings=whole)(stacked)
    return np.asarray(total.addressable_data(0)).tobytes()
