"""Compare the virtual time of bench_controllers.py with real runs.

    python experiments/bench_reality.py [--json FILE] [--runs 3] [--steps 120]

For two traces, the throughput of `train.py --trace FILE` (median of the runs), with simulated delays at least five
times the real compute, is compared with the simulator's prediction for the same trace, controller and number of steps.
Target: within 5%.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from benches.flags import JsonFile, from_flags

from hetjax.cli.training.configs import CONFIGS
from hetjax.planning import controllers
from hetjax.planning.limits import Limits
from hetjax.planning.simulator import Trace, simulate
from hetjax.simulation.traces import read_trace

HERE = Path(__file__).resolve().parent
BATCH, ROW_TIME = 256, 3e-3  # samples; seconds per row at speed 1, about 40 times the real compute of this CNN
TRACES = ("constant.json", "slowdown.json")


def predicted(file: Path, controller: str, steps: int) -> float:
    """Samples per second in virtual time, without noise, with the trainer's delay of one step."""
    speeds = [read_trace(file)(step) for step in range(steps)]
    trace = Trace(
        name=file.stem,
        batch=BATCH,
        startup_TxW=np.array([startup_W for _, startup_W in speeds]),
        per_work_TxW=np.array([ROW_TIME / speed_W for speed_W, _ in speeds]),
        steps=steps,
        noise=0.0,
        limits=Limits.plain(len(speeds[0][0]), BATCH),
    )
    run = simulate(controllers.make(controller), trace, trace.draw(0), delay=1)
    return BATCH * steps / float(run.times_T.sum())


def measured(file: Path, controller: str, steps: int, folder: Path) -> dict[str, Any]:
    """The summary of a real run."""
    command = [sys.executable, str(HERE / "train.py"), "--dataset", "synthetic", "--model", "cnn", "--width", "8"]
    command += ["--batch-size", str(BATCH), "--steps", str(steps), "--controller", controller, "--trace", str(file)]
    command += ["--row-time", str(1e3 * ROW_TIME), "--out", str(folder)]
    subprocess.run(command, check=True, capture_output=True, timeout=60 + 2 * steps)
    return json.loads((folder / "summary.json").read_text(encoding="utf-8"))


def main(
    json_file: JsonFile = None,
    runs: int = 3,
    steps: int = 120,
    controller: str = "balanced",
) -> None:
    """Compare predicted and measured throughput.

    Args:
        json_file: write the results to this file (--json FILE).
        runs: number of real runs per trace; the median is reported.
        steps: number of steps per run.
        controller: name of the controller.
    """
    results = {}
    for name in TRACES:
        expected = predicted(CONFIGS / name, controller, steps)
        with tempfile.TemporaryDirectory() as folder:
            summaries = [measured(CONFIGS / name, controller, steps, Path(folder) / str(k)) for k in range(runs)]
        rates = [summary["samples_per_s"] for summary in summaries]
        ratio = float(np.median(rates)) / expected
        results[name] = {
            "predicted_samples_per_s": expected,
            "measured_samples_per_s": rates,
            "ratio": ratio,
            "overruns": [summary["overruns"] for summary in summaries],
        }
        print(f"{name}: predicted {expected:,.0f} samples/s, measured {np.round(rates)}, ratio {ratio:.3f} [1 +- 0.05]")
    if json_file is not None:
        json_file.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    from_flags(main)
