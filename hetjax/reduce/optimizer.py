"""Checks of an optax optimizer and of the parameters it trains; only floating-point parameters are passed to it."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import optax

Tree = Any


def check_optimizer(optimizer: Any) -> None:
    """Raise TypeError unless `optimizer` is an optax gradient transformation."""
    if all(callable(getattr(optimizer, name, None)) for name in ("init", "update")):
        return
    hint = ""
    if hasattr(optimizer, "tx"):  # nnx.Optimizer
        hint = " Pass its transformation, optimizer.tx: hetjax keeps the optimizer state itself."
    elif callable(optimizer):
        hint = " Call it to make one."
    raise TypeError(
        f"optimizer must be an optax transformation such as optax.adam(1e-3), got {type(optimizer).__name__}.{hint}"
    )


def has_gradient(p: Any) -> bool:
    """Whether an array is floating-point or complex."""
    return bool(jnp.issubdtype(p.dtype, jnp.inexact))


def trainable(params: Tree) -> Tree:
    """Replace parameters that have no gradient, such as integers, by None."""
    return jax.tree.map(lambda p: p if has_gradient(p) else None, params)


def with_trained(params: Tree, trained: Tree) -> Tree:
    """Replace the trainable parameters by `trained`; the others are unchanged."""
    return jax.tree.map(lambda p, new: p if new is None else new, params, trained)


def check_params(params: Tree, sync: str) -> None:
    """Raise if nothing can be trained, or if `sync` would average parameters that have no gradient."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    for path, leaf in leaves:
        if not hasattr(leaf, "dtype"):
            name = f"params{jax.tree_util.keystr(path)}"
            raise TypeError(f"{name} is {leaf!r}: expected an array, such as jnp.zeros(3).")
    fixed = [(jax.tree_util.keystr(path), leaf.dtype) for path, leaf in leaves if not has_gradient(leaf)]
    if len(fixed) == len(leaves):
        raise ValueError("params holds no arrays of floating-point numbers: there is nothing to train.")
    if fixed and sync != "allreduce":
        name, dtype = fixed[0]
        raise ValueError(
            f"The parameter {name} is {dtype}, which has no gradient, and the sync {sync!r} averages parameters. Use "
            "sync='allreduce', or keep it out of params: close over it, or make it an nnx.Variable in place of an "
            "nnx.Param."
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
