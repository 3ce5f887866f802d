"""Checkpoints: everything a run is made of, written beside the training, checked before it is used.

    saver = checkpoint.Saver("run/checkpoints", trainer, seconds=60)
    found = checkpoint.restore_latest("run/checkpoints", trainer.init(params), trainer)
    with saver:
        trainer.fit(found.state, source, epochs=10, hooks=[saver])

DIR/step_00000120/ holds `arrays/` (parameters, optimiser, model state, average and what a sync keeps, by Orbax),
`run.json` (step, cursor, what the trainer remembers of controller, sync and order, and whatever the caller adds) and
`manifest.json`, the SHA-256 of every other file, written last. Nothing in it is ever unpickled.
"""

from hetjax.checkpoint.folder import Damaged, latest
from hetjax.checkpoint.resume import Found, restore, restore_latest
from hetjax.checkpoint.saver import Saver, save

__all__ = ["Damaged", "Found", "Saver", "latest", "restore", "restore_latest", "save"]
