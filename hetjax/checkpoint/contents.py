"""The files of one checkpoint: `arrays/` by Orbax, everything else in `run.json`."""

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

from hetjax.checkpoint.folder import Damaged, verify
from hetjax.checkpoint.format import FORMAT, NewerFormat, check_run
from hetjax.checkpoint.snapshot import RunSnapshot

_RUN, _ARRAYS = "run.json", "arrays"


def write_snapshot(folder: Path, snapshot: RunSnapshot) -> None:
    """Write a snapshot's files to a new folder."""
    stored = {_name(i): array for i, array in enumerate(snapshot.arrays) if array.size}  # Orbax takes no empty arrays
    write_arrays(folder / _ARRAYS, stored)
    kinds = [[array.dtype.name, array.shape] for array in snapshot.arrays]
    (folder / _RUN).write_text(json.dumps({"format": FORMAT, "kinds": kinds, **snapshot.run}), encoding="utf-8")


def read_snapshot(path: Path) -> RunSnapshot:
    """Read and verify a checkpoint.

    Raises:
        Damaged: a file differs from what was written, or the contents are invalid.
        NewerFormat: a newer version wrote it.
    """
    verify(path)
    try:
        run = json.loads((path / _RUN).read_text(encoding="utf-8"))
        check_run(run)
        kinds = run.pop("kinds")
        names = [_name(i) for i, (_, shape) in enumerate(kinds) if math.prod(shape)]
        stored = read_arrays(path / _ARRAYS, names)
        arrays = [
            np.asarray(stored[_name(i)]) if math.prod(shape) else np.zeros(shape, jnp.dtype(dtype))
            for i, (dtype, shape) in enumerate(kinds)
        ]
        for array, (dtype, shape) in zip(arrays, kinds, strict=True):
            if array.dtype != jnp.dtype(dtype) or list(array.shape) != shape:
                raise ValueError(f"an array is {array.dtype}{list(array.shape)}, expected {dtype}{shape}")
        return RunSnapshot(arrays, run, str(path))
    except NewerFormat as error:
        raise NewerFormat(f"The checkpoint {path} cannot be read: {error}.") from None
    except Exception as error:  # the files are as written, but this version cannot read them
        raise Damaged(f"The checkpoint {path} cannot be read: {error}.") from error


def import_orbax() -> None:
    """Import what saving needs: better done before the first step, as it takes a while."""
    import orbax.checkpoint  # noqa: F401


def write_arrays(folder: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write arrays to a new folder.

    Raises:
        OSError: the disk is full, a quota is used up, or the like.
    """
    failures: list[Exception] = []
    try:
        with _orbax(failures) as writer, _errors_not_logged():
            writer.save(folder, arrays)
    except Exception as error:
        failures.append(error)
    if failures:
        raise _as_os_error(failures[0]) from failures[0]


def read_arrays(folder: Path, names: Sequence[str]) -> Mapping[str, Any]:
    """Read the named arrays of a folder."""
    import orbax.checkpoint

    with warnings.catch_warnings(), _orbax([]) as reader:
        warnings.simplefilter("ignore")
        as_numpy = {name: orbax.checkpoint.RestoreArgs(np.ndarray) for name in names}
        return reader.restore(folder, restore_args=as_numpy)


def _orbax(failures: list[Exception]) -> Any:
    """A checkpointer for this process alone: by default Orbax waits for all processes of a run.

    Failed writes are appended to `failures`. If they were raised inside Orbax, it would close the event loop that
    concurrent writes still report to, each with a traceback on stderr.
    """
    import orbax.checkpoint  # slow to import, and many runs save nothing

    class Handler(orbax.checkpoint.type_handlers.NumpyHandler):
        async def _open_and_write(self, *args: Any, **options: Any) -> None:
            try:
                await super()._open_and_write(*args, **options)
            except Exception as error:
                failures.append(error)

    types = orbax.checkpoint.type_handlers
    registry = types.create_type_handler_registry(
        (np.ndarray, Handler()),
        (jax.Array, types.get_type_handler(jax.Array)),  # never used, but Orbax warns without it
    )
    alone = orbax.checkpoint.options.MultiprocessingOptions(
        primary_host=0, active_processes={0}, barrier_sync_key_prefix="hetjax"
    )
    handler = orbax.checkpoint.PyTreeCheckpointHandler(multiprocessing_options=alone, type_handler_registry=registry)
    return orbax.checkpoint.Checkpointer(handler, multiprocessing_options=alone)


@contextmanager
def _errors_not_logged() -> Iterator[None]:
    """Suppresses Orbax's log of errors in its threads, which are raised as well."""
    logger = logging.getLogger("absl")
    logger.addFilter(_is_no_orbax_error)
    try:
        yield
    finally:
        logger.removeFilter(_is_no_orbax_error)


def _is_no_orbax_error(record: logging.LogRecord) -> bool:
    return record.exc_info is None or "orbax" not in record.pathname


def _as_os_error(error: Exception) -> Exception:
    """The OSError behind an error of TensorStore, which gives only its number; other errors unchanged."""
    number = re.search(r"os_error_code='(\d+)'", str(error))
    return error if number is None else OSError(int(number[1]), os.strerror(int(number[1])))


def _name(index: int) -> str:
    return f"{index:05d}"
