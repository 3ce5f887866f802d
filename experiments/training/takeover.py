"""A folder changes hands: what an earlier run left in it stays until the new one has shown that it can train."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
from training import output, partitions
from training.configs import Config

from hetjax import checkpoint
from hetjax.fleet.agree import gather
from hetjax.sampling.blocks import Blocks

CHECKPOINTS = "checkpoints"
_REPLACED = "replaced_checkpoints"


@contextmanager
def sole_use(folder: Path) -> Iterator[None]:
    """No other run writes to the folder meanwhile. The first process, which writes, locks it; all hear of a refusal."""
    lock, refusal = checkpoint.FolderLock(folder), None
    try:
        if jax.process_index() == 0:
            try:
                lock.hold()
            except OSError as error:
                refusal = str(error)
        if (refusal := gather(refusal)[0]) is not None:
            raise checkpoint.InUse(refusal)
        yield
    finally:
        lock.release()


class Takeover:
    """A hook of `fit`, before all others: at the first finished step it removes what a resumed run would go by of the
    runs in `replaces`, and then writes the new configuration.

    Whatever goes wrong before leaves checkpoints, summary and configuration of the earlier run as they were. A program
    that dies in between leaves an old configuration, from which a run that is started again takes nothing.
    """

    def __init__(self, config: Config, folder: Path, replaces: Sequence[Path], partition: str | Blocks):
        self.config, self.folder, self.partition = config, folder, partition
        self.replaces = () if config.output.resume else replaces
        self.done = False

    def __call__(self, record: Any, state: Any) -> None:
        self.now()

    def now(self) -> None:
        """The folder is the new run's, if it was not yet."""
        if self.done:
            return
        self.done = True
        if jax.process_index() != 0:
            return
        for folder in self.replaces:
            forget(folder)
        partitions.keep(self.config, self.folder, self.partition)
        for folder in dict.fromkeys((self.config.folder, self.folder)):
            output.write_config(self.config, folder)

    def last_checkpoint(self) -> str:
        """From where a run that has ended badly can go on; the checkpoints of another run do not count."""
        own = self.done or self.config.output.resume
        return output.last_checkpoint(self.folder / CHECKPOINTS if own else None)


def forget(folder: Path) -> None:
    """Remove what a resumed run would go by; where the folder cannot be changed, nothing."""
    replaced = folder / _REPLACED
    if (folder / CHECKPOINTS).is_dir():
        shutil.rmtree(replaced, ignore_errors=True)
        (folder / CHECKPOINTS).rename(replaced)
    (folder / "summary.json").unlink(missing_ok=True)
    shutil.rmtree(replaced, ignore_errors=True)
