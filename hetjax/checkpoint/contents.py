"""What is in the folder of one checkpoint: the arrays by Orbax, the rest as JSON."""

from __future__ import annotations

import json
import math
import warnings
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from hetjax.checkpoint.folder import Damaged, check
from hetjax.checkpoint.form import FORMAT, NewerFormat, check_run
from hetjax.checkpoint.snapshot import Snapshot

_RUN, _ARRAYS = "run.json", "arrays"


def load() -> None:
    """Import what saving needs: that takes a while, and is better done before the first step."""
    import orbax.checkpoint  # noqa: F401


def fill(folder: Path, snapshot: Snapshot) -> None:
    stored = {_name(place): array for place, array in enumerate(snapshot.arrays) if array.size}
    with _orbax() as writer:
        writer.save(folder / _ARRAYS, stored)
    kinds = [[array.dtype.name, array.shape] for array in snapshot.arrays]  # Orbax takes no empty arrays
    (folder / _RUN).write_text(json.dumps({"format": FORMAT, "kinds": kinds, **snapshot.run}), encoding="utf-8")


def read(path: Path) -> Snapshot:
    """A checkpoint, if every byte of it is as it was written and it holds what a checkpoint holds.

    Raises:
        Damaged: it does not.
        NewerFormat: it is of a format that this version does not know.
    """
    import orbax.checkpoint

    check(path)
    try:
        run = json.loads((path / _RUN).read_text(encoding="utf-8"))
        check_run(run)
        kinds = run.pop("kinds")
        names = [_name(place) for place, (_, shape) in enumerate(kinds) if math.prod(shape)]
        with warnings.catch_warnings(), _orbax() as reader:
            warnings.simplefilter("ignore")
            as_numpy = {name: orbax.checkpoint.RestoreArgs(np.ndarray) for name in names}
            stored = reader.restore(path / _ARRAYS, restore_args=as_numpy)
        arrays = [
            np.asarray(stored[_name(place)]) if math.prod(shape) else np.zeros(shape, jnp.dtype(dtype))
            for place, (dtype, shape) in enumerate(kinds)
        ]
        for array, (dtype, shape) in zip(arrays, kinds, strict=True):
            if array.dtype != jnp.dtype(dtype) or list(array.shape) != shape:
                raise ValueError(f"an array is {array.dtype}{list(array.shape)}, expected {dtype}{shape}")
        return Snapshot(arrays, run, str(path))
    except NewerFormat as error:
        raise NewerFormat(f"The checkpoint {path} cannot be read: {error}.") from None
    except Exception as error:  # whole, and yet nothing that this version can read
        raise Damaged(f"The checkpoint {path} cannot be read: {error}.") from error


def _name(place: int) -> str:
    return f"{place:05d}"


def _orbax() -> Any:
    """Orbax in this process alone: by itself it would wait for the others of a run."""
    import orbax.checkpoint  # not part of importing hetjax: it takes a while, and many runs save nothing

    alone = orbax.checkpoint.options.MultiprocessingOptions(
        primary_host=0, active_processes={0}, barrier_sync_key_prefix="hetjax"
    )
    handler = orbax.checkpoint.PyTreeCheckpointHandler(multiprocessing_options=alone)
    return orbax.checkpoint.Checkpointer(handler, multiprocessing_options=alone)
