"""Which parameters are trained: floating-point ones that are not marked as frozen. All others are constants of a run.

    params          {"base": Frozen(w), "head": v, "code": int8}     an argument of every program
    trainable       {"base": None,      "head": v, "code": None}     has a gradient, is summed, averaged, updated

The mark is part of the tree's structure, so it reaches every program, sync and checkpoint with the parameters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

Tree = Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Frozen:
    """Parameters that are not trained: one array, or a tree of them. The loss function receives `value`."""

    value: Tree


def _marked(node: Any) -> bool:
    return isinstance(node, Frozen)


def has_gradient(p: Any) -> bool:
    """Whether an array is floating-point or complex."""
    return bool(jnp.issubdtype(p.dtype, jnp.inexact))


def trainable(params: Tree) -> Tree:
    """Replace parameters that are not trained, frozen ones and integers, by None."""
    return jax.tree.map(lambda p: None if _marked(p) or not has_gradient(p) else p, params, is_leaf=_marked)


def with_trained(params: Tree, trained: Tree) -> Tree:
    """Replace the trainable parameters by `trained`; the others are unchanged."""
    return jax.tree.map(lambda p, new: p if new is None else new, params, trained, is_leaf=_marked)


def unfrozen(params: Tree) -> Tree:
    """Remove the marks of `hetjax.frozen`: the parameters as the loss function receives them.

    Args:
        params: parameters, with or without marks.

    Returns:
        The same arrays in the tree that was given to `hetjax.frozen`.
    """
    return jax.tree.map(lambda p: p.value if _marked(p) else p, params, is_leaf=_marked)


def trained_core(core: Any) -> Any:
    """The core (params, model_state, opt_state, ema) without parameters that are not trained."""
    params, model_state, opt_state, *ema = core
    return (trainable(params), model_state, opt_state, *map(trainable, ema))


def with_trained_core(core: Any, trained: Any) -> Any:
    """The inverse: `trained`, with the parameters of `core` that are not trained."""
    params, model_state, opt_state, *ema = trained
    return (with_trained(core[0], params), model_state, opt_state, *map(with_trained, core[3:], ema))
