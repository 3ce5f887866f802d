"""A directory of compiled programs, shared by all processes that are given it.

An entry holds machine code and pickled objects: whoever can write one can run anything here. So a directory is used
only if nobody but its user could have written to it, which is checked on an open descriptor; entries are opened
relative to that descriptor, never by path, so the directory cannot be exchanged after the check. An entry carries a
digest of its key and content: what is torn, garbled or renamed is not loaded.
"""

from __future__ import annotations

import hashlib
import os
import stat
import threading
from contextlib import suppress
from pathlib import Path

_DIGEST = hashlib.sha256().digest_size


class ProgramStore:
    """Entries by key. Any number of processes may read and write at once.

    Args:
        path: the directory; created for this user alone if there is none.

    Raises:
        OSError: the directory cannot be made or opened.
        PermissionError: somebody else could have written to it.
    """

    def __init__(self, path: str | os.PathLike[str]):
        Path(path).mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        if not _private(os.fstat(self._folder)):
            os.close(self._folder)
            raise PermissionError(
                f"The directory {path} of compiled programs belongs to another user or can be written by others, who "
                "could have this process run anything. Use one of your own with mode 700."
            )

    def read(self, key: str) -> bytes | None:
        """The content stored under this key; None if there is none, or it is damaged."""
        try:
            with open(os.open(key, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._folder), "rb") as file:
                if not _private(os.fstat(file.fileno())):
                    return None
                entry = file.read()
        except OSError:
            return None
        digest, content = entry[:_DIGEST], entry[_DIGEST:]
        return content if digest == _digest(key, content) else None

    def write(self, key: str, content: bytes) -> None:
        """Store under this key: as a whole, or not at all where that fails."""
        part = f".{key}.{os.getpid()}.{threading.get_ident()}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            with open(os.open(part, flags, 0o600, dir_fd=self._folder), "wb") as file:
                file.write(_digest(key, content) + content)
            os.replace(part, key, src_dir_fd=self._folder, dst_dir_fd=self._folder)
        except OSError:  # a full disk, or the directory is gone: the next process compiles again
            with suppress(OSError):
                os.unlink(part, dir_fd=self._folder)


def _private(status: os.stat_result) -> bool:
    """Whether only this user could have written this."""
    return status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _digest(key: str, content: bytes) -> bytes:
    return hashlib.sha256(key.encode() + content).digest()
