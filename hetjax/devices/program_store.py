"""A directory of compiled programs, shared by processes and by restarts of a run.

An entry holds machine code and pickled objects, so anyone who can write one can run code in this process. A directory
is therefore used only if no other user could have written to it. That is checked on an open descriptor, and entries are
opened relative to it, so the directory cannot be swapped after the check. Each entry starts with a digest of its key
and content: truncated, corrupted or renamed entries are not loaded.
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
    """Entries by key. Any number of processes may read and write concurrently.

    Args:
        path: The directory; created with mode 700 if missing.

    Raises:
        OSError: The directory cannot be created or opened.
        PermissionError: Another user could have written to it.
    """

    def __init__(self, path: str | os.PathLike[str]):
        Path(path).mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        if not _private(os.fstat(self._folder)):
            os.close(self._folder)
            raise PermissionError(
                f"The directory {path} of compiled programs belongs to another user or can be written by others, who "
                "could make this process run any code. Use a directory of your own with mode 700."
            )

    def read(self, key: str) -> bytes | None:
        """The content stored under `key`; None if it is missing or damaged."""
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
        """Store `content` under `key` atomically; does nothing if that fails."""
        part = f".{key}.{os.getpid()}.{threading.get_ident()}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            with open(os.open(part, flags, 0o600, dir_fd=self._folder), "wb") as file:
                file.write(_digest(key, content) + content)
            os.replace(part, key, src_dir_fd=self._folder, dst_dir_fd=self._folder)
        except OSError:  # disk full or directory removed: the next process compiles again
            with suppress(OSError):
                os.unlink(part, dir_fd=self._folder)


def _private(status: os.stat_result) -> bool:
    """Whether only this user could have written the file."""
    return status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _digest(key: str, content: bytes) -> bytes:
    return hashlib.sha256(key.encode() + content).digest()
