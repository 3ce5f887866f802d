"""What Flax NNX renamed since 0.11.2, the oldest version that hetjax supports; no other file asks for versions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from flax import nnx

# From 0.12 on a module's list of modules has to be an `nnx.List`; before, there was none, and a plain list did.
List: Any = getattr(nnx, "List", list)


def iter_modules(model: nnx.Module) -> Iterator[tuple[tuple[Any, ...], nnx.Module]]:
    """All modules inside a model with their paths, itself included: `nnx.iter_modules`, which 0.11 lacks."""
    return ((path, node) for path, node in nnx.iter_graph(model) if isinstance(node, nnx.Module))


def value_of(variable: nnx.Variable) -> Any:
    """The value of a variable: `get_value()`, in 0.11 the attribute `value`, which warns since."""
    return variable.get_value() if hasattr(variable, "get_value") else variable.value


def set_value(variable: nnx.Variable, value: Any) -> None:
    """Set the value of a variable: `set_value()`, in 0.11 the attribute `value`."""
    if hasattr(variable, "set_value"):
        variable.set_value(value)
    else:
        variable.value = value


def promote_dtype(layer: nnx.BatchNorm, arrays: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arrays in the dtype that a layer computes in: the layer's `promote_dtype`, in 0.11 a function for all layers."""
    promote = getattr(layer, "promote_dtype", nnx.nn.dtypes.promote_dtype)
    return promote(arrays, dtype=layer.dtype)
