"""What is in the folder of one checkpoint: the arrays by Orbax, the rest as JSON."""

from __future__ import annotations

import json
import math
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from hetjax.checkpoint.arrays import read_arrays, write_arrays
from hetjax.checkpoint.folder import Damaged, check
from hetjax.checkpoint.form import FORMAT, NewerFormat, check_run
from hetjax.checkpoint.snapshot import Snapshot

_RUN, _ARRAYS = "run.json", "arrays"


def fill(folder: Path, snapshot: Snapshot) -> None:
    stored = {_name(place): array for place, array in enumerate(snapshot.arrays) if array.size}
    write_arrays(folder / _ARRAYS, stored)
    kinds = [[array.dtype.name, array.shape] for array in snapshot.arrays]  # Orbax takes no empty arrays
    (folder / _RUN).write_text(json.dumps({"format": FORMAT, "kinds": kinds, **snapshot.run}), encoding="utf-8")


def read(path: Path) -> Snapshot:
    """A checkpoint, if every byte of it is as it was written and it holds what a checkpoint holds.

    Raises:
        Damaged: it does not.
        NewerFormat: it is of a format that this version does not know.
    """
    check(path)
    try:
        run = json.loads((path / _RUN).read_text(encoding="utf-8"))
        check_run(run)
        kinds = run.pop("kinds")
        names = [_name(place) for place, (_, shape) in enumerate(kinds) if math.prod(shape)]
        stored = read_arrays(path / _ARRAYS, names)
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
