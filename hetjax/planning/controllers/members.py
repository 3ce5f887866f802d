"""Controllers of a fleet whose members come and go: what was learned about a worker stays with it.

The state of a controller has lists with one entry per worker; their names end in `W`. Entries of workers that are lost
go, and workers that have joined get those of a fresh controller.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


def followed(state: Mapping[str, Any], fresh: Mapping[str, Any], kept_W: Sequence[int | None]) -> dict[str, Any]:
    """The state of a controller for other workers.

    Args:
        state: its `state_dict`.
        fresh: that of a new controller for as many workers as there are now.
        kept_W: for each worker, which of the former ones it is; None: it has joined.

    Returns:
        The state to load.
    """
    found = dict(state)
    for name, new in fresh.items():
        old = state.get(name)
        if name == "workers":
            found[name] = len(kept_W)
        elif isinstance(new, Mapping) and isinstance(old, Mapping):
            found[name] = followed(old, new, kept_W)
        elif name.endswith("W") and isinstance(old, list):
            found[name] = _columns(np.asarray(old), None if new is None else np.asarray(new), kept_W)
    return found


def _columns(old: np.ndarray, new: np.ndarray | None, kept_W: Sequence[int | None]) -> list[Any]:
    """The entries of the last axis that are kept; others are new, or else the mean of those that are kept."""
    kept = [i for i in kept_W if i is not None]
    mean = np.mean(old[..., kept], axis=-1) if kept else np.zeros(old.shape[:-1])
    columns = []
    for k, i in enumerate(kept_W):
        columns.append(old[..., i] if i is not None else mean if new is None else new[..., k])
    return np.stack(columns, axis=-1).astype(old.dtype).tolist()
