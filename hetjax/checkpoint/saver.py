"""Saving beside the training: the loop waits for a copy to the host, a thread does the rest."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import jax

from hetjax.arguments import whole
from hetjax.checkpoint.contents import fill, load
from hetjax.checkpoint.folder import prepare, write
from hetjax.checkpoint.lock import FolderLock
from hetjax.checkpoint.snapshot import RunSnapshot, take
from hetjax.history import History, Record
from hetjax.reduce.update import State

log = logging.getLogger("hetjax")


class Saveable(Protocol):
    """A trainer, as far as saving is concerned."""

    def state_dict(self, state: State) -> dict[str, Any]: ...

    def ask_to_save(self) -> None: ...


def save(
    folder: str | Path, state: State, trainer: Saveable, extra: Mapping[str, Any] | None = None, keep: int = 2
) -> Path | None:
    """Write a checkpoint now and forget all but the last `keep`; its path. With several processes all call this."""
    snapshot = take(state, trainer.state_dict(state), extra or {})
    if snapshot is None:
        return None
    folder = Path(folder).resolve()
    lock = FolderLock(folder)
    try:
        return write(folder, lock, state.step, partial(fill, snapshot=snapshot), keep)
    finally:
        lock.release()


class Saver:
    """A hook of `fit` that saves every so many steps, every so many seconds, or both.

    folder      where to; made if it is not there
    trainer     whose run it is
    steps       save after steps that are multiples of it
    seconds     save when so many have passed since the last time, by the clock of the first process
    keep        how many checkpoints stay
    extra       (record) -> what to add to a checkpoint, as plain JSON values
    wait_limit  most seconds to wait for the disk

    The first process writes; all take part, as some states lie spread over them. That is why the end of the seconds is
    told with a step to all (`Trainer.ask_to_save`), instead of being seen on each one's own clock. A save waits for the
    one before. What goes wrong in the background is raised in the next step, or by `close`. The folder is locked until
    `close`: a program that finds it in use by another one gets `InUse`.
    """

    def __init__(
        self,
        folder: str | Path,
        trainer: Saveable,
        *,
        steps: int | None = None,
        seconds: float | None = None,
        keep: int = 2,
        extra: Callable[[Record], Mapping[str, Any]] = lambda record: {},
        wait_limit: float = 600.0,
    ):
        if steps is not None:
            whole("steps of the checkpoints", steps, 1)
        if seconds is not None and not seconds > 0:
            raise ValueError(f"seconds of the checkpoints is {seconds}: give more than 0.")
        whole("keep of the checkpoints", keep, 1)
        self.folder, self.trainer, self.steps, self.seconds = Path(folder).resolve(), trainer, steps, seconds
        self.keep, self.extra, self.wait_limit = keep, extra, wait_limit
        self.last: Path | None = None  # the newest that is whole on the disk
        self._last_time, self._begun = time.monotonic(), (-1, -1)  # step and cursor
        self._writing: threading.Thread | None = None
        self._failure: Exception | None = None
        self._lock = FolderLock(self.folder)
        if jax.process_index() == 0:
            prepare(self.folder, self._lock)
            load()

    def __call__(self, record: Record, state: State) -> None:
        if self._writing is not None and not self._writing.is_alive():
            self._finish()
        if record.save or (self.steps is not None and state.step % self.steps == 0):
            self.save(record, state)
        elif self.seconds is not None and time.monotonic() - self._last_time >= self.seconds and _first():
            self.trainer.ask_to_save()

    def save(self, record: Record, state: State) -> None:
        """Now, whatever the time, unless this very state was saved already: a step without a barrier has several."""
        at = state.step, state.cursor
        if self._begun == at:
            return
        snapshot = take(state, self.trainer.state_dict(state), self.extra(record))
        self._last_time, self._begun = time.monotonic(), at
        self._finish()
        if snapshot is not None:
            self._writing = threading.Thread(target=self._write, args=(snapshot, state.step), daemon=True)
            self._writing.start()

    def _write(self, snapshot: RunSnapshot, step: int) -> None:
        try:
            self.last = write(self.folder, self._lock, step, partial(fill, snapshot=snapshot), self.keep)
        except Exception as error:
            self._failure = error

    def _finish(self) -> None:
        """Wait for the write under way; raise what went wrong in it."""
        self._wait()
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def _wait(self) -> None:
        if self._writing is None:
            return
        self._writing.join(self.wait_limit)
        if self._writing.is_alive():
            raise TimeoutError(
                f"Writing a checkpoint to {self.folder} has not ended after {self.wait_limit:.0f} s: look at that "
                "disk. Earlier checkpoints are as they were."
            )
        self._writing = None

    def end(self, history: History) -> None:
        """Of a `fit`: nothing is left half-written. A failure is logged here, as another error may be on its way."""
        self._wait()
        self._log_failure()

    def _log_failure(self) -> None:
        if self._failure is not None:
            log.error("%s", self._failure)

    def close(self) -> None:
        """Wait until the last checkpoint is on the disk and give the folder free; raise what went wrong."""
        try:
            self._finish()
        finally:
            self._release()

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:  # that error is the one to raise
            try:
                self._wait()
            finally:
                self._release()
            self._log_failure()

    def _release(self) -> None:
        if self._writing is None:  # a write that hangs may still come to its end
            self._lock.release()


def _first() -> bool:
    return jax.process_index() == 0
