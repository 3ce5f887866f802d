"""A folder of checkpoints: each is filled under another name, sealed by a manifest, and renamed when it is whole."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from hetjax.checkpoint.lock import FolderLock, InUse

MANIFEST = "manifest.json"
_NAME = re.compile(r"step_(\d{8,})")


class Damaged(ValueError):
    """A checkpoint is not what was written."""


def prepare(folder: Path, lock: FolderLock) -> None:
    """Make and lock the folder and see that it can be written to, before hours of training depend on it."""
    try:
        lock.hold()
        for draft in folder.glob("draft_*"):  # a program ended while it wrote
            shutil.rmtree(draft)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except InUse:
        raise
    except OSError as error:
        raise OSError(
            f"Checkpoints cannot be written to {folder}: {error.strerror or error}. Give a folder on a disk with space "
            "that you may write to."
        ) from error


def write(folder: Path, lock: FolderLock, step: int, fill: Callable[[Path], None], keep: int) -> Path:
    """Add the checkpoint of a step, which `fill` writes into the folder it is given; forget all but the last `keep`.

    The folder is locked before, and stays so. Later ones, damaged or of a future not taken, are set aside until the run
    is as far again. Whatever goes wrong, the checkpoints that were there stay as they are.
    """
    final, draft = folder / f"step_{step:08d}", folder / f"draft_{step:08d}"
    try:
        lock.hold()
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        fill(draft)
        _seal(draft)
        for later in [path for path in stored(folder) if _step(path) >= step]:
            _set_aside(later)
        draft.rename(final)
        _flush(folder)
    except InUse:
        raise
    except Exception as error:  # Orbax has errors of its own for a full disk
        shutil.rmtree(draft, ignore_errors=True)
        why = getattr(error, "strerror", None) or error
        raise OSError(
            f"The checkpoint of step {step} could not be written to {folder}: {why}. "
            "Earlier checkpoints are as they were; make room or give another folder, and resume from the last one."
        ) from error
    for passed in [path for path in folder.glob("aside_step_*") if _step(path) <= step]:
        shutil.rmtree(passed)
    for old in stored(folder)[:-keep]:
        shutil.rmtree(old.rename(old.with_name(f"draft_{old.name}")))  # never half a checkpoint under its name
    return final


def stored(folder: Path) -> list[Path]:
    """All checkpoints, the oldest first."""
    return sorted((path for path in folder.glob("step_*") if path.is_dir() and _NAME.fullmatch(path.name)), key=_step)


def latest(folder: str | Path) -> Path | None:
    """The newest checkpoint in a folder, if there is one."""
    found = stored(Path(folder))
    return found[-1] if found else None


def check(path: Path) -> None:
    """Refuse a checkpoint with a missing, changed or additional file, naming it."""
    try:
        promised = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        if not isinstance(promised, dict):
            raise ValueError("it is no list of files")
    except (OSError, ValueError, RecursionError) as error:
        raise Damaged(f"{path} is no whole checkpoint: its {MANIFEST} is missing or broken ({error}).") from error
    try:
        found = _digests(path)
    except OSError as error:
        raise Damaged(f"The checkpoint {path} cannot be read: {error}.") from error
    for name in sorted(promised.keys() | found.keys()):
        if promised.get(name) != found.get(name):
            what = "is missing" if name not in found else "was added" if name not in promised else "has changed"
            raise Damaged(f"The checkpoint {path} is damaged: {name} {what} since it was written.")


def _step(path: Path) -> int:
    return int(path.name.rpartition("_")[2])


def _set_aside(path: Path) -> None:
    aside = path.with_name(f"aside_{path.name}")
    shutil.rmtree(aside, ignore_errors=True)
    path.rename(aside)


def _seal(folder: Path) -> None:
    """Hand everything to the disk, and then the manifest of it."""
    digests = _digests(folder)
    for name in digests:
        _flush(folder / name)
    (folder / MANIFEST).write_text(json.dumps(digests, indent=1), encoding="utf-8")
    _flush(folder / MANIFEST)
    _flush(folder)


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _digests(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / MANIFEST)
    return {str(path.relative_to(folder)): _digest(path) for path in files}


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
