"""Messages of one purpose between processes, in rounds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import zmq

    from hetjax.fleet.carrier import Carrier

Buffer = Any  # bytes, memoryview, or a contiguous NumPy array
Mail = list[memoryview]
_CHUNK = 2**24  # bytes of one piece of long contents


class Channel:
    """Messages of one purpose, in rounds; a channel is used by one thread at a time."""

    def __init__(self, carrier: Carrier, number: int):
        self.carrier, self.number, self.round = carrier, number, 0

    def send(self, to: int, piece: int, buffers: Sequence[Buffer]) -> zmq.MessageTracker:
        """Send a piece of this round; the buffers must not change until the tracker is done."""
        return self.carrier.send(to, self.number, self.round, piece, buffers)

    def receive(self, sender: int, piece: int, limit: float | None = None) -> Mail:
        """Wait for a piece of this round."""
        return self.carrier.receive(sender, self.number, self.round, piece, limit)

    def take(self, sender: int, piece: int) -> Mail | None:
        """A piece of this round if it has arrived."""
        return self.carrier.take(sender, self.number, self.round, piece)

    def first_arrived(self, messages: Sequence[tuple[int, int]]) -> tuple[int, int]:
        """Wait for one of several messages (sender, piece) of this round; it is taken by `receive`."""
        return self.carrier.first_arrived(messages, self.number, self.round)

    def send_long(self, to: int, content: bytes) -> None:
        """Send bytes of any length as piece 0 and following ones."""
        view = memoryview(content)
        self.send(to, 0, [len(view).to_bytes(8, "little"), view[:_CHUNK]])
        for piece, start in enumerate(range(_CHUNK, len(view), _CHUNK), start=1):
            self.send(to, piece, [view[start : start + _CHUNK]])

    def receive_long(self, sender: int, limit: float | None = None) -> bytes:
        """Wait for bytes sent by `send_long`."""
        size, first = self.receive(sender, 0, limit)
        pieces = -(-int.from_bytes(size, "little") // _CHUNK)
        return b"".join([first, *(self.receive(sender, piece, limit)[0] for piece in range(1, pieces))])
