"""Freezing parameters by a filter: the rest is trained, as in LoRA."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx

from hetjax.reduce.trainable import Frozen, unfrozen

Tree = Any
_LEAVES = Frozen, nnx.Variable


def frozen(params: Tree, *, wrt: Any = None) -> Tree:
    """Mark parameters as constant: all of them, or those that `wrt` does not select.

    For a frozen parameter no gradient is computed, nothing is exchanged between workers, the optimizer keeps no state,
    and its value stays the same to the bit. Loss functions receive the parameters without marks.

    Examples:
        >>> params = {"backbone": hetjax.frozen(pretrained), "head": head}
        >>> params = hetjax.frozen(params, wrt=lambda path, p: "lora" in path)    # train only what is below "lora"
        >>> state = step.init(params)
        >>> hetjax.unfrozen(state.params)                                         # without marks

    Args:
        params: any tree of arrays.
        wrt: which parameters to train: a function of path (a tuple of keys) and parameter, a tree of booleans like
            params, or for `nnx.State` any NNX filter, such as `nnx.LoRAParam`. Default: none.

    Returns:
        The parameters with marks; those marked before stay frozen.

    Raises:
        TypeError: if wrt is a tree of something else than booleans.
        ValueError: if wrt is a tree of more or fewer booleans than there are parameters.
    """
    if wrt is None:
        return Frozen(unfrozen(params))
    leaves, tree = jax.tree_util.tree_flatten_with_path(params, is_leaf=lambda node: isinstance(node, _LEAVES))
    if isinstance(wrt, Mapping | nnx.State | list | tuple) and jax.tree.leaves(wrt) and _is_mask(wrt):
        train = jax.tree.leaves(wrt)
        if len(train) != len(leaves):
            raise ValueError(
                f"wrt has {len(train)} booleans, but there are {len(leaves)} parameters: expected one each."
            )
    elif isinstance(wrt, Mapping | nnx.State):
        raise TypeError("wrt is a tree whose leaves are not all booleans: expected True for parameters to train.")
    else:
        selects = nnx.filterlib.to_predicate(wrt)
        train = [selects(tuple(map(_key, path)), p) for path, p in leaves]
    mark = lambda p, train: p if train or isinstance(p, Frozen) else Frozen(p)
    return jax.tree.unflatten(tree, [mark(p, flag) for (_, p), flag in zip(leaves, train, strict=True)])


def _is_mask(wrt: Tree) -> bool:
    return all(isinstance(flag, bool) for flag in jax.tree.leaves(wrt))


def _key(entry: Any) -> Any:
    """A key of a path as the user wrote it."""
    return next((getattr(entry, name) for name in ("key", "idx", "name") if hasattr(entry, name)), entry)
