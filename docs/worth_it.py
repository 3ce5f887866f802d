"""Print the table of docs/worth_it.md: what balancing gains on two workers, in virtual time.

    python docs/worth_it.py            # ten seconds, no device is used

A step takes as long as its slower worker, plus the exchange. A worker takes 5 ms + 1 ms / speed per sample, with
log-normal noise of 10%. The exchange sends 4 bytes per parameter, over the link. Counts are those of the controller
`balanced`, and all of its 200 steps are charged.
"""

from __future__ import annotations

import numpy as np

from hetjax.planning import controllers
from hetjax.planning.limits import Limits
from hetjax.planning.simulator import Trace, simulate

STARTUP, PER_SAMPLE, NOISE, STEPS = 5e-3, 1e-3, 0.1, 200  # seconds, seconds, sd of the logarithm
RATIOS = (1.0, 1.5, 2.0, 4.0, 10.0)
SETTINGS = (  # samples per step, parameters, bits/s
    (512, 1e6, 10e9),
    (512, 25e6, 10e9),
    (512, 25e6, 1e9),
    (64, 25e6, 1e9),
)


def seconds_per_step(name: str, ratio: float, batch: int) -> float:
    """The mean step of a controller on workers of speed 1 and 1 / ratio, without the exchange."""
    trace = Trace(
        name="two workers",
        batch=batch,
        startup_TxW=np.full((1, 2), STARTUP),
        per_work_TxW=PER_SAMPLE * np.array([[1.0, ratio]]),
        steps=STEPS,
        noise=NOISE,
        limits=Limits.plain(2, batch),
    )
    return float(simulate(controllers.make(name), trace, trace.draw(0), delay=1).times_T.mean())


def row(ratio: float) -> str:
    """One line of the table."""
    cells = []
    for batch, parameters, link in SETTINGS:
        exchange = 4 * 8 * parameters / link
        balanced, equal = (seconds_per_step(name, ratio, batch) + exchange for name in ("balanced", "equal"))
        alone = STARTUP + PER_SAMPLE * batch  # the faster worker, without any exchange
        cells.append(f"{equal / balanced:.2f}, {alone / balanced:.2f}")
    return f"| {ratio:g} : 1 | " + " | ".join(cells) + " |"


if __name__ == "__main__":
    heads = [f"B {batch}, {p / 1e6:g} M, {link / 1e9:g} Gbit/s" for batch, p, link in SETTINGS]
    print("| speeds | " + " | ".join(heads) + " |")
    print("|---" * (len(SETTINGS) + 1) + "|")
    for ratio in RATIOS:
        print(row(ratio))
