"""Replicas of a model, stacked along a leading axis: broadcast from one set of parameters, and averaged to one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from hetjax.devices.compile import expected
from hetjax.devices.workers import Workers
from hetjax.reduce.trainable import trained_core, with_trained_core
from hetjax.state import State

Tree = Any


def replica_mean(
    x: jax.Array, total: Callable[[jax.Array], jax.Array], *, count: int = 1, share: Any = None
) -> jax.Array:
    """The mean of one array over replicas, summed in at least float32.

        sum_j x_j / count        or        sum_j share_j x_j,   with sum_j share_j = 1

    An integer leaf, a step counter, is rounded to the nearest integer. The result has the dtype of x.

    Args:
        x: the replica on this device, or all of them stacked.
        total: the sum over replicas: `psum` over a named axis, or a sum over the stacked axis.
        count: the number of replicas, for the plain mean.
        share: weights that broadcast against x, for the weighted mean; those of a floating x are cast to the dtype of
            the sum.
    """
    real = jnp.issubdtype(x.dtype, jnp.floating)
    wide = jnp.promote_types(x.dtype, jnp.float32)
    if share is None:
        mean = total(x.astype(wide)) / count
    else:
        mean = total(x.astype(wide) * (share.astype(wide) if real else share))
    return (mean if real else jnp.round(mean)).astype(x.dtype)


def spread(state: State, workers: Workers) -> Tree:
    """The core stacked as [workers, ...] in fresh buffers, each worker's replica on its device.

    A state with one replica per worker is kept; from any other state all workers start at the mean.
    """
    if int(state.replicas) == len(workers):
        placed = jax.tree.map(lambda x: _stacked(x, workers), state.core)
        make = functools.partial(jax.tree.map, jnp.copy)
    else:
        placed = workers.replicate(average(state).core)
        make = functools.partial(jax.tree.map, lambda x: jnp.broadcast_to(x[None], (len(workers), *x.shape)))
    with expected():
        return jax.jit(make, out_shardings=workers.sharded)(placed)


def _stacked(x: Any, workers: Workers) -> jax.Array:
    if isinstance(x, jax.Array) and (x.sharding == workers.sharded or not workers.several_processes):
        return jax.device_put(x, workers.sharded)
    x = np.asarray(x)
    return jax.make_array_from_callback(x.shape, workers.sharded, lambda index: x[index])


def average(state: State, weight_N: np.ndarray | None = None) -> State:
    """The state with one set of parameters: the mean over replicas of every floating leaf (`replica_mean`).

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
    first = jax.tree.leaves(state.core)[0]
    on_mesh = isinstance(first, jax.Array) and isinstance(first.sharding, NamedSharding)
    with expected():
        mean = _compiled_mean(NamedSharding(first.sharding.mesh, PartitionSpec()) if on_mesh else None)
        core = mean(state.core, None if weight_N is None else weight_N / weight_N.sum())
    return replace(State.of(core, state.step, state.cursor), replicas=0)


@functools.cache
def _compiled_mean(sharding: NamedSharding | None) -> Any:
    total = functools.partial(jnp.sum, axis=0)

    def leaf_mean(x: jax.Array, share_N: jax.Array | None) -> jax.Array:
        real, counter = (jnp.issubdtype(x.dtype, kind) for kind in (jnp.floating, jnp.signedinteger))
        if not real and (share_N is None or not counter):
            return x[0]
        if share_N is None:
            return replica_mean(x, total, count=len(x))
        share_N = share_N.astype(jnp.promote_types(x.dtype, jnp.float32))
        return replica_mean(x, total, share=share_N.reshape(-1, *(1,) * (x.ndim - 1)))

    def core_mean(core: Tree, share_N: jax.Array | None) -> Tree:
        first = jax.tree.map(lambda x: x[0], core)  # parameters that are not trained are the same in all replicas
        return with_trained_core(first, jax.tree.map(lambda x: leaf_mean(x, share_N), trained_core(core)))

    return jax.jit(core_mean, out_shardings=sharding)
