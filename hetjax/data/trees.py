"""Trees of arrays: dicts, tuples, named tuples and lists, nested; a list of numbers is an array, not a branch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

Tree = Any

_NUMBERS = {bool, int, float, complex}
_MOST_COLUMNS = 64  # a longer list or tuple of containers holds samples


def is_array(value: Any) -> bool:
    """Whether this is an array with rows: of NumPy, JAX, PyTorch or any package with `__array__`."""
    return hasattr(value, "__array__") and len(getattr(value, "shape", ())) > 0


def is_numbers(value: Any) -> bool:
    """Whether this is a list of numbers, possibly in nested lists, as decoders of JSON and Arrow return them."""
    if not isinstance(value, list):
        return False
    kinds = set(map(type, value))
    if any(not issubclass(kind, np.generic) for kind in kinds - _NUMBERS - {list}):
        return False
    return list not in kinds or all(is_numbers(inner) for inner in value if isinstance(inner, list))


def is_named(value: Any) -> bool:
    """Whether this is a named tuple."""
    return isinstance(value, tuple) and hasattr(value, "_fields")


def branches(node: Tree) -> list[tuple[Any, Tree]] | None:
    """The keys and children of a dict, tuple, named tuple or list; None for a leaf."""
    if isinstance(node, Mapping):
        return list(node.items())
    if is_named(node):
        return list(zip(node._fields, node, strict=True))
    if isinstance(node, tuple) or (isinstance(node, list) and not is_numbers(node)):
        return list(enumerate(node))
    return None


def rebuilt(node: Tree, children: Sequence[Tree]) -> Tree:
    """A node like this one with other children, in the order of `branches`; any mapping becomes a dict."""
    if isinstance(node, Mapping):
        return dict(zip(node, children, strict=True))
    return type(node)(*children) if is_named(node) else (tuple if isinstance(node, tuple) else list)(children)


def map_leaves(function: Callable[[Any], Any], tree: Tree) -> Tree:
    """Apply a function to every leaf. Unlike `jax.tree.map`, keeps the order of keys and knows lists of numbers."""
    inside = branches(tree)
    return function(tree) if inside is None else rebuilt(tree, [map_leaves(function, child) for _, child in inside])


def named_leaves(tree: Tree, name: str = "") -> Iterator[tuple[str, Any]]:
    """All leaves with their names, such as 'image' or 'inputs/0'."""
    inside = branches(tree)
    if inside is None:
        yield name, tree
    else:
        for key, child in inside:
            yield from named_leaves(child, f"{name}/{key}" if name else str(key))


def holds_columns(source: Any) -> bool:
    """Whether a source is a tree of arrays, each with one row per sample, rather than a sequence of samples.

    A dict, a named tuple and a tuple of arrays, such as `(x, y)`, always are. Any other tuple or list is a sequence of
    samples, unless its elements differ in structure, shape or dtype, as samples cannot, and all leaves are arrays with
    the same number of rows.

    Raises:
        ValueError: If a tuple could be either.
    """
    if isinstance(source, Mapping) or is_named(source):
        return True
    if not isinstance(source, tuple | list) or not source:
        return False
    if isinstance(source, tuple) and all(map(is_array, source)):
        return True
    if len(source) > _MOST_COLUMNS:
        return False
    leaves = [leaf for _, leaf in named_leaves(source)]
    if not leaves or not all(map(is_array, leaves)) or len({leaf.shape[0] for leaf in leaves}) > 1:
        return False
    if len({str(map_leaves(_kind, element)) for element in source}) > 1:
        return True
    if isinstance(source, tuple):
        kind, rows = type(source[0]).__name__, leaves[0].shape[0]
        raise ValueError(
            f"A tuple of {len(source)} {kind}s of like arrays with {rows:,} rows could be samples, or arrays with one "
            "row per sample. Give samples as a list, arrays as a dict."
        )
    return False


def _kind(leaf: Any) -> str:
    return f"{leaf.dtype}{tuple(leaf.shape)}"
