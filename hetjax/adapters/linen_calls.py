"""Calls of a Linen module in training: random streams under any name, and its statistics beside the output."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
from flax import linen
from flax.core.scope import in_filter, union_filters

Tree = Any
_STATISTICS = "batch_stats"


def apply_in_training(
    module: linen.Module,
    variables: Tree,
    key: jax.Array,
    *args: Any,
    rngs: Any = None,
    mutable: Any = False,
    **kwargs: Any,
) -> tuple[Any, Tree]:
    """Call a module for one example, or one block of rows.

    Args:
        module: the module.
        variables: its collections.
        key: its random key: the stream 'dropout', and derived from it all others, as Linen falls back to 'params'.
        *args: arguments of the call.
        rngs: streams in the place of these.
        mutable: collections that the caller wants returned as well.
        **kwargs: further arguments of `module.apply`.

    Returns:
        What `module.apply` returns for these arguments, and the statistics after the call.
    """
    streams = {"dropout": key, "params": jax.random.fold_in(key, 1)}
    streams |= rngs if isinstance(rngs, Mapping) else {} if rngs is None else {"params": rngs}
    wanted = union_filters(mutable, _STATISTICS)
    out, changed = module.apply(variables, *args, rngs=streams, mutable=wanted, **kwargs)
    statistics = changed.get(_STATISTICS, variables[_STATISTICS])
    if mutable is False:
        return out, statistics
    return (out, {name: values for name, values in changed.items() if in_filter(mutable, name)}), statistics
