"""A lock on a folder that names its holder and ends with it."""

from __future__ import annotations

import errno
import json
import logging
import os
import shlex
import socket
import sys
import textwrap
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

if sys.platform != "win32":
    import fcntl

log = logging.getLogger("hetjax")
NAME = ".lock"
_MAX_COMMAND = 300  # characters


class InUse(OSError):
    """Another program uses the folder; the message names it."""


class FolderLock:
    """Exclusive use of a folder by this process.

    A POSIX record lock on the file `.lock` in the folder. The kernel releases it when the process ends, even by
    SIGKILL, and child processes do not inherit it: a lock is never stale, and the file of a killed process is reused.
    On NFS the server releases the lock of a dead host when its lease ends. Within one process any number of objects
    may hold the same folder.

    Args:
        folder: The folder; it is created when the lock is first held.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder).resolve()
        self.path = self.folder / NAME
        self._file: int | None = None
        self._created = False

    def hold(self) -> None:
        """Acquire the lock, or make sure that it is still held; creates the folder if necessary.

        Raises:
            InUse: another process holds it.
            OSError: the folder cannot be created or written to.
        """
        if sys.platform == "win32":
            return
        if not self.folder.is_dir():
            self.folder.mkdir(parents=True, exist_ok=True)
            self._created = True
        while True:
            if self._file is None:
                self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                holder = _read(self._file)
                self._close()
                if error.errno in (errno.EACCES, errno.EAGAIN):
                    raise InUse(
                        f"{self.folder} is in use by another program: {_describe(holder)}. Wait until it ends, "
                        "stop it, or use another folder."
                    ) from None
                log.warning(
                    "%s cannot be locked (%s): make sure that no other program uses it.", self.folder, error.strerror
                )
                return
            if self._is_current():
                break
            self._close()  # the file was removed, by its last holder or by a cleanup
        with suppress(OSError):  # a full disk: the lock is held without its holder's name
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, json.dumps(_this_process()).encode(), 0)

    def release(self) -> None:
        """Release the lock if held; removes the file, and the folder if `hold` created it and it is empty."""
        if self._file is not None:
            with suppress(OSError):
                if self._is_current():
                    self.path.unlink()
                    if self._created:
                        self.folder.rmdir()
            self._close()

    def __enter__(self) -> FolderLock:
        self.hold()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _is_current(self) -> bool:
        """Whether the open file is still the one at `self.path`."""
        assert self._file is not None
        try:
            return os.path.samestat(os.stat(self.path), os.fstat(self._file))
        except FileNotFoundError:
            return False

    def _close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


def _this_process() -> dict[str, Any]:
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "since": datetime.now().astimezone().isoformat(" ", "seconds"),
        "command": textwrap.shorten(shlex.join(sys.orig_argv), _MAX_COMMAND, placeholder=" ..."),
    }


def _read(file: int) -> dict[str, Any]:
    """The holder's description of itself; empty if it has not written it yet, or could not."""
    try:
        holder = json.loads(os.pread(file, 1 << 16, 0))
    except (OSError, ValueError):
        return {}
    return holder if isinstance(holder, dict) else {}


def _describe(holder: dict[str, Any]) -> str:
    if not holder:
        return "its name is unknown"
    pid, host, since, command = (holder.get(key, "?") for key in ("pid", "host", "since", "command"))
    return f"process {pid} on host {host}, since {since}: {command}"
