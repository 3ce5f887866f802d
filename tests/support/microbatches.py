"""A plain JAX loop that accumulates microbatches: the reference where a gradient is rounded to 16 bits.

Such a gradient is rounded once for every microbatch. So a run agrees to float32 accuracy only with a loop that rounds
the same microbatches; one that takes the whole batch at once differs by about 1e-3.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from problems import keys_for

Tree = Any


@functools.partial(jax.jit, static_argnums=0)
def _sums(loss_fn: Callable[..., jax.Array], params: Tree, block: Tree, keys_b: jax.Array, count: int):
    """The loss and its gradient, summed over the first `count` rows, in float32."""
    mask_b = jnp.arange(len(keys_b)) < count

    def total(params):
        return jnp.sum(jnp.where(mask_b, loss_fn(params, block, keys_b), 0).astype(jnp.float32))

    loss, grads = jax.value_and_grad(total)(params)
    return loss, jax.tree.map(lambda g: g.astype(jnp.float32), grads)


def _cast(tree: Tree, dtype: Any) -> Tree:
    return jax.tree.map(lambda x: x.astype(dtype) if dtype and jnp.issubdtype(x.dtype, jnp.floating) else x, tree)


def train(
    loss_fn: Callable[..., jax.Array],
    params: Tree,
    optimizer: optax.GradientTransformation,
    batches: Iterable[Tree],
    counts_W: Sequence[int],
    rows: int,
    dtype_W: Sequence[Any] | None = None,
    seed: int = 0,
) -> tuple[Tree, list[float]]:
    """Train on one device with the workers' microbatches one after the other; returns parameters and losses.

    Args:
        loss_fn: (params, rows, keys) -> the loss of each row.
        params: The initial parameters; the optimizer sees gradients of their dtypes.
        optimizer: An optax optimizer.
        batches: A batch per step, of sum(counts_W) rows.
        counts_W: Rows of each worker, in order.
        rows: Rows of a microbatch; the last one of a worker is padded with copies of its first row.
        dtype_W: Compute dtype of each worker. Default: the model's own dtypes.
        seed: Seed of the examples' keys.
    """
    opt_state, losses, batch_size = optimizer.init(params), [], sum(counts_W)
    for step, batch in enumerate(batches):
        keys = keys_for(seed, 0, step * batch_size, (step + 1) * batch_size)
        loss, grads, start = 0.0, jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params), 0
        for count, dtype in zip(counts_W, dtype_W or [None] * len(counts_W), strict=True):
            for first in range(start, start + count, rows):
                valid = min(rows, start + count - first)
                index = np.where(np.arange(rows) < valid, first + np.arange(rows), first)
                block = jax.tree.map(lambda x, index=index: x[index], batch)
                more = _sums(loss_fn, _cast(params, dtype), _cast(block, dtype), keys[index], valid)
                loss, grads = loss + more[0], jax.tree.map(jnp.add, grads, more[1])
            start += count
        grads = jax.tree.map(lambda g, p: (g / batch_size).astype(p.dtype), grads, params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        params, losses = optax.apply_updates(params, updates), [*losses, float(loss) / batch_size]
    return params, losses
