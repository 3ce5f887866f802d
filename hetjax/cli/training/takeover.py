"""Take over a run folder: lock it, and replace an earlier run only once the new one has finished a step."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hetjax import checkpoint, processes
from hetjax.cli.training import output, partitions
from hetjax.cli.training.configs import Config
from hetjax.sampling.blocks import Blocks

CHECKPOINTS = "checkpoints"
_REPLACED = "replaced_checkpoints"


@contextmanager
def sole_use(folder: Path) -> Iterator[None]:
    """Lock the folder against other runs: process 0, which writes, holds the lock; all processes raise on failure."""
    lock, refusal = checkpoint.FolderLock(folder), None
    try:
        if processes.first():
            try:
                lock.hold()
            except OSError as error:
                refusal = str(error)
        if (refusal := processes.gather(refusal)[0]) is not None:
            raise checkpoint.InUse(refusal)
        yield
    finally:
        lock.release()


class Takeover:
    """A hook for `fit`, before all others, that replaces earlier runs at the first finished step.

    It removes checkpoints and summaries of the runs in `replaces`, then writes the new configuration. A failure before
    leaves the earlier run as it was. A crash in between leaves an old configuration, which a restarted run ignores.
    """

    def __init__(self, config: Config, folder: Path, replaces: Sequence[Path], partition: str | Blocks):
        self.config, self.folder, self.partition = config, folder, partition
        self.replaces = () if config.output.resume else replaces
        self.done = False

    def __call__(self, record: Any, state: Any) -> None:
        self.now()

    def now(self) -> None:
        """Take over the folder, once."""
        if self.done:
            return
        self.done = True
        if not processes.first():
            return
        for folder in self.replaces:
            remove_resumable(folder)
        partitions.keep(self.config, self.folder, self.partition)
        for folder in dict.fromkeys((self.config.folder, self.folder)):
            output.write_config(self.config, folder)

    def last_checkpoint(self) -> str:
        """Return a sentence that names the last checkpoint of this run; those of an earlier run do not count."""
        own = self.done or self.config.output.resume
        return output.last_checkpoint(self.folder / CHECKPOINTS if own else None)


def remove_resumable(folder: Path) -> None:
    """Remove checkpoints and summary; the rename fails first if the folder is not writable."""
    replaced = folder / _REPLACED
    if (folder / CHECKPOINTS).is_dir():
        shutil.rmtree(replaced, ignore_errors=True)
        (folder / CHECKPOINTS).rename(replaced)
    (folder / "summary.json").unlink(missing_ok=True)
    shutil.rmtree(replaced, ignore_errors=True)
