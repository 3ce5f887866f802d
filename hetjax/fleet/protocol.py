"""The header of every message between processes: protocol, kind, run, sender, and where it belongs."""

from __future__ import annotations

import struct
from typing import NamedTuple

HELLO, TABLE, REFUSED, DATA, BEAT, BYE, STATUS = range(7)  # kinds of message
NO_TOKEN = bytes(8)
_FAMILY, _MAGIC = b"HJX", b"HJX1"  # this protocol, and its version
_HEADER = struct.Struct("<4sB8sHIIQI")


class Header(NamedTuple):
    """The first frame of a message."""

    kind: int
    token: bytes  # of the run
    sender: int
    generation: int = 0  # of its membership
    channel: int = 0
    round: int = 0
    piece: int = 0

    def packed(self) -> bytes:
        """The header as bytes."""
        return _HEADER.pack(_MAGIC, *self)


def unpacked(frame: bytes) -> Header | None:
    """The header in a frame; None if it is none of this version."""
    if len(frame) != _HEADER.size or frame[:4] != _MAGIC:
        return None
    return Header(*_HEADER.unpack(frame)[1:])


def kind_in_any_version(frame: bytes) -> tuple[int, str] | None:
    """Kind and version of a message of this protocol in any version: all begin alike. None for other messages."""
    return (frame[4], frame[:4].decode("ascii", "replace")) if len(frame) > 4 and frame[:3] == _FAMILY else None
