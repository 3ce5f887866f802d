"""Print the table of docs/faults.md from docs/faults.json, which experiments/bench_faults.py wrote; it draws nothing.

    python docs/faults.py

The table is pasted by hand, and a test compares it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

RESULTS = Path(__file__).with_name("faults.json")
FEW = 20  # events; of fewer, the 95th percentile is nearly the worst, and the worst is shown
ROWS = {
    "kill": "killed, reported by its launcher",
    "crash": "killed, found by the others",
    "two": "two killed at once",
    "both": "a member and the rendezvous killed at once",
    "mixed": "two different faults at once",
    "leave": "asked to leave",
    "hang": "stopped, then killed",
    "wake": "stopped, and awake again later",
    "rendezvous": "rendezvous killed",
    "newcomer": "killed while it starts or joins",
    "join": "another one joins, until it trains",
}


def table(results: Mapping[str, Any]) -> str:
    """Return the table in Markdown; results without the worst case have only a lower bound of it."""
    lines = ["| event | n | median | worst | standstill of the others |", "|---|---|---|---|---|"]
    for kind, name in ROWS.items():
        if (found := results["seconds"].get(kind)) is not None:
            few = found["events"] < FEW
            worst = found.get("worst_s") if few else found["p95_s"]
            shown = f"at least {found['p95_s']:.2f} s" if worst is None else f"{worst:.2f} s{'' if few else ' (95%)'}"
            cells = [name, str(found["events"]), f"{found['median_s']:.2f} s", shown]
            lines.append(f"| {' | '.join(cells)} | {found['standstill_median_s']:.2f} s |")
    if seconds := results.get("restart", {}).get("seconds"):
        shown = f"{len(seconds)} | {median(seconds):.1f} s | {max(seconds):.1f} s"
        lines.append(f"| all start again (`--restart`), for comparison | {shown} | |")
    elif "restart_s" in results:  # before it was measured several times
        lines.append(f"| all start again (`--restart`), for comparison | 1 | {results['restart_s']:.1f} s | | |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(json.loads(RESULTS.read_text(encoding="utf-8"))))
