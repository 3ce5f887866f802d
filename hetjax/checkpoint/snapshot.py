"""A run on the host: the arrays of its state in one list, everything else as JSON; gathered from all processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from hetjax.devices.compile import expected
from hetjax.reduce.update import State

_PIECE = 2**26  # bytes sent at a time


def host_copy(leaf: Any) -> np.ndarray | None:
    """An array on the host of the first process, None on the others. All have to call this, in the same order.

    Really a copy: on a CPU a view of the buffer would keep the next step from using it again.
    """
    if isinstance(leaf, jax.Array) and not (leaf.is_fully_replicated or leaf.is_fully_addressable):
        with expected():
            whole = multihost_utils.process_allgather(leaf, tiled=True)
    else:
        whole = leaf if jax.process_index() == 0 else None
    return np.array(whole) if jax.process_index() == 0 else None


def from_first(content: bytes | None) -> bytes:
    """The bytes that the first process gives, on all of them. All have to call this; outside of steps."""
    if jax.process_count() == 1:
        assert content is not None
        return content
    given = b"" if content is None else content
    size = int.from_bytes(_sent(len(given).to_bytes(8, "little"), 8), "little")
    pieces = [_sent(given[place : place + _PIECE], min(_PIECE, size - place)) for place in range(0, size, _PIECE)]
    return b"".join(pieces)


def _sent(piece: bytes, size: int) -> bytes:
    """As a sum to which only the first process adds, over one device of each."""
    devices = {device.process_index: device for device in reversed(jax.devices())}
    mesh = Mesh([devices[process] for process in sorted(devices)], ("process",))
    mine = np.zeros((1, size), np.uint8)
    if jax.process_index() == 0:
        mine[0] = np.frombuffer(piece, np.uint8)
    placed = jax.device_put(mine, devices[jax.process_index()])
    spread, whole = (NamedSharding(mesh, PartitionSpec(*axis)) for axis in (("process",), ()))
    stacked = jax.make_array_from_single_device_arrays((len(devices), size), spread, [placed])
    with expected():
        total = jax.jit(lambda x: x.sum(0, dtype=np.uint8), out_shardings=whole)(stacked)
    return np.asarray(total.addressable_data(0)).tobytes()


Tree = Any
_CORE = ("params", "model_state", "opt_state", "ema")


@dataclass(frozen=True)
class RunSnapshot:
    arrays: list[np.ndarray]
    run: dict[str, Any]
    origin: str = ""  # the checkpoint that it was read from


def take(state: State, memory: Mapping[str, Any], extra: Mapping[str, Any]) -> RunSnapshot | None:
    """Copy a state to the host, with what the trainer remembers and the caller adds.

    With several processes all have to call this, as they hold parts of some states; the first one gets the snapshot.
    """
    names, leaves = _named(state)
    more: list[Any] = []
    outline = _outline(state.more, state, more)
    arrays = [host_copy(_plain(leaf)) for leaf in leaves + more]
    if jax.process_index() != 0:
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
    """The state of a snapshot. `like` is a fresh state of the same model and optimizer; its arrays say what fits."""
    run, origin, (names, leaves) = snapshot.run, snapshot.origin, _named(like)
    if names != run["arrays"]:
        odd = sorted(set(names) ^ set(run["arrays"]))
        raise ValueError(
            f"{origin} belongs to another model or optimizer: {len(odd)} arrays differ, first "
            f"{odd[0] if odd else names[0]}. Resume with the configuration it was saved with."
        )
    stack = (run["replicas"],) if run["replicas"] else ()
    values = []
    for name, value, leaf in zip(names, snapshot.arrays, leaves, strict=False):
        here, there = _kind(_plain(leaf)), _kind(value)
        if there != ((*stack, *here[0]), here[1]):
            raise ValueError(
                f"{origin} belongs to another model: {name} is {_said(there)} there and {_said(here)} here. "
                "Resume with the configuration it was saved with."
            )
        values.append(_as_key(value, leaf) if _is_key(leaf) else value)
    params, model_state, opt_state, ema = jax.tree.unflatten(jax.tree.structure(like.core), values)
    more = _filled(run["more"], like, snapshot.arrays[len(names) :])
    return State(params, model_state, opt_state, ema, run["step"], run["cursor"], run["replicas"], more)


def _named(state: State) -> tuple[list[str], list[Any]]:
    found = [
        (name + jax.tree_util.keystr(path), leaf)
        for name, part in zip(_CORE, state.core, strict=True)
        for path, leaf in jax.tree_util.tree_flatten_with_path(part)[0]
    ]
    return [name for name, _ in found], [leaf for _, leaf in found]


def _is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _as_key(value: np.ndarray, like: jax.Array) -> jax.Array:
    return jax.random.wrap_key_data(jnp.asarray(value), impl=jax.random.key_impl(like))


def _plain(leaf: Any) -> Any:
    """Random keys as the integers they are."""
    return jax.random.key_data(leaf) if _is_key(leaf) else leaf


def _kind(array: Any) -> tuple[tuple[int, ...], Any]:
    return np.shape(array), jax.dtypes.canonicalize_dtype(jnp.result_type(array))


def _said(kind: tuple[tuple[int, ...], Any]) -> str:
    return f"{kind[1]}{list(kind[0])}"


def _outline(tree: Tree, state: State, leaves: list[Any]) -> Any:
    """The form of a tree whose form nobody else knows, in JSON; its arrays are added to `leaves`.

    A dict, list or tuple of such, None, the place of an array, or a part formed like one of the state's own.
    """
    if tree is None:
        return None
    form: Any = jax.tree.structure(tree)
    first = len(leaves)
    if jax.tree_util.treedef_is_leaf(form) and hasattr(tree, "dtype") and not _is_key(tree):
        leaves.append(tree)
        return first
    for name, part in zip(_CORE, state.core, strict=True):
        if form == jax.tree.structure(part):
            leaves.extend(jax.tree.leaves(tree))
            return {"like": name, "first": first}
    if type(tree) is dict and all(isinstance(name, str) for name in tree):
        return {"dict": {name: _outline(tree[name], state, leaves) for name in sorted(tree)}}
    if type(tree) in (list, tuple):
        return {type(tree).__name__: [_outline(part, state, leaves) for part in tree]}
    raise TypeError(
        f"State.more holds a {type(tree).__name__}, which cannot be saved: keep arrays in dicts, lists and tuples "
        "there, or in trees formed like the parameters."
    )


def _filled(outline: Any, like: State, arrays: list[np.ndarray]) -> Tree:
    """The tree of an outline, with its arrays."""
    if outline is None or isinstance(outline, int):
        return None if outline is None else arrays[outline]
    if "like" in outline:
        form: Any = jax.tree.structure(getattr(like, outline["like"]))
        return jax.tree.unflatten(form, [arrays[outline["first"] + place] for place in range(form.num_leaves)])
    if "dict" in outline:
        return {name: _filled(part, like, arrays) for name, part in outline["dict"].items()}
    kind, parts = next(iter(outline.items()))
    return {"list": list, "tuple": tuple}[kind](_filled(part, like, arrays) for part in parts)
