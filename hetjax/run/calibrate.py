"""How fast the workers are with the same engine, no reduce, all of them computing at once."""

from __future__ import annotations

from typing import Any

import numpy as np

from hetjax.run.clocks import Clocks
from hetjax.run.engines.protocol import Engine, Replicas


def time_local_phases(
    engine: Engine, clocks: Clocks, replicas: Replicas, packed: Any, rounds: int = 5
) -> tuple[np.ndarray, np.ndarray]:
    """Rows and median seconds of each local worker's phase over some rounds, after one to warm up."""
    laps = [clocks.wait(engine.start(replicas, packed)) for _ in range(rounds + 1)][1:]
    rows = np.array([lap.rows for lap in laps[0]], np.int64)
    return rows, np.median([[lap.seconds for lap in round_] for round_ in laps], axis=0)
