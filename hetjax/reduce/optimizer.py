"""Checks of an optax optimizer and of the parameters it trains; only trainable parameters are passed to it."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import optax

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
