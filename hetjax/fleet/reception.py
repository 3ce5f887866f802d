"""Process 0's side of a meeting: who has come, whether all fit together, and the answer to each."""

from __future__ import annotations

import json
from typing import Any

from hetjax.fleet.protocol import REFUSED, TABLE

_LONGEST = 2**16  # bytes of a hello


class Reception:
    """Collects a description of every process; answers when all have come. It has no socket and no clock.

    Args:
        count: number of processes expected.
        coordinator: HOST:PORT, for messages.
        own: description of process 0.
        token: token of the run, for all that are let in.
    """

    def __init__(self, count: int, coordinator: str, own: dict[str, Any], token: bytes):
        self.count, self.coordinator, self.token = count, coordinator, token
        self.rows = {0: own}
        self.answer: tuple[int, Any] | None = None  # TABLE or REFUSED, and its content
        self._visitors: list[bytes] = []  # to be answered
        self._came = 1  # visitors and this process, including those that do not fit
        self._misfit: str | None = None
        self._started = False  # the table was sent: who comes now is late

    @property
    def pending(self) -> bool:
        """Whether a visitor waits for an answer that is known."""
        return self.answer is not None and bool(self._visitors)

    @property
    def complete(self) -> bool:
        """Whether as many processes have come as are expected."""
        return self._came >= self.count

    def arrive(self, sender: int | None, version: str, content: bytes, visitor: bytes) -> None:
        """Note a hello; what is none is ignored.

        Args:
            sender: index that the visitor claims; None: its protocol has another version.
            version: version of its protocol.
            content: its description as JSON.
            visitor: where to answer.
        """
        row = {} if sender is None else _described(content)
        if row is None:
            return
        self._visitors.append(visitor)
        if self.answer is not None:
            return
        self._came += 1
        if sender is None:
            self._misfit = (
                f"A process has another version of hetjax, with protocol {version}. Install the same for all."
            )
        elif sender in self.rows:
            self._misfit = f"Process {sender} connected twice to {self.coordinator}: give every process its own index."
        elif sender >= self.count:
            self._misfit = (
                f"Process {sender} of {row.get('processes')} connected to {self.coordinator}, where {self.count} "
                "processes are expected. Start all with the same number."
            )
        else:
            self.rows[sender] = row
        if self.complete:
            self._decide()

    def give_up(self, limit: float) -> None:
        """Decide with those who have come."""
        self._decide()
        if self.answer is None:
            missing = [str(peer) for peer in range(self.count) if peer not in self.rows]
            names = f"process {missing[0]} is" if len(missing) == 1 else f"processes {', '.join(missing)} are"
            sentence = (
                f"Not all {self.count} processes connected to {self.coordinator} within {limit:g} s: {names} missing. "
                "Check that all were started, with the same number of processes, different indices and the same key."
            )
            self.answer = REFUSED, sentence

    def letters(self) -> list[tuple[bytes, int, bytes]]:
        """Answers that are due: visitor, kind and content."""
        if self.answer is None:
            return []
        visitors, self._visitors = self._visitors, []
        kind, content = self.answer
        if self._started:
            kind = REFUSED
            content = (
                f"The run of {self.count} processes at {self.coordinator} has already started. Choose another port for "
                "another run; a process cannot join later."
            )
        self._started = kind == TABLE or self._started
        return [(visitor, kind, json.dumps(content).encode()) for visitor in visitors]

    def _decide(self) -> None:
        refusal = self._misfit or self._difference()
        if refusal is not None:
            self.answer = REFUSED, refusal
        elif len(self.rows) == self.count:
            self.answer = TABLE, {"token": self.token.hex(), "table": [self.rows[k] for k in range(self.count)]}

    def _difference(self) -> str | None:
        """In what a process differs from process 0, or what one found wrong with itself."""
        rows = sorted(self.rows.items())
        if problems := [f"Process {peer}: {row['problem']}" for peer, row in rows if row.get("problem")]:
            return " ".join(problems)
        for peer, row in rows:
            if (differs := first_difference(self.rows[0], row, "version", "processes")) is not None:
                return f"Process {peer} differs from process 0 in its {differs}"
        return None


def first_difference(mine: dict[str, Any], theirs: dict[str, Any], *names: str) -> str | None:
    """In what the descriptions of two processes differ that have to be alike, as the end of a sentence."""
    for name in (*names, *mine.get("alike", {})):
        a, b = (row.get(name, row.get("alike", {}).get(name)) for row in (mine, theirs))
        if a != b:
            words = "number of processes" if name == "processes" else name.replace("_", " ")
            return f"{words}: {b} instead of {a}. Start all processes with the same hetjax and the same flags."
    return None


def _described(content: bytes) -> dict[str, Any] | None:
    """The description in a hello; None if it is none."""
    if len(content) > _LONGEST:
        return None
    try:
        row = json.loads(content)
    except (ValueError, RecursionError):
        return None
    fits = isinstance(row, dict) and isinstance(row.get("address"), str) and isinstance(row.get("alike", {}), dict)
    return row if fits and ("host" not in row or isinstance(row.get("local"), str)) else None
