"""Run folders with made-up timings, to test reports without training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import numpy as np

from hetjax.report import JsonlTracker, write_json


def write_fake_run(
    folder: Path,
    *,
    workers: int = 4,
    steps: int = 120,
    balanced: bool = True,
    change_at: int = 12,
    batch: int = 1024,
    summary: bool = True,
    seed: int = 0,
    members: Mapping[int, Sequence[Mapping]] = MappingProxyType({}),
) -> Path:
    """Write a run on workers of speed 1, 1, 0.5, 0.25, ...; if `balanced`, counts adapt in two changes.

    `members`: by step, the changes of an elastic fleet's members before it.
    """
    rng = np.random.default_rng(seed)
    speed_W = np.resize([1.0, 1.0, 0.5, 0.25], workers)
    row_time = 0.2e-3 * workers / 4
    epoch_steps = 40
    folder.mkdir(parents=True, exist_ok=True)
    write_json(
        folder / "config.json",
        {
            "dataset": "digits",
            "model": "cnn",
            "batch_size": batch,
            "controller": "balanced" if balanced else "equal",
        },
    )
    tracker = JsonlTracker(folder)
    seconds, samples, previous = 0.0, 0, None
    for step in range(1, steps + 1):
        size = batch if step % epoch_steps else batch * 2 // 5
        share_W = np.full(workers, 1 / workers)
        if balanced and step >= change_at:
            true_W = speed_W / speed_W.sum()
            share_W = true_W if step >= change_at + 6 else 0.3 * share_W + 0.7 * true_W
        ends = np.round(np.cumsum(share_W) * size).astype(int)
        counts_W = np.diff(ends, prepend=0)
        times_W = (0.002 + counts_W * row_time / speed_W) * rng.normal(1, 0.04, workers)
        times_W[counts_W == 0] = np.nan
        step_time = np.nanmax(times_W) + 0.008 * rng.uniform(0.8, 1.3)
        if step == 1:
            times_W[:] = np.nan
        seconds, samples = seconds + step_time, samples + size
        changed = previous is not None and size == batch and bool(np.any(previous != counts_W))
        if size == batch:
            previous = counts_W
        tracker.log(
            step,
            {
                "epoch": (step - 1) // epoch_steps,
                "loss": 0.05 + 2.3 * np.exp(-step / 30) * rng.normal(1, 0.06),
                "counts": counts_W,
                "times": times_W,
                "rows": counts_W,
                "step_time": step_time,
                "samples_per_s": size / step_time,
                "seconds": seconds,
                "samples": samples,
                "changed": changed,
                "reason": "worker 3 slower: predicted gain 118%" if changed else "",
                "metrics": {"accuracy": 0.5},
                **({"members": members[step]} if step in members else {}),
            },
        )
    if summary:
        ideal = float(speed_W.sum() / row_time)
        tracker.summary(
            {
                "strategy": "balanced" if balanced else "equal",
                "controller": "balanced" if balanced else "equal",
                "partition": "global",
                "sync": "allreduce",
                "engine": "chunked",
                "workers": workers,
                "steps": steps,
                "samples": samples,
                "wall_s": seconds,
                "samples_per_s": samples / seconds,
                "ideal_samples_per_s": ideal,
                "efficiency": samples / seconds / ideal,
                "final_loss": 0.0712,
                "test_accuracy": 0.9749 + 0.001 * balanced,
                "plan_changes": 2 * balanced,
                "recompiles_after_warmup": 0,
                "data_wait_share": 0.004,
                "overruns": 0,
            }
        )
    tracker.close()
    return folder


def write_fake_async_run(folder: Path, *, workers: int = 2, steps: int = 60, seed: int = 0) -> Path:
    """Write an asynchronous run in which worker 0 makes about one update while each other worker makes five."""
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", {"dataset": "digits", "model": "mlp", "sync": "hogbatch"})
    tracker, seconds, samples, total_W = JsonlTracker(folder), 0.0, 0, np.zeros(workers, int)
    for step in range(1, steps + 1):
        updates_W = np.where(np.arange(workers) == 0, step % 2, 2 + rng.integers(0, 2, workers))
        counts_W, step_time = 16 * updates_W, 0.1 * rng.uniform(0.9, 1.1)
        seconds, samples, total_W = seconds + step_time, samples + int(counts_W.sum()), total_W + updates_W
        tracker.log(
            step,
            {
                "epoch": 0,
                "loss": 2.3 * np.exp(-step / 30),
                "counts": counts_W,
                "times": step_time * np.where(np.arange(workers) == 0, 0.97, 0.9),
                "rows": counts_W,
                "step_time": step_time,
                "samples_per_s": counts_W.sum() / step_time,
                "seconds": seconds,
                "samples": samples,
                "changed": step == 30,
                "reason": "worker 1 takes 32" if step == 30 else "",
                "metrics": {"accuracy": 0.5},
                "updates": updates_W,
                "batches": [16] * workers,
                "staleness": 1.5,
            },
        )
    tracker.summary(
        {
            "strategy": "hogbatch",
            "sync": "hogbatch",
            "workers": workers,
            "steps": steps,
            "samples_per_s": samples / seconds,
            "updates": int(total_W.sum()),
            "update_share": (total_W / total_W.sum()).tolist(),
            "utilization": np.where(np.arange(workers) == 0, 0.97, 0.9).tolist(),
            "staleness": {"0": 10, "1": 100, "3": 7, "90": 1},
        }
    )
    tracker.close()
    return folder
