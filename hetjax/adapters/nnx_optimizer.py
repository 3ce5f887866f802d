"""An `nnx.Optimizer` in place of an optax transformation: its transformation, filter and state, and writing it back."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from hetjax.adapters.frozen import frozen
from hetjax.adapters.nnx_versions import set_value, value_of
from hetjax.state import State

Tree = Any


def transformation(optimizer: Any) -> Any:
    """The optax transformation of an `nnx.Optimizer`; anything else as it is."""
    return optimizer.tx if isinstance(optimizer, nnx.Optimizer) else optimizer


def selected(optimizer: Any, params: Tree) -> Tree:
    """The parameters with those frozen that an `nnx.Optimizer` does not train."""
    variables = jax.tree.leaves(params, is_leaf=lambda node: isinstance(node, nnx.Variable))
    if isinstance(optimizer, nnx.Optimizer) and any(isinstance(leaf, nnx.Variable) for leaf in variables):
        return frozen(params, wrt=optimizer.wrt)
    return params


def continued(optimizer: Any, opt_state: Tree) -> Tree:
    """The state of an `nnx.Optimizer` that has made steps, in the tree of a fresh `opt_state`.

    Raises:
        ValueError: if the optimizer is for other parameters, whether it has made steps or not.
    """
    if not isinstance(optimizer, nnx.Optimizer):
        return opt_state
    slots = _slots(optimizer, opt_state)
    if steps_made(optimizer) == 0:
        return opt_state
    return jax.tree.unflatten(jax.tree.structure(opt_state), [value_of(slot) for slot in slots])


def steps_made(optimizer: Any) -> int:
    """The steps that an `nnx.Optimizer` has made; 0 for anything else."""
    return int(optimizer.step[...]) if isinstance(optimizer, nnx.Optimizer) else 0


def write_optimizer(optimizer: nnx.Optimizer, state: State) -> None:
    """Write the optimizer state of training into an `nnx.Optimizer`, in place."""
    for slot, value in zip(_slots(optimizer, state.opt_state), jax.tree.leaves(state.opt_state), strict=True):
        set_value(slot, own_copy(value))
    set_value(optimizer.step, jnp.asarray(state.step, jnp.uint32))


def own_copy(x: Any) -> jax.Array:
    """A copy on the default device: training reuses its own buffers."""
    return jnp.asarray(np.asarray(x))


def _slots(optimizer: nnx.Optimizer, opt_state: Tree) -> list[nnx.Variable]:
    """The variables of the optimizer, in the order of the leaves of `opt_state`."""
    slots = jax.tree.leaves(optimizer.opt_state, is_leaf=lambda node: isinstance(node, nnx.Variable))
    shape = lambda values: [(jnp.shape(value), jnp.result_type(value)) for value in values]
    if shape(map(value_of, slots)) != shape(jax.tree.leaves(opt_state)):
        raise ValueError(
            "The state of the nnx.Optimizer does not fit the parameters that are trained. Make both for the same model "
            "and with the same filter, nnx.Optimizer(model, tx, wrt=...) and from_nnx(model, example_loss, wrt=...): "
            "an optimizer that selects more trains less than it says."
        )
    return slots
