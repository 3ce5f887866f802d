"""The key of a fleet: a file with a CURVE secret that all processes share. Who does not have it is not let in."""

from __future__ import annotations

import os
from pathlib import Path

import zmq

_LENGTH = 40  # characters of a CURVE key in Z85
NO_KEY = "Messages between processes are neither encrypted nor authenticated: this network is trusted."


def make_key(path: str | Path) -> None:
    """Write a new key to a file that only its owner can read.

    Args:
        path: a file that does not exist yet.

    Raises:
        FileExistsError: if the file exists; a key is never overwritten.
    """
    _, secret = zmq.curve_keypair()
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise FileExistsError(f"{path} exists: a key is never overwritten. Give another name, or remove it.") from None
    except OSError as error:
        raise OSError(f"The key cannot be written to {path}: {error.strerror}.") from error
    with open(descriptor, "wb") as file:
        file.write(secret + b"\n")


def read_key(path: str | Path) -> bytes:
    """Read a key.

    Args:
        path: a file written by `make_key`.

    Returns:
        The secret key.

    Raises:
        ValueError: if the file holds no key, or others can read it.
        OSError: if it cannot be read.
    """
    try:
        content = Path(path).read_bytes().strip()
    except OSError as error:
        raise OSError(f"The key in {path} cannot be read: {error.strerror}. Copy it to this host.") from error
    if len(content) != _LENGTH:
        raise ValueError(f"{path} holds no key: make one with `python -m hetjax key {path}`.")
    if os.name == "posix" and Path(path).stat().st_mode & 0o077:
        raise ValueError(f"Others can read the key in {path}: run chmod 600 {path}.")
    try:
        zmq.curve_public(content)
    except (zmq.ZMQError, ValueError) as error:
        raise ValueError(f"{path} holds no key: make one with `python -m hetjax key {path}`.") from error
    return content
