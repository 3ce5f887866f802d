"""Exchanges over a real link of 40 Mbit/s overlap with the steps, and send 2 MB."""

from pathlib import Path

import bench_daso
import pytest
from benches.links import Links, LinksRefused

pytestmark = pytest.mark.slow

MBIT, BYTES = 40, 2 * 1_068_810  # sent by a node in one exchange, 16 bits per number
SKIP, WAIT = 176, 128


def test_steps_continue_while_an_exchange_is_pending(monkeypatch):
    """An exchange is held until it is received: all steps up to then are made while it is pending."""
    monkeypatch.setattr(bench_daso, "NODE", Path(__file__).with_name("link_process.py"))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))
    monkeypatch.delenv("XLA_FLAGS")
    spec = {"batch": 64, "steps": 3 * SKIP - 4, "skip": SKIP, "wait": WAIT}
    try:
        with Links(2) as links:
            links.limit(MBIT)
            journal = bench_daso.run_once(spec, bench_daso.Cluster(2, links), unequal=False, limit=250)["journal"]
    except LinksRefused as refused:
        pytest.skip(str(refused))
    stale = [record for record in journal if record["received"] > record["sent"]]
    assert [(record["sent"], record["received"]) for record in stale] == [
        (1 + k * SKIP, 1 + k * SKIP + WAIT) for k in range(3)
    ]
    *_, last = journal  # in full precision, and all nodes block on it
    assert (last["sent"], last["bytes"]) == (spec["steps"], 2 * BYTES)
    assert [record["overlapped"] for record in stale] == [WAIT] * 3
    assert [record["bytes"] for record in stale[1:]] == [BYTES] * 2
