"""What is in the folder of one checkpoint: the arrays by Orbax, the rest as JSON.

The arrays of a checkpoint, by Orbax in this process alone; a write that fails is raised, not printed.

What is in the folder of one checkpoint: the arrays by Orbax, the rest as JSON.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hetjax.checkpoint.folder import Damaged, check
from hetjax.checkpoint.format import FORMAT, NewerFormat, check_run
from hetjax.checkpoint.snapshot import RunSnapshot


def load() -> None:
    """Import what saving needs: that takes a while, and is better done before the first step."""
    import orbax.checkpoint  # noqa: F401


def write_arrays(folder: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write the arrays to a new folder.

    Raises:
        OSError: the disk is full, a quota is used up, or the like.
    """
    failures: list[Exception] = []
    try:
        with _orbax(failures) as writer, _silence():
            writer.save(folder, arrays)
    except Exception as error:
        failures.append(error)
    if failures:
        raise _as_os_error(failures[0]) from failures[0]


def read_arrays(folder: Path, names: Sequence[str]) -> Mapping[str, Any]:
    """Read the named arrays of such a folder."""
    import orbax.checkpoint

    with warnings.catch_warnings(), _orbax([]) as reader:
        warnings.simplefilter("ignore")
        as_numpy = {name: orbax.checkpoint.RestoreArgs(np.ndarray) for name in names}
        return reader.restore(folder, restore_args=as_numpy)


def _orbax(failures: list[Exception]) -> Any:
    """Orbax in this process alone: by itself it would wait for the others of a run.

    Writes that fail are added to `failures`. Were they raised inside Orbax, it would close the event loop that the
    writes beside them still report to, each with a traceback on stderr.
    """
    import orbax.checkpoint  # not part of importing hetjax: it takes a while, and many runs save nothing

    class Handler(orbax.checkpoint.type_handlers.NumpyHandler):
        async def _open_and_write(self, *args: Any, **options: Any) -> None:
            try:
                await super()._open_and_write(*args, **options)
            except Exception as error:
                failures.append(error)

    types = orbax.checkpoint.type_handlers
    registry = types.create_type_handler_registry(
        (np.ndarray, Handler()),
        (jax.Array, types.get_type_handler(jax.Array)),  # none is written, but Orbax warns where it is missing
    )
    alone = orbax.checkpoint.options.MultiprocessingOptions(
        primary_host=0, active_processes={0}, barrier_sync_key_prefix="hetjax"
    )
    handler = orbax.checkpoint.PyTreeCheckpointHandler(multiprocessing_options=alone, type_handler_registry=registry)
    return orbax.checkpoint.Checkpointer(handler, multiprocessing_options=alone)


@contextmanager
def _silence() -> Iterator[None]:
    """No log of errors by Orbax's threads, which are raised as well."""
    logger = logging.getLogger("absl")
    logger.addFilter(_not_an_error_of_orbax)
    try:
        yield
    finally:
        logger.removeFilter(_not_an_error_of_orbax)


def _not_an_error_of_orbax(record: logging.LogRecord) -> bool:
    return record.exc_info is None or "orbax" not in record.pathname


def _as_os_error(error: Exception) -> Exception:
    """The operating system's error behind one of TensorStore, which names only its number; or the error as it is."""
    number = re.search(r"os_error_code='(\d+)'", str(error))
    return error if number is None else OSError(int(number[1]), os.strerror(int(number[1])))


_RUN, _ARRAYS = "run.json", "arrays"


def fill(folder: Path, snapshot: RunSnapshot) -> None:
    stored = {_name(place): array for place, array in enumerate(snapshot.arrays) if array.size}
    write_arrays(folder / _ARRAYS, stored)
    kinds = [[array.dtype.name, array.shape] for array in snapshot.arrays]  # Orbax takes no empty arrays
    (folder / _RUN).write_text(json.dumps({"format": FORMAT, "kinds": kinds, **snapshot.run}), encoding="utf-8")


def read(path: Path) -> RunSnapshot:
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
        return RunSnapshot(arrays, run, str(path))
    except NewerFormat as error:
        raise NewerFormat(f"The checkpoint {path} cannot be read: {error}.") from None
    except Exception as error:  # whole, and yet nothing that this version can read
        raise Damaged(f"The checkpoint {path} cannot be read: {error}.") from error


def _name(place: int) -> str:
    return f"{place:05d}"
