"""What processes tell each other outside of steps: small plain values, gathered before the first step.

Everything after that rides in the one sum of a step.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from hetjax.devices.compile import expected


class Disagreement(RuntimeError):
    """Processes that have to decide alike have not."""


def gather(value: Any) -> list[Any]:
    """The JSON values that all processes gave, in process order. All of them have to call this."""
    if jax.process_count() == 1:
        return [value]
    text = np.frombuffer(json.dumps(value).encode(), np.uint8)
    sizes = _rows_of_all(np.array([len(text)], np.int32)).reshape(-1)
    padded = np.zeros(int(sizes.max()), np.uint8)
    padded[: len(text)] = text
    return [json.loads(bytes(said[:size])) for said, size in zip(_rows_of_all(padded), sizes, strict=True)]


def _rows_of_all(row: np.ndarray) -> np.ndarray:
    """One row of every process, over the first device of each: JAX's own way needs as many devices in all of them."""
    first = {device.process_index: device for device in reversed(jax.devices())}
    mesh = Mesh([first[process] for process in sorted(first)], ("process",))
    spread, whole = (NamedSharding(mesh, PartitionSpec(*axis)) for axis in (("process",), ()))
    placed = jax.device_put(row[None], first[jax.process_index()])
    stacked = jax.make_array_from_single_device_arrays((len(first), len(row)), spread, [placed])
    with expected():
        gathered = jax.jit(lambda x: x, out_shardings=whole)(stacked)
    return np.asarray(gathered.addressable_data(0))


def same(**values: Any) -> None:
    """Refuse to go on where processes differ in one of these JSON values, naming it and them."""
    said = gather(values)
    for name in values:
        odd = [process for process, theirs in enumerate(said) if not _equal(theirs[name], said[0][name])]
        if odd:
            raise ValueError(
                f"Process {', '.join(map(str, odd))} differs from process 0 in its {name.replace('_', ' ')}: "
                f"{_short(said[odd[0]][name])} instead of {_short(said[0][name])}. Start all processes with the same "
                "code, flags and data."
            )


def _equal(a: Any, b: Any) -> bool:
    """Of JSON values, where NaN equals NaN: both processes were given the same."""
    return a == b or json.dumps(a, sort_keys=True) == json.dumps(b, sort_keys=True)


def digest(tree: Any) -> str:
    """A fingerprint of a tree of arrays, to compare between processes."""
    found = hashlib.sha256()
    for leaf in jax.tree.leaves(tree):
        key = isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        found.update(np.asarray(jax.random.key_data(leaf) if key else leaf).tobytes())
    return found.hexdigest()


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
