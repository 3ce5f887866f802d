"""Saving in the background: the training loop waits for a copy to the host, a thread writes it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from hetjax import processes
from hetjax.arguments import whole
from hetjax.checkpoint.contents import import_orbax, write_snapshot
from hetjax.checkpoint.folder import prepare, write
from hetjax.checkpoint.lock import FolderLock, InUse
from hetjax.checkpoint.resume import restore_latest
from hetjax.checkpoint.snapshot import RunSnapshot, take
from hetjax.history import History, Record
from hetjax.state import LiveState, State

log = logging.getLogger("hetjax")


class Saveable(Protocol):
    """What saving needs of a trainer."""

    def state_dict(self, state: Any) -> dict[str, Any]: ...

    def ask_to_save(self) -> None: ...

    def load_state_dict(self, saved: Mapping[str, Any], state: State) -> State: ...


def save(
    folder: str | Path,
    state: State | LiveState,
    trainer: Saveable,
    extra: Mapping[str, Any] | None = None,
    keep: int = 2,
) -> Path | None:
    """Write a checkpoint now. With several processes all have to call this.

    Args:
        folder: folder of the checkpoints, created if necessary
        state: the state to save
        trainer: the trainer, or in your own loop the `Step`: its plans are saved as well
        extra: additions to the checkpoint, as JSON values
        keep: number of checkpoints to keep

    Returns:
        The checkpoint's path in process 0, None in the others.

    Raises:
        InUse: another program uses the folder.
        OSError: the checkpoint could not be written; earlier ones are intact.
    """
    snapshot = take(state, trainer.state_dict(state), extra or {})
    if snapshot is None:
        return None
    folder = Path(folder).resolve()
    lock = FolderLock(folder)
    try:
        return write(folder, lock, state.step, partial(write_snapshot, snapshot=snapshot), keep)
    finally:
        lock.release()


class Saver:
    """A hook of `fit` that saves at intervals of steps, of seconds, or both.

    Process 0 writes; all processes take part, as some states are sharded over them. So when the seconds have passed is
    decided by process 0 and announced to all with a step (`Trainer.ask_to_save`). A save waits for the previous one. An
    error in the background is raised in the next step, or by `close`. The folder is locked until `close`.

    Args:
        folder: folder of the checkpoints, created if necessary
        trainer: the trainer of the run
        steps: save after steps that are multiples of it
        seconds: save when this time has passed since the last save
        keep: number of checkpoints to keep
        extra: (record) -> additions to a checkpoint, as JSON values
        wait_limit: maximum seconds to wait for the disk

    Raises:
        InUse: another program uses the folder.
        OSError: the folder cannot be created or written to.
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
            raise ValueError(f"seconds of the checkpoints is {seconds}: expected more than 0.")
        whole("keep of the checkpoints", keep, 1)
        self.folder, self.trainer, self.steps, self.seconds = Path(folder).resolve(), trainer, steps, seconds
        self.keep, self.extra, self.wait_limit = keep, extra, wait_limit
        self.last: Path | None = None  # the newest complete checkpoint
        self._last_time, self._last_saved = time.monotonic(), (-1, -1)  # step and cursor
        self._writing: threading.Thread | None = None
        self._failure: Exception | None = None
        self._lock, self._prepared = FolderLock(self.folder), False
        if processes.first():
            self._prepare()

    def _prepare(self) -> None:
        """Lock the folder, once; in an elastic fleet another process may become the one that writes."""
        if not self._prepared:
            prepare(self.folder, self._lock)
            import_orbax()
            self._prepared = True

    def __call__(self, record: Record, state: State) -> None:
        if self._writing is not None and not self._writing.is_alive():
            self._finish()
        if record.save or (self.steps is not None and state.step % self.steps == 0):
            self.save(record, state)
        elif self.seconds is not None and processes.first() and self._elapsed() >= self.seconds:
            self.trainer.ask_to_save()

    def _elapsed(self) -> float:
        return time.monotonic() - self._last_time

    def save(self, record: Record, state: State) -> None:
        """Save now, unless this state was saved already. Without a barrier, a step has states with several cursors."""
        position = state.step, state.cursor
        if self._last_saved == position:
            return
        snapshot = take(state, self.trainer.state_dict(state), self.extra(record))
        self._last_time, self._last_saved = time.monotonic(), position
        self._finish()
        if snapshot is not None and self._may_write():
            self._writing = threading.Thread(target=self._write, args=(snapshot, state.step), daemon=True)
            self._writing.start()

    def _may_write(self) -> bool:
        try:
            self._prepare()
        except InUse as error:
            if not processes.elastic():
                raise
            log.warning("This checkpoint is not written, as the process that wrote the last one may hang: %s", error)
            return False
        return True

    def restore(self, like: State) -> State:
        """The state of the newest checkpoint, with the trainer's own; `like` if there is none yet. Collective.

        For an elastic fleet that has lost a part of its state (`hetjax.recovery.StateLost`).
        """
        if processes.first():
            self._wait()
        found = restore_latest(self.folder, like, self.trainer)
        return like if found is None else found.state

    def _write(self, snapshot: RunSnapshot, step: int) -> None:
        try:
            self.last = write(self.folder, self._lock, step, partial(write_snapshot, snapshot=snapshot), self.keep)
        except Exception as error:
            self._failure = error

    def _finish(self) -> None:
        """Wait for the write in progress and raise its error."""
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
                f"Writing a checkpoint to {self.folder} did not finish within {self.wait_limit:.0f} s: check that "
                "disk. Earlier checkpoints are intact."
            )
        self._writing = None

    def end(self, history: History) -> None:
        """Wait for the write in progress when `fit` ends; its error is only logged, as another may be propagating."""
        self._wait()
        self._log_failure()

    def _log_failure(self) -> None:
        if self._failure is not None:
            log.error("%s", self._failure)

    def close(self) -> None:
        """Wait for the write in progress and unlock the folder; raises the error of that write."""
        try:
            self._finish()
        finally:
            self._release()

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:  # the propagating error takes precedence
            try:
                self._wait()
            finally:
                self._release()
            self._log_failure()

    def _release(self) -> None:
        if self._writing is None:  # a write that hangs may still finish
            self._lock.release()
