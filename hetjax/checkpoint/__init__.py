"""Checkpoints: everything a run is made of, written beside the training, checked before it is used.

    saver = checkpoint.Saver("run/checkpoints", trainer, seconds=60)
    found = checkpoint.restore_latest("run/checkpoints", trainer.init(params), trainer)
    with saver:
        trainer.fit(found.state, source, epochs=10, hooks=[saver])

DIR/step_00000120/ holds `arrays/` (parameters, optimizer, model state, average and what a sync keeps, by Orbax),
`run.json` (format number, step, cursor, what the trainer remembers of controller, sync and order, and whatever the
caller adds) and `manifest.json`, the SHA-256 of every other file, written last. Nothing in it is ever unpickled. All of
it is checked when it is read; checkpoints of older formats can be read, those of a newer one are refused.
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
