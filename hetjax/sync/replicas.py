"""Replicas of a model, stacked along a leading axis: broadcast from one set of parameters, and averaged to one."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from hetjax import processes
from hetjax.devices.workers import AXIS, Workers
from hetjax.fleet.slice_exchange import SliceExchange
from hetjax.reduce.trainable import trained_core, with_trained_core
from hetjax.state import ReplicaStack, State

Tree = Any


def wide_sum(parts: Sequence[np.ndarray], share_N: Sequence[float] | None = None) -> np.ndarray:
    """Sum_j share_j x_j over arrays of one dtype, in their order and in at least float32; integers in float64."""
    dtype = parts[0].dtype
    wide = jnp.promote_types(dtype, jnp.float32) if jnp.issubdtype(dtype, jnp.inexact) else np.dtype(np.float64)
    total = None
    for j, part in enumerate(parts):
        term = part.astype(wide, copy=False)
        term = term if share_N is None else term * wide.type(share_N[j])
        if total is None:
            total = np.array(term) if share_N is None else term
        else:
            total += term
    assert total is not None
    return total


def narrowed(mean: np.ndarray, dtype: Any) -> np.ndarray:
    """A mean in the dtype of its terms: integers, step counters, are rounded to the nearest."""
    return (mean if jnp.issubdtype(dtype, jnp.inexact) else np.round(mean)).astype(dtype, copy=False)


def replica(x: Any, index: int) -> Any:
    """The part [1, ...] of a stacked array, of a replica of this process."""
    if isinstance(x, ReplicaStack):
        return x.pieces[index - x.first]
    return x[index : index + 1] if _is_key(x) else np.asarray(x)[index : index + 1]


def stacked(pieces: Sequence[Any], first: int, count: int) -> Any:
    """One array [count, ...] of replicas: a JAX array if one program can span them, else a `ReplicaStack`.

    Args:
        pieces: the replicas of this process, each [1, ...] on its device.
        first: index of the first of them.
        count: number of replicas of all processes.
    """
    devices = tuple(device for piece in pieces for device in piece.devices())
    if len(pieces) < count or any(device.client is not devices[0].client for device in devices):
        return ReplicaStack(pieces, first, count)
    return jax.make_array_from_single_device_arrays((count, *pieces[0].shape[1:]), _over(devices), list(pieces))


@functools.cache
def _over(devices: tuple[jax.Device, ...]) -> NamedSharding:
    return NamedSharding(Mesh(np.array(devices), (AXIS,), axis_types=(AxisType.Auto,)), PartitionSpec(AXIS))


def spread(state: State, workers: Workers) -> list[Tree]:
    """The core of each worker of this process, with a leading axis of one, in fresh buffers on its device.

    A state with one replica per worker is kept; from any other state all workers start at the mean.
    """
    if int(state.replicas) == len(workers):
        of = lambda i: jax.tree.map(lambda x: replica(x, i), state.core)
    else:
        core = average(state).core
        of = lambda _: jax.tree.map(lambda x: jnp.asarray(x)[None], core)
    return [
        jax.device_put(of(i), device, may_alias=False) for i, device in zip(workers.local, workers.own, strict=True)
    ]


def average(state: State, weight_N: np.ndarray | None = None) -> State:
    """The state with one set of parameters: the mean over replicas of every floating leaf, summed in at least float32.

        sum_j x_j / N        or        sum_j share_j x_j,   with sum_j share_j = 1

    Collective if the replicas are those of several processes; all of them get the same bits.

    Args:
        state: returned unchanged if it has no replicas.
        weight_N: weight of each replica, normalized here; None for the weights `more["shares"]` of decentralized SGD,
            or without them the plain mean. Replicas of unequal weight may have taken different numbers of steps, so
            their counters are averaged too. In a plain mean all counters are equal and the first is taken, as it is for
            leaves that are no numbers.
    """
    if not state.replicas:
        return state
    if weight_N is None and isinstance(state.more, dict) and "shares" in state.more:
        weight_N = np.asarray(state.more["shares"], np.float64)
    count = int(state.replicas)
    share_N = None if weight_N is None else np.asarray(weight_N, np.float64) / np.sum(weight_N)
    first = jax.tree.map(_first, state.core)  # parameters that are not trained are the same in all replicas
    leaves, tree = jax.tree.flatten(trained_core(state.core))
    averaged = [k for k, x in enumerate(leaves) if _is_averaged(x.dtype, share_N is not None)]
    sums = _sums([leaves[k] for k in averaged], share_N)
    mean = jax.tree.leaves(trained_core(first))
    for k, total in zip(averaged, sums, strict=True):
        mean[k] = jnp.asarray(narrowed(total if share_N is not None else total / count, leaves[k].dtype))
    core = with_trained_core(first, jax.tree.unflatten(tree, mean))
    return replace(State.of(core, state.step, state.cursor), replicas=0)


def _is_averaged(dtype: Any, counters: bool) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.inexact) or (counters and jnp.issubdtype(dtype, jnp.signedinteger)))


def _first(x: Any) -> jax.Array:
    """The first replica in this process."""
    return jnp.asarray(replica(x, x.first if isinstance(x, ReplicaStack) else 0)[0])


def _sums(leaves: Sequence[Any], share_N: np.ndarray | None) -> list[np.ndarray]:
    """The sums over all replicas, of all processes."""
    sums = []
    for x in leaves:
        start, own = (x.first, x.own()) if isinstance(x, ReplicaStack) else (0, np.asarray(x))
        sums.append(wide_sum(list(own), None if share_N is None else share_N[start : start + len(own)].tolist()))
    if all(getattr(x, "is_fully_addressable", True) for x in leaves):
        return sums
    link = processes.link()
    assert link is not None
    added, _ = SliceExchange(link)([x.reshape(-1) for x in sums], lambda _, part_P, messages: wide_sum(part_P))
    return [total.reshape(x.shape) for total, x in zip(added, sums, strict=True)]


def _is_key(x: Any) -> bool:
    return isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
