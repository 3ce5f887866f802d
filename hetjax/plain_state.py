"""State as plain JSON values: dataclasses with NumPy arrays to dicts and back.

    saved = to_plain(state)                    # {"epoch": 3, "share_W": [0.75, 0.25]}
    state = from_plain(State(workers), saved)  # the fields in `saved` replace those of a fresh state

Floats survive the round trip through JSON to the bit. A checkpoint holds the fields of the dataclass; attributes that
are not fields are not saved.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar, get_args, get_type_hints

import numpy as np

StateT = TypeVar("StateT")

INLINE = {"inline": True}
"""Metadata of a dataclass-valued field whose own fields are saved beside it rather than in a dict of their own."""


def to_plain(state: Any) -> dict[str, Any]:
    """Convert a dataclass to a dict of JSON values, one entry per field, in the order of the fields.

    Nested dataclasses become dicts, or are merged into this one where the field has `metadata=INLINE`. Arrays and
    tuples become lists, NumPy scalars Python numbers.
    """
    plain: dict[str, Any] = {}
    for field in fields(state):
        value = getattr(state, field.name)
        plain |= to_plain(value) if field.metadata.get("inline") else {field.name: _to_json(value)}
    return plain


def from_plain(state: StateT, saved: Mapping[str, Any]) -> StateT:
    """Return a copy of a fresh `state` with the values that `to_plain` has saved.

    Arrays get the dtype they have in `state`; a field that is None there becomes an array if its annotation names one.

    Args:
        state: A dataclass instance. Fields that `saved` lacks, as the state of an older version may, keep their value.
        saved: A dict that `to_plain` returned for such a state. Entries that are no field are ignored.
    """
    restored = copy.copy(state)
    hints = get_type_hints(type(state))
    for field in fields(state):  # type: ignore[arg-type]
        default = getattr(state, field.name)
        if field.metadata.get("inline"):
            value = from_plain(default, saved)
        elif field.name in saved:
            value = _from_json(saved[field.name], default, hints[field.name])
        else:
            continue
        object.__setattr__(restored, field.name, value)  # works for frozen dataclasses, too
    return restored


def _to_json(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return to_plain(value)
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, Mapping):
        return {key: _to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_to_json(item) for item in value]
    return value


def _from_json(value: Any, default: Any, hint: Any) -> Any:
    if is_dataclass(default) and not isinstance(default, type) and isinstance(value, Mapping):
        return from_plain(default, value)
    if isinstance(value, list):
        if isinstance(default, np.ndarray):
            return np.array(value, default.dtype)
        if default is None and np.ndarray in (hint, *get_args(hint)):
            return np.array(value)
        if isinstance(default, tuple):
            return tuple(value)
    return value
