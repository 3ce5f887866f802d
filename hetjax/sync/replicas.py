"""A set of parameters for every worker: spread from one set, and averaged to one again."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from hetjax.devices.compile import expected
from hetjax.devices.workers import Workers
from hetjax.reduce.update import State

Tree = Any


def spread(state: State, workers: Workers) -> Tree:
    """Core arrays [workers, ...] in fresh buffers, each worker's part on its device.

    A state with as many sets as there are workers goes on as it is; from any other all workers start alike.
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
    return jax.make_array_from_callback(x.shape, workers.sharded, lambda part: x[part])


def average(state: State, weight_N: np.ndarray | None = None) -> State:
    """The state with one set of parameters, the mean of all sets: of everything that is a float, ema and momenta
    included. Counters are alike everywhere, and the first one is taken.

    weight_N: what each set counts. Sets that count differently may have made unequal steps: the mean of their counters
    is rounded.
    """
    if not state.replicas:
        return state
    first = jax.tree.leaves(state.core)[0]
    on_mesh = isinstance(first, jax.Array) and isinstance(first.sharding, NamedSharding)
    with expected():
        mean = _mean(NamedSharding(first.sharding.mesh, PartitionSpec()) if on_mesh else None)
        core = mean(state.core, None if weight_N is None else weight_N / weight_N.sum())
    return replace(State.of(core, state.step, state.cursor), replicas=0)


@functools.cache
def _mean(place: NamedSharding | None) -> Any:
    def one(x: jax.Array, share_N: jax.Array | None) -> jax.Array:
        real, counter = (jnp.issubdtype(x.dtype, kind) for kind in (jnp.floating, jnp.signedinteger))
        if not real and (share_N is None or not counter):
            return x[0]
        wide = jnp.promote_types(x.dtype, jnp.float32)
        if share_N is None:
            return jnp.mean(x, axis=0, dtype=wide).astype(x.dtype)
        share_Nx1 = share_N.astype(wide).reshape(-1, *(1,) * (x.ndim - 1))
        mean = jnp.sum(share_Nx1 * x.astype(wide), axis=0)
        return (mean if real else jnp.round(mean)).astype(x.dtype)

    def all_of(core: Tree, share_N: jax.Array | None) -> Tree:
        return jax.tree.map(lambda x: one(x, share_N), core)

    return jax.jit(all_of, out_shardings=place)
