"""Checkpoints: the complete state of a run, written in the background and verified before use.

    saver = checkpoint.Saver("run/checkpoints", trainer, seconds=60)
    found = checkpoint.restore_latest("run/checkpoints", trainer.init(params), trainer)
    with saver:
        trainer.fit(found.state, source, epochs=10, hooks=[saver])

DIR/step_00000120/ holds `arrays/` (parameters, optimizer state, model state, moving average and the sync's state, by
Orbax), `run.json` (format number, step, cursor, the trainer's state_dict and the caller's additions) and
`manifest.json`, the SHA-256 of every other file, written last. Nothing is ever unpickled. Everything is checked when it
is read; older formats can be read, newer ones are refused.
"""

from hetjax.checkpoint.folder import Damaged, latest
from hetjax.checkpoint.format import FORMAT, NewerFormat
from hetjax.checkpoint.lock import FolderLock, InUse
from hetjax.checkpoint.resume import Restored, restore, restore_latest
from hetjax.checkpoint.saver import Saver, save

__all__ = [
    "FORMAT",
    "Damaged",
    "FolderLock",
    "InUse",
    "NewerFormat",
    "Restored",
    "Saver",
    "latest",
    "restore",
    "restore_latest",
    "save",
]
