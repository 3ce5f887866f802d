"""Scale what an optimizer is given by the batch, so that every sample counts alike however it was batched.

The gradient of a batch is the mean over its b samples. Times s = b / reference it is their sum, divided by a constant,
and momentum accumulates sums. Scaling the updates instead would not do: momentum spreads a gradient over the updates
that follow, each of which would be scaled by its own batch.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from hetjax.devices.compiles import expected

Tree = Any


def follows_scale(optimizer: optax.GradientTransformation, params: Tree) -> Tree:
    """Whether u(s g, s p) = s u(g, p) for the updates u of each parameter, found out by trying s = 2.

    True for what is linear in gradients and parameters together: SGD, momentum, weight decay, trust ratios. False for
    optimizers that normalize their gradients, such as Adam and Lion.

    Args:
        optimizer: Any optax optimizer.
        params: Its parameters; only shapes and dtypes matter.

    Returns:
        A tree like `params` of bools.
    """
    with_extra = optax.with_extra_args_support(optimizer).update
    small = 0.01 / max(len(jax.tree.leaves(params)), 1) ** 0.5  # a gradient of norm 0.01, below any sensible clipping

    def size_of_updates(scale: float) -> Tree:
        at = jax.tree.map(lambda p: jnp.full(p.shape, 0.1 * scale, p.dtype), params)
        grads = jax.tree.map(lambda p: jnp.zeros(p.size, p.dtype).at[:1].set(small * scale).reshape(p.shape), params)
        state, size = optimizer.init(at), jax.tree.map(lambda p: 0.0, params)
        for _ in range(2):  # the first update of a warm-up is zero
            updates, state = with_extra(grads, state, at, value=jnp.ones(()))
            size = jax.tree.map(lambda s, u: s + jnp.abs(u.reshape(-1)[:1].astype(jnp.float32)).sum(), size, updates)
        return size

    with expected():
        one, two = jax.device_get(jax.jit(lambda: (size_of_updates(1.0), size_of_updates(2.0)))())
    return jax.tree.map(lambda a, b: not 0 < b <= 1.5 * a, one, two)


def scaled(
    optimizer: optax.GradientTransformation, follows: Tree, scale: jax.Array, rate: jax.Array
) -> optax.GradientTransformation:
    """An optimizer whose gradients count `scale` times and whose learning rate is `rate` times its own.

    With u(g, p) the updates of the optimizer, those returned are rate u(scale g, scale p) where they follow the scale,
    and rate scale u(scale g, p) elsewhere. The state is that of the optimizer itself.

    Args:
        optimizer: Any optax optimizer.
        follows: Of `follows_scale`.
        scale: Of the gradients, by the batch.
        rate: Of the updates, by the schedule.

    Returns:
        The optimizer for one update.
    """
    times = lambda factor, x: (factor * x).astype(x.dtype)
    with_extra = optax.with_extra_args_support(optimizer).update

    def update(grads: Tree, state: Tree, params: Tree = None, **extra: Any) -> tuple[Tree, Tree]:
        grads = jax.tree.map(lambda g: times(scale, g), grads)
        at = jax.tree.map(lambda p, f: times(scale, p) if f else p, params, follows)
        updates, state = with_extra(grads, state, at, **extra)
        return jax.tree.map(lambda u, f: times(rate if f else rate * scale, u), updates, follows), state

    return optax.GradientTransformationExtraArgs(optimizer.init, update)
