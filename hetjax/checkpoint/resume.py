"""From a checkpoint back to a run: checked, from the newest that is whole, the same on all processes."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from hetjax.checkpoint.contents import read
from hetjax.checkpoint.folder import Damaged, stored
from hetjax.checkpoint.snapshot import RunSnapshot, from_first, rebuild
from hetjax.fleet.agree import gather
from hetjax.reduce.update import State

log = logging.getLogger("hetjax")
_PASSED_OVER = "%s Trying the checkpoint before it."


class Restorable(Protocol):
    """A trainer, as far as going on is concerned."""

    def load_state_dict(self, saved: Mapping[str, Any], state: State) -> State: ...


@dataclass(frozen=True)
class Restored:
    """Where to go on: the state, and what the caller had added to the checkpoint."""

    state: State
    extra: Mapping[str, Any]


def restore(path: str | Path, like: State, trainer: Restorable) -> Restored:
    """The run in a checkpoint; the trainer goes on from where it was.

    `like` is a fresh state of the same model and optimizer (`trainer.init`). The workers and processes, their number
    and the controller may be others. With several processes all call this; only the first one needs the files.
    """
    path = Path(path).resolve()
    snapshot = _for_all(lambda: read(path))
    assert snapshot is not None
    return _resumed(snapshot, like, trainer)


def restore_latest(folder: str | Path, like: State, trainer: Restorable) -> Restored | None:
    """The run in the newest checkpoint of a folder that is whole, with a warning about each that is not.

    None where the folder holds no checkpoint at all. One of a newer format is refused, not passed over. See `restore`.
    """
    folder = Path(folder).resolve()
    unusable: list[str] = []  # whole, but what they hold did not make a run
    while (snapshot := _for_all(lambda: _newest_whole(folder, unusable))) is not None:
        try:
            return _resumed(snapshot, like, trainer)
        except Damaged as damage:
            unusable.append(snapshot.origin)
            log.warning(_PASSED_OVER, damage)
    return None


def _resumed(snapshot: RunSnapshot, like: State, trainer: Restorable) -> Restored:
    """The same on all processes: where one of them cannot use the snapshot, none does."""
    found, cause = None, None
    try:
        state = rebuild(snapshot, like)
        found = Restored(trainer.load_state_dict(snapshot.run["trainer"], state), snapshot.run["extra"])
    except (KeyError, IndexError, TypeError, AttributeError) as error:  # what does not belong to `like` is a ValueError
        cause = error
    causes = [said for said in gather(cause and f"{type(cause).__name__}: {cause}") if said is not None]
    if found is None or causes:
        raise Damaged(f"The checkpoint {snapshot.origin} is incomplete or malformed ({causes[0]}).") from cause
    return found


def _newest_whole(folder: Path, unusable: Sequence[str]) -> RunSnapshot | None:
    paths = stored(folder)
    for path in reversed(paths):
        if str(path) in unusable:
            continue
        try:
            return read(path)
        except Damaged as damage:
            log.warning(_PASSED_OVER, damage)
    if paths:
        raise Damaged(f"None of the {len(paths)} checkpoints in {folder} is whole: there is nothing to go on from.")
    return None


def _for_all(read_here: Callable[[], RunSnapshot | None]) -> RunSnapshot | None:
    """What the first process reads, on all processes; its error is an error on all."""
    if jax.process_count() == 1:
        return read_here()
    told: dict[str, Any] = {}
    snapshot, failure = None, None
    if jax.process_index() == 0:
        try:
            snapshot = read_here()
        except (ValueError, OSError) as error:
            failure = error
        kinds = [] if snapshot is None else [[array.dtype.name, array.shape] for array in snapshot.arrays]
        told = {"failure": failure and str(failure), "run": snapshot and snapshot.run, "kinds": kinds}
        told["origin"] = snapshot and snapshot.origin
    told = json.loads(from_first(json.dumps(told).encode()))
    if failure is not None:
        raise failure
    if told["failure"] is not None:
        raise ValueError(told["failure"])
    if told["run"] is None:
        return None
    arrays = [_shared(array, *kind) for array, kind in _pairs(snapshot, told["kinds"])]
    return RunSnapshot(arrays, told["run"], told["origin"])


def _pairs(snapshot: RunSnapshot | None, kinds: list[Any]) -> list[tuple[np.ndarray | None, Any]]:
    arrays: list[Any] = [None] * len(kinds) if snapshot is None else list(snapshot.arrays)
    return list(zip(arrays, kinds, strict=True))


def _shared(array: np.ndarray | None, dtype: str, shape: list[int]) -> np.ndarray:
    content = from_first(None if array is None else array.tobytes())
    return np.frombuffer(content, jnp.dtype(dtype)).reshape(shape)
