"""Exchanges over a real link of 40 Mbit/s really run beside the steps: nothing here sleeps, and 2 MB travel."""

from pathlib import Path

import bench_daso
import numpy as np
import pytest
from benches.links import Links, LinksRefused

pytestmark = pytest.mark.slow

MBIT, BYTES = 40, 2 * 1_068_810  # what a node sends in one exchange, in 16 bits a number
SKIP, WAIT = 176, 128


def test_steps_go_on_at_their_pace_while_an_exchange_is_under_way(monkeypatch):
    monkeypatch.setattr(bench_daso, "NODE", Path(__file__).with_name("link_process.py"))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))
    monkeypatch.delenv("XLA_FLAGS")
    orders = {"batch": 64, "steps": 3 * SKIP - 4, "skip": SKIP, "wait": WAIT}
    try:
        with Links(2) as links:
            links.limit(MBIT)
            told = bench_daso.run_once(orders, bench_daso.Places(2, links), unequal=False, limit=120)
    except LinksRefused as refused:
        pytest.skip(str(refused))
    took = np.diff(told["ended"], prepend=np.nan)  # of step i + 1, as steps are counted from 1
    later = [entry for entry in told["journal"] if entry["received"] > entry["sent"]]
    assert [(entry["sent"], entry["received"]) for entry in later] == [
        (1 + k * SKIP, 1 + k * SKIP + WAIT) for k in range(3)
    ]
    *_, last = told["journal"]  # in full precision, and all wait for it
    assert (last["sent"], last["bytes"]) == (orders["steps"], 2 * BYTES)
    beside, without = [], []
    for entry in later[1:]:  # everything is warm by then
        sent, received = entry["sent"], entry["received"]
        assert entry["bytes"] == BYTES
        assert entry["seconds"] > 0.8 * 8 * BYTES / (MBIT * 1e6)
        assert entry["beside"] >= 8
        beside += took[sent : sent + entry["beside"]].tolist()
        without += took[received + 1 : min(sent + SKIP, orders["steps"]) - 1].tolist()
    # The carrier takes a part of the core; a step that waits for its exchange would take forty times as long.
    assert np.median(beside) < 2 * np.median(without), told["journal"]
