"""Checkpoints: everything a run is made of, written by Orbax, sealed by a manifest, checked before it is used.

DIR/step_00000120/ holds `arrays/` (params, model state, optimiser, average), `run.json` (step, cursor, the controller's
state and whatever the caller adds) and `manifest.json`, the SHA-256 of every other file, written last. Orbax itself
does not notice a flipped byte. A checkpoint is written under another name and renamed when it is whole.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from hetjax.plan.controllers.protocol import Controller
from hetjax.run.update import State

MANIFEST, RUN, ARRAYS = "manifest.json", "run.json", "arrays"


def save(folder: str | Path, state: State, controller: Controller, extra: Mapping[str, Any], keep: int = 2) -> Path:
    """Write a checkpoint of this state and forget all but the last `keep`; the path of the new one."""
    import orbax.checkpoint  # a second to import, wanted only when something is saved

    folder = Path(folder).resolve()
    final, draft = folder / f"step_{state.step:08d}", folder / f"draft_{state.step:08d}"
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    names, leaves = _named(state)
    arrays = {f"{place:05d}": np.asarray(leaf) for place, leaf in enumerate(leaves)}
    with orbax.checkpoint.Checkpointer(orbax.checkpoint.PyTreeCheckpointHandler()) as writer:
        writer.save(draft / ARRAYS, arrays)
    run = {
        "step": state.step,
        "cursor": state.cursor,
        "arrays": names,
        "controller": controller.state_dict(),
        "extra": dict(extra),
    }
    (draft / RUN).write_text(json.dumps(run), encoding="utf-8")
    (draft / MANIFEST).write_text(json.dumps(_digests(draft), indent=1), encoding="utf-8")
    shutil.rmtree(final, ignore_errors=True)
    draft.rename(final)
    for old in _all(folder)[:-keep]:
        shutil.rmtree(old)
    return final


class Saver:
    """A hook of `fit` that saves at the end of an epoch, if `every` seconds have passed since the last time.

    `extra(record)` is what to add to the checkpoint.
    """

    def __init__(
        self,
        folder: str | Path,
        controller: Controller,
        epoch_samples: int,
        every: float,
        extra: Callable[[Any], Mapping[str, Any]],
    ):
        self.folder, self.controller, self.epoch_samples = Path(folder), controller, epoch_samples
        self.every, self.extra = every, extra
        self._last = time.monotonic()

    def __call__(self, record: Any, state: State) -> None:
        if state.cursor % self.epoch_samples == 0 and time.monotonic() - self._last >= self.every:
            self.save(record, state)

    def save(self, record: Any, state: State) -> None:
        """Now, whatever the time; by the first process only, as all of them hold the same."""
        if jax.process_index() == 0:
            save(self.folder, state, self.controller, self.extra(record))
        self._last = time.monotonic()


def latest(folder: str | Path) -> Path | None:
    """The newest checkpoint in a folder, if there is one."""
    found = _all(Path(folder))
    return found[-1] if found else None


def restore(path: str | Path, like: State, controller: Controller) -> tuple[State, dict[str, Any]]:
    """The state in a checkpoint and what the caller had added; the controller goes on from where it was.

    `like` is a fresh state of the same model and optimiser (`trainer.init`). The workers, their number and the
    controller may be others.
    """
    import orbax.checkpoint

    path = Path(path).resolve()
    check(path)
    run = json.loads((path / RUN).read_text(encoding="utf-8"))
    names, leaves = _named(like)
    if names != run["arrays"]:
        odd = sorted(set(names) ^ set(run["arrays"]))
        raise ValueError(
            f"{path} belongs to another model or optimiser: {len(odd)} arrays differ, first "
            f"{odd[0] if odd else names[0]}. Resume with the configuration it was saved with."
        )
    with warnings.catch_warnings(), orbax.checkpoint.Checkpointer(orbax.checkpoint.PyTreeCheckpointHandler()) as reader:
        warnings.simplefilter("ignore")
        as_numpy = {f"{place:05d}": orbax.checkpoint.RestoreArgs(np.ndarray) for place in range(len(names))}
        stored = reader.restore(path / ARRAYS, restore_args=as_numpy)
    values = [np.asarray(stored[f"{place:05d}"]) for place in range(len(names))]
    for name, value, leaf in zip(names, values, leaves, strict=True):
        if value.shape != np.shape(leaf):
            raise ValueError(
                f"{path} belongs to another model: {name} has shape {value.shape} there and {np.shape(leaf)} here. "
                "Resume with the configuration it was saved with."
            )
    core = jax.tree.unflatten(jax.tree.structure(like.core), [jax.numpy.asarray(value) for value in values])
    params, model_state, opt_state, ema = core
    if run["controller"].get("controller") == controller.name:  # another one starts with what it sees
        controller.load_state_dict(run["controller"])
    return State(params, model_state, opt_state, ema, step=run["step"], cursor=run["cursor"]), run["extra"]


def check(path: Path) -> None:
    """Refuse a checkpoint with a missing, changed or additional file, naming it."""
    try:
        promised = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError) as error:
        raise ValueError(f"{path} is no whole checkpoint: its {MANIFEST} is missing or broken ({error}).") from error
    found = _digests(path)
    for name in sorted(promised.keys() | found.keys()):
        if promised.get(name) != found.get(name):
            what = "is missing" if name not in found else "was added" if name not in promised else "has changed"
            raise ValueError(
                f"The checkpoint {path} is damaged: {name} {what} since it was written. Delete that folder to "
                "resume from the checkpoint before it."
            )


def _all(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("step_*") if path.is_dir())


def _named(state: State) -> tuple[list[str], list[Any]]:
    flat = jax.tree_util.tree_flatten_with_path(state.core)[0]
    return [jax.tree_util.keystr(path) for path, _ in flat], [leaf for _, leaf in flat]


def _digests(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
