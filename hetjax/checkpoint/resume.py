"""Resuming a run: from the newest intact checkpoint, identically on all processes."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import jax.numpy as jnp
import numpy as np

from hetjax import processes
from hetjax.checkpoint.contents import read_snapshot
from hetjax.checkpoint.folder import Damaged, stored
from hetjax.checkpoint.snapshot import RunSnapshot, rebuild
from hetjax.state import State

log = logging.getLogger("hetjax")
_SKIPPED = "%s Trying the previous checkpoint."


class Restorable(Protocol):
    """What resuming needs of a trainer."""

    def load_state_dict(self, saved: Mapping[str, Any], state: State) -> State: ...


@dataclass(frozen=True)
class Restored:
    """A restored run.

    Attributes:
        state: The state of training.
        extra: What the caller had added to the checkpoint.
    """

    state: State
    extra: Mapping[str, Any]


def restore(path: str | Path, like: State, trainer: Restorable) -> Restored:
    """Restore a run, including the trainer's own state, from one checkpoint.

    The devices, the number of workers and processes, and the controller may differ from those of the saved run. With
    several processes all have to call this; only process 0 reads the files.

    Args:
        path: the checkpoint
        like: a fresh state of the same model and optimizer, from `init`
        trainer: the trainer, or in your own loop the `Step`; it loads its part of the checkpoint

    Returns:
        The state to continue from, and the caller's additions.

    Raises:
        Damaged: the checkpoint is not intact.
        NewerFormat: a newer version wrote it.
        ValueError: it belongs to another model, optimizer, batch size or seed.
    """
    path = Path(path).resolve()
    snapshot = _on_all_processes(lambda: read_snapshot(path))
    assert snapshot is not None
    return _resume(snapshot, like, trainer)


def restore_latest(folder: str | Path, like: State, trainer: Restorable) -> Restored | None:
    """Restore a run from the newest intact checkpoint of a folder, with a warning about each damaged one.

    Args:
        folder: the folder of checkpoints
        like: see `restore`
        trainer: see `restore`

    Returns:
        The restored run, or None if the folder has no checkpoint.

    Raises:
        Damaged: none of the checkpoints is intact.
        NewerFormat: a newer version wrote the newest intact one, which is not skipped.
        ValueError: see `restore`.
    """
    folder = Path(folder).resolve()
    unusable: list[str] = []  # files intact, contents incomplete
    while (snapshot := _on_all_processes(lambda: _newest_intact(folder, unusable))) is not None:
        try:
            return _resume(snapshot, like, trainer)
        except Damaged as damage:
            unusable.append(snapshot.origin)
            log.warning(_SKIPPED, damage)
    return None


def _resume(snapshot: RunSnapshot, like: State, trainer: Restorable) -> Restored:
    """The same on all processes: if one of them cannot use the snapshot, none does."""
    restored, cause = None, None
    try:
        state = rebuild(snapshot, like)
        restored = Restored(trainer.load_state_dict(snapshot.run["trainer"], state), snapshot.run["extra"])
    except (KeyError, IndexError, TypeError, AttributeError) as error:  # a mismatch with `like` is a ValueError
        cause = error
    causes = [each for each in processes.gather(cause and f"{type(cause).__name__}: {cause}") if each is not None]
    if restored is None or causes:
        raise Damaged(f"The checkpoint {snapshot.origin} is incomplete or malformed ({causes[0]}).") from cause
    return restored


def _newest_intact(folder: Path, unusable: Sequence[str]) -> RunSnapshot | None:
    paths = stored(folder)
    for path in reversed(paths):
        if str(path) in unusable:
            continue
        try:
            return read_snapshot(path)
        except Damaged as damage:
            log.warning(_SKIPPED, damage)
    if paths:
        raise Damaged(f"None of the {len(paths)} checkpoints in {folder} is intact: there is nothing to resume from.")
    return None


def _on_all_processes(read: Callable[[], RunSnapshot | None]) -> RunSnapshot | None:
    """What process 0 reads, or its error, on all processes."""
    if processes.count() == 1:
        return read()
    message: dict[str, Any] = {}
    snapshot, failure = None, None
    if processes.first():
        try:
            snapshot = read()
        except (ValueError, OSError) as error:
            failure = error
        kinds = [] if snapshot is None else [[array.dtype.name, array.shape] for array in snapshot.arrays]
        message = {"failure": failure and str(failure), "run": snapshot and snapshot.run, "kinds": kinds}
        message["origin"] = snapshot and snapshot.origin
    message = json.loads(processes.broadcast_bytes(json.dumps(message).encode()))
    if failure is not None:
        raise failure
    if message["failure"] is not None:
        raise ValueError(message["failure"])
    if message["run"] is None:
        return None
    kinds = message["kinds"]
    own = [None] * len(kinds) if snapshot is None else snapshot.arrays
    arrays = [_broadcast_array(array, *kind) for array, kind in zip(own, kinds, strict=True)]
    return RunSnapshot(arrays, message["run"], message["origin"])


def _broadcast_array(array: np.ndarray | None, dtype: str, shape: list[int]) -> np.ndarray:
    content = processes.broadcast_bytes(None if array is None else array.tobytes())
    return np.frombuffer(content, jnp.dtype(dtype)).reshape(shape)
