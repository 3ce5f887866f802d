"""A set of parameters for every worker: spread from one set, and averaged to one again."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from hetjax.run.compiles import expected
from hetjax.run.update import State
from hetjax.run.workers import Workers

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


def average(state: State) -> State:
    """The state with one set of parameters, the mean of the workers': of everything that is a float, ema and momenta
    included. Counters are alike everywhere, and the first one is taken."""
    if not state.replicas:
        return state
    first = jax.tree.leaves(state.core)[0]
    on_mesh = isinstance(first, jax.Array) and isinstance(first.sharding, NamedSharding)
    with expected():
        core = _mean(NamedSharding(first.sharding.mesh, PartitionSpec()) if on_mesh else None)(state.core)
    return replace(State.of(core, state.step, state.cursor), replicas=0)


@functools.cache
def _mean(place: NamedSharding | None) -> Any:
    def one(x: jax.Array) -> jax.Array:
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return x[0]
        return jnp.mean(x, axis=0, dtype=jnp.promote_types(x.dtype, jnp.float32)).astype(x.dtype)

    return jax.jit(functools.partial(jax.tree.map, one), out_shardings=place)
