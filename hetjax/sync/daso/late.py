"""Who has not come to an exchange yet: a collective that waits does not say for whom."""

from __future__ import annotations

from typing import Any

import jax


class Attendance:
    """Every process notes the number of the last exchange it came to, in the key-value store of `jax.distributed`."""

    def __init__(self, meeting: int, nodes: int):
        self.folder, self.nodes = f"hetjax/exchanges/{meeting}", nodes

    def announce(self, number: int) -> None:
        client = _client()
        if client is not None:
            client.key_value_set(f"{self.folder}/{jax.process_index()}", str(number), allow_overwrite=True)

    def missing(self, number: int) -> list[int]:
        """The nodes that have not come to this exchange."""
        client = _client()
        if client is None:
            return []
        return [node for node in range(self.nodes) if self._last(client, node) < number]

    def _last(self, client: Any, node: int) -> int:
        try:
            return int(client.key_value_try_get(f"{self.folder}/{node}"))
        except Exception:  # it never came; the store has an error of its own kind for that
            return 0

    def sentence(self, number: int, limit: float) -> str:
        missing = self.missing(number)
        who = f"node {', '.join(map(str, missing))} did not come" if missing else "its data did not arrive"
        return (
            f"Exchange {number} between the nodes is not over after {limit:.0f} s: {who}. It may have stopped, be very "
            "slow or cut off. Look at that process; start again from the last checkpoint, or raise wait_limit."
        )


def _client() -> Any:
    from jax._src.distributed import global_state

    return global_state.client
