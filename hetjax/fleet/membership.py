"""Members of an elastic run: which entries of a per-worker list belong to the surviving processes."""

from __future__ import annotations

import os
from collections.abc import Mapping

from hetjax.environment import LOST, PROCESSES


def kept_entries(entries: int, workers: int, environment: Mapping[str, str] = os.environ) -> list[int]:
    """Positions of the entries of a per-worker list that belong to the surviving workers.

    A per-worker list has entries for all launched processes, each with the same number of workers. Entries belong to
    members, not to positions: after process 1 of 3 is lost, a list of 3 keeps entries 0 and 2.

    Args:
        entries: Length of the list.
        workers: Current number of workers.
        environment: Environment variables; `HETJAX_LOST` names the lost processes.

    Returns:
        The positions, in order; all of them if no process was lost or the list does not match the launched processes.
        The caller checks the length.
    """
    lost = {int(member) for member in environment.get(LOST, "").split(",") if member}
    everything = list(range(entries))
    if not lost or entries == workers:
        return everything
    launched = int(environment[PROCESSES]) + len(lost)
    each = entries // launched
    kept = [entry for entry in everything if each and entry // each not in lost]
    return kept if each * launched == entries and len(kept) == workers else everything
