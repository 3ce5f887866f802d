"""Exchange small values between processes before the first step; later values travel in the sum of each step."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from hetjax.devices.compile import expected
from hetjax.state import State


class Disagreement(RuntimeError):
    """Processes that must make the same decision made different ones."""


def gather(value: Any) -> list[Any]:
    """Gather a JSON value from every process, in process order. All processes must call this."""
    if jax.process_count() == 1:
        return [value]
    text = np.frombuffer(json.dumps(value).encode(), np.uint8)
    sizes = _rows_of_all(np.array([len(text)], np.int32)).reshape(-1)
    padded = np.zeros(int(sizes.max()), np.uint8)
    padded[: len(text)] = text
    return [json.loads(bytes(row[:size])) for row, size in zip(_rows_of_all(padded), sizes, strict=True)]


def _rows_of_all(row: np.ndarray) -> np.ndarray:
    """Gather one row per process over the first device of each; JAX's own needs equal numbers of devices."""
    first = {device.process_index: device for device in reversed(jax.devices())}
    mesh = Mesh([first[process] for process in sorted(first)], ("process",))
    sharded, replicated = (NamedSharding(mesh, PartitionSpec(*axis)) for axis in (("process",), ()))
    placed = jax.device_put(row[None], first[jax.process_index()])
    stacked = jax.make_array_from_single_device_arrays((len(first), len(row)), sharded, [placed])
    with expected():
        gathered = jax.jit(lambda x: x, out_shardings=replicated)(stacked)
    return np.asarray(gathered.addressable_data(0))


def gather_rows(own: np.ndarray, rows_P: Sequence[int]) -> list[np.ndarray]:
    """Gather arrays that differ in their number of rows, `rows_P[p]` of process p. All processes must call this."""
    padded = np.zeros((max(rows_P), *own.shape[1:]), own.dtype)
    padded[: len(own)] = own
    bytes_PxN = _rows_of_all(padded.reshape(-1).view(np.uint8))
    return [row.view(own.dtype).reshape(padded.shape)[:rows] for row, rows in zip(bytes_PxN, rows_P, strict=True)]


def same(**values: Any) -> None:
    """Raise ValueError if processes differ in any of these JSON values, naming the value and the processes."""
    gathered = gather(values)
    for name in values:
        odd = [process for process, theirs in enumerate(gathered) if not _equal(theirs[name], gathered[0][name])]
        if odd:
            raise ValueError(
                f"Process {', '.join(map(str, odd))} differs from process 0 in its {name.replace('_', ' ')}: "
                f"{_short(gathered[odd[0]][name])} instead of {_short(gathered[0][name])}. Start all processes with "
                "the same code, flags and data."
            )


def same_start(state: State, **options: Any) -> None:
    """Raise ValueError unless all processes start from the same state with the same options."""
    one_set = state.replicas == 0  # otherwise every process has its own
    of = lambda tree: digest(tree) if one_set else None
    same(
        **options,
        position=[state.step, state.cursor],
        parameters=digest(state.params) if one_set else state.replicas,
        model_state=of(state.model_state),
        state_of_the_optimizer=of(state.opt_state),
        moving_average=of(state.ema),
    )


def _equal(a: Any, b: Any) -> bool:
    """Equality of JSON values in which NaN equals NaN."""
    return a == b or json.dumps(a, sort_keys=True) == json.dumps(b, sort_keys=True)


def digest(tree: Any) -> str:
    """Hash of a tree of arrays, to compare between processes."""
    result = hashlib.sha256()
    for leaf in jax.tree.leaves(tree):
        key = isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        result.update(np.asarray(jax.random.key_data(leaf) if key else leaf).tobytes())
    return result.hexdigest()


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
