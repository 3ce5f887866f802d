"""Members of an elastic run: which launched processes are left, and which entries of a per-worker list are theirs."""

from __future__ import annotations

import os
from collections.abc import Mapping

from hetjax.environment import LOST, PROCESSES


def kept_entries(entries: int, workers: int, environment: Mapping[str, str] = os.environ) -> list[int]:
    """Positions of the entries of a per-worker list that belong to the workers that are left.

    A per-worker list is written for all processes that were launched, each with the same number of workers. Entries
    belong to members, not to positions: after the loss of process 1 of 3, a list of 3 keeps the entries 0 and 2.

    Args:
        entries: the length of the list.
        workers: the number of workers there are now.
        environment: the variables of this process; `HETJAX_LOST` names the processes that were lost.

    Returns:
        The positions, in order. All of them where no process was lost, or where the list does not belong to the
        launched processes; whether it is of the right length is for the caller to check.
    """
    lost = {int(member) for member in environment.get(LOST, "").split(",") if member}
    everything = list(range(entries))
    if not lost or entries == workers:
        return everything
    launched = int(environment[PROCESSES]) + len(lost)
    each = entries // launched
    kept = [entry for entry in everything if each and entry // each not in lost]
    return kept if each * launched == entries and len(kept) == workers else everything
