"""A folder of checkpoints: each is written as a draft, sealed by a manifest of digests, and renamed when complete."""

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
    """A checkpoint differs from what was written, or its contents are invalid."""


def prepare(folder: Path, lock: FolderLock) -> None:
    """Create and lock the folder, and test that it is writable before hours of training depend on it."""
    try:
        lock.hold()
        for draft in folder.glob("draft_*"):  # of a program that was killed while saving
            shutil.rmtree(draft)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except InUse:
        raise
    except OSError as error:
        raise OSError(
            f"Checkpoints cannot be written to {folder}: {error.strerror or error}. Give a writable folder on a disk "
            "with free space."
        ) from error


def write(folder: Path, lock: FolderLock, step: int, fill: Callable[[Path], None], keep: int) -> Path:
    """Add the checkpoint of a step and delete all but the last `keep`.

    Checkpoints of later steps (damaged, or of an abandoned continuation) are set aside until the run has passed them.
    Whatever fails, existing checkpoints stay intact.

    Args:
        folder: where to
        lock: of the folder; held from here on
        step: the step's number
        fill: writes the files to the folder it is given
        keep: number of checkpoints to keep

    Returns:
        The checkpoint's path.

    Raises:
        InUse: another program uses the folder.
        OSError: the checkpoint could not be written.
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
    except Exception as error:  # Orbax has its own errors for a full disk
        shutil.rmtree(draft, ignore_errors=True)
        reason = getattr(error, "strerror", None) or error
        raise OSError(
            f"The checkpoint of step {step} could not be written to {folder}: {reason}. "
            "Earlier checkpoints are intact: free some space or give another folder, and resume from the last one."
        ) from error
    for passed in [path for path in folder.glob("aside_step_*") if _step(path) <= step]:
        shutil.rmtree(passed)
    for old in stored(folder)[:-keep]:
        shutil.rmtree(old.rename(old.with_name(f"draft_{old.name}")))  # a step_* folder is never partly deleted
    return final


def stored(folder: Path) -> list[Path]:
    """All checkpoints of a folder, oldest first."""
    return sorted((path for path in folder.glob("step_*") if path.is_dir() and _NAME.fullmatch(path.name)), key=_step)


def latest(folder: str | Path) -> Path | None:
    """Find the newest checkpoint of a folder.

    Args:
        folder: The folder with the checkpoints.

    Returns:
        The path of the checkpoint; None if there is none.
    """
    paths = stored(Path(folder))
    return paths[-1] if paths else None


def verify(path: Path) -> None:
    """Raise Damaged if a file of a checkpoint is missing, changed or additional."""
    try:
        expected = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        if not isinstance(expected, dict):
            raise ValueError("it is not an object")
    except (OSError, ValueError, RecursionError) as error:
        raise Damaged(f"{path} is not a complete checkpoint: its {MANIFEST} is missing or broken ({error}).") from error
    try:
        found = _digests(path)
    except OSError as error:
        raise Damaged(f"The checkpoint {path} cannot be read: {error}.") from error
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            what = "is missing" if name not in found else "was added" if name not in expected else "has changed"
            raise Damaged(f"The checkpoint {path} is damaged: {name} {what} since it was written.")


def _step(path: Path) -> int:
    return int(path.name.rpartition("_")[2])


def _set_aside(path: Path) -> None:
    aside = path.with_name(f"aside_{path.name}")
    shutil.rmtree(aside, ignore_errors=True)
    path.rename(aside)


def _seal(folder: Path) -> None:
    """Flush all files to disk, then write their manifest."""
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
