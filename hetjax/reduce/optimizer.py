"""Checks of an optax optimizer and of the parameters it trains; only trainable parameters are passed to it."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import optax

from hetjax.devices.compile import expected
from hetjax.reduce.trainable import has_gradient, trainable

Tree = Any


def check_optimizer(optimizer: Any) -> None:
    """Raise TypeError unless `optimizer` is an optax gradient transformation."""
    if all(callable(getattr(optimizer, name, None)) for name in ("init", "update")):
        return
    hint = " Call it to make one." if callable(optimizer) else ""
    raise TypeError(
        f"optimizer must be an optax transformation such as optax.adam(1e-3), got {type(optimizer).__name__}.{hint}"
    )


def check_params(params: Tree) -> None:
    """Raise if a parameter is no array, or if nothing can be trained."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    for path, leaf in leaves:
        if not hasattr(leaf, "dtype"):
            name = f"params{jax.tree_util.keystr(path)}"
            raise TypeError(f"{name} is {leaf!r}: expected an array, such as jnp.zeros(3).")
    if not any(has_gradient(leaf) for _, leaf in leaves):
        raise ValueError("params holds no arrays of floating-point numbers: there is nothing to train.")
    if not jax.tree.leaves(trainable(params)):
        raise ValueError(
            "All parameters are frozen: there is nothing to train. `wrt` selects the parameters to train, for instance "
            "from_nnx(model, example_loss, wrt=nnx.LoRAParam)."
        )


def init_optimizer(optimizer: optax.GradientTransformation, params: Tree) -> Tree:
    """Initialize the optimizer state, after tracing one update to check its arguments."""
    trained = trainable(params)
    opt_state = jax.jit(optimizer.init)(trained)
    update = optax.with_extra_args_support(optimizer).update
    try:
        jax.eval_shape(
            lambda params, state, value: update(params, state, params, value=value), trained, opt_state, jnp.zeros(())
        )
    except TypeError as error:
        if (missing := re.search(r"missing \d+ required keyword-only arguments?: (.*)", str(error))) is None:
            raise
        raise TypeError(
            f"The optimizer's update requires {missing[1]}. hetjax passes the gradients, the parameters and the loss "
            "of the step (value), but cannot evaluate the loss again for a line search. Use an optimizer without one, "
            "for instance optax.lbfgs(0.1, linesearch=None)."
        ) from error
    return opt_state


def update_size(optimizer: optax.GradientTransformation, params: Tree) -> str:
    """Size of an optimizer's first two updates of a corner of each parameter, to three digits.

    Unlike the optimizer's state it depends on the learning rate, so processes compare it. Unlike devices round unlike.
    """
    corner = lambda x: jnp.full(tuple(min(n, 2) for n in x.shape), 0.5, x.dtype)
    update = optax.with_extra_args_support(optimizer).update

    def size() -> jax.Array:
        values = jax.tree.map(corner, trainable(params))
        state, total = optimizer.init(values), jnp.zeros(())
        for _ in range(2):  # a warm-up may start from zero
            updates, state = update(values, state, values, value=jnp.float32(1.0))
            total += sum(jnp.sum(jnp.abs(x.astype(jnp.float32))) for x in jax.tree.leaves(updates))
        return total

    try:
        with expected(), jax.default_device(jax.local_devices(backend="cpu")[0]):
            return f"{float(jax.jit(size)()):.3g}"
    except Exception:  # an optimizer may insist on the shapes of its parameters
        return "unknown"
