"""A run's state on the host: its arrays in one list, everything else as JSON; gathered from all processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hetjax import processes
from hetjax.state import LiveState, ReplicaStack, State, gathered

Tree = Any
_CORE = ("params", "model_state", "opt_state", "ema")


@dataclass(frozen=True)
class RunSnapshot:
    """The contents of a checkpoint in host memory."""

    arrays: list[np.ndarray]
    run: dict[str, Any]
    origin: str = ""  # the checkpoint that it was read from


def take(state: State | LiveState, memory: Mapping[str, Any], extra: Mapping[str, Any]) -> RunSnapshot | None:
    """Copy a state to the host. Collective: the replicas of a state may be in several processes.

    Args:
        state: the state
        memory: the trainer's state_dict
        extra: the caller's additions, as JSON values

    Returns:
        The snapshot in process 0, None in the others.
    """
    state = gathered(state.whole() if isinstance(state, LiveState) else state)
    names, leaves = _named_leaves(state)
    more: list[Any] = []
    outline = _outline(state.more, state, more)
    arrays = [host_copy(_key_data(leaf)) for leaf in leaves + more]
    if not processes.first():
        return None
    run = {
        "step": state.step,
        "cursor": state.cursor,
        "replicas": state.replicas,
        "arrays": names,
        "more": outline,
        "trainer": memory,
        "extra": dict(extra),
    }
    return RunSnapshot([array for array in arrays if array is not None], run)


def rebuild(snapshot: RunSnapshot, like: State) -> State:
    """The state of a snapshot.

    Args:
        snapshot: the snapshot
        like: a fresh state of the same model and optimizer, which gives tree structure, shapes and dtypes

    Raises:
        ValueError: the snapshot belongs to another model or optimizer.
    """
    run, origin, (names, leaves) = snapshot.run, snapshot.origin, _named_leaves(like)
    if names != run["arrays"]:
        differing = sorted(set(names) ^ set(run["arrays"]))
        raise ValueError(
            f"{origin} belongs to another model or optimizer: {len(differing)} arrays differ, the first is "
            f"{differing[0] if differing else names[0]}. Resume with the configuration it was saved with."
        )
    stack = (run["replicas"],) if run["replicas"] else ()
    values = []
    for name, value, leaf in zip(names, snapshot.arrays, leaves, strict=False):
        (shape, dtype), kind = _kind(_key_data(leaf)), _kind(value)
        if kind != ((*stack, *shape), dtype):
            raise ValueError(
                f"{origin} belongs to another model: {name} is {_shown(kind)} there and {_shown((shape, dtype))} here. "
                "Resume with the configuration it was saved with."
            )
        values.append(_as_key(value, leaf) if _is_key(leaf) else value)
    params, model_state, opt_state, ema = jax.tree.unflatten(jax.tree.structure(like.core), values)
    more = _from_outline(run["more"], like, snapshot.arrays[len(names) :])
    return State(params, model_state, opt_state, ema, run["step"], run["cursor"], run["replicas"], more)


def host_copy(leaf: Any) -> np.ndarray | None:
    """Copy an array to the host of process 0; None in the others. Collective, in the same order everywhere.

    Always a copy: on a CPU a view of the buffer would keep the next step from donating it.
    """
    if isinstance(leaf, ReplicaStack) and not leaf.is_fully_addressable:
        return processes.collect_rows(leaf.own())
    return np.array(leaf) if processes.first() else None


def _named_leaves(state: State) -> tuple[list[str], list[Any]]:
    named = [
        (name + jax.tree_util.keystr(path), leaf)
        for name, part in zip(_CORE, state.core, strict=True)
        for path, leaf in jax.tree_util.tree_flatten_with_path(part)[0]
    ]
    return [name for name, _ in named], [leaf for _, leaf in named]


def _is_key(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _key_data(leaf: Any) -> Any:
    """PRNG keys as integers, other leaves unchanged."""
    if not _is_key(leaf):
        return leaf
    return leaf.map(jax.random.key_data) if isinstance(leaf, ReplicaStack) else jax.random.key_data(leaf)


def _as_key(value: np.ndarray, like: jax.Array) -> jax.Array:
    return jax.random.wrap_key_data(jnp.asarray(value), impl=jax.random.key_impl(like))


def _kind(array: Any) -> tuple[tuple[int, ...], Any]:
    return np.shape(array), jax.dtypes.canonicalize_dtype(jnp.result_type(array))


def _shown(kind: tuple[tuple[int, ...], Any]) -> str:
    return f"{kind[1]}{list(kind[0])}"


def _outline(tree: Tree, state: State, leaves: list[Any]) -> Any:
    """The structure of `State.more` as JSON, as no other object has it; its arrays are appended to `leaves`.

    An outline is None, the index of an array, a dict, list or tuple of outlines, or a reference to a part of the state
    with the same structure.
    """
    if tree is None:
        return None
    structure: Any = jax.tree.structure(tree)
    first = len(leaves)
    if jax.tree_util.treedef_is_leaf(structure) and hasattr(tree, "dtype") and not _is_key(tree):
        leaves.append(tree)
        return first
    for name, part in zip(_CORE, state.core, strict=True):
        if structure == jax.tree.structure(part):
            leaves.extend(jax.tree.leaves(tree))
            return {"like": name, "first": first}
    if type(tree) is dict and all(isinstance(name, str) for name in tree):
        return {"dict": {name: _outline(tree[name], state, leaves) for name in sorted(tree)}}
    if type(tree) in (list, tuple):
        return {type(tree).__name__: [_outline(part, state, leaves) for part in tree]}
    raise TypeError(
        f"State.more holds a {type(tree).__name__}, which cannot be saved: keep arrays in dicts, lists and tuples "
        "there, or in trees with the structure of the parameters."
    )


def _from_outline(outline: Any, like: State, arrays: list[np.ndarray]) -> Tree:
    """The tree of an outline, with its arrays."""
    if outline is None or isinstance(outline, int):
        return None if outline is None else arrays[outline]
    if "like" in outline:
        structure: Any = jax.tree.structure(getattr(like, outline["like"]))
        return jax.tree.unflatten(structure, [arrays[outline["first"] + i] for i in range(structure.num_leaves)])
    if "dict" in outline:
        return {name: _from_outline(part, like, arrays) for name, part in outline["dict"].items()}
    kind, parts = next(iter(outline.items()))
    return {"list": list, "tuple": tuple}[kind](_from_outline(part, like, arrays) for part in parts)
