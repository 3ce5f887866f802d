"""How much memory a worker has, and how much a compiled program will take, before it runs."""

from __future__ import annotations

import math
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax

from hetjax.devices.workers import Workers

_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")  # of a container, v2 and v1
SAFE_SHARE = 0.9  # allocators need room; other buffers (optimizer, next batch) live beside the program


def available(device: jax.Device, sharing: int | None = None) -> int | None:
    """Bytes a worker may use: its device's limit, or for a CPU device its share of the host's; None if unknown.

    `sharing`: how many CPU devices share the host; all that there are unless given.
    """
    stats = device.memory_stats() if device.platform != "cpu" else None
    if stats and "bytes_limit" in stats:
        return int(stats["bytes_limit"] * SAFE_SHARE)
    if device.platform != "cpu":
        return None
    total = host()
    sharing = sharing or max(1, len(device.client.local_devices()))
    return None if total is None else int(total * SAFE_SHARE) // sharing


def host() -> int | None:
    """Bytes of this machine's memory, or of its container's; None if unknown."""
    found = []
    with suppress(ValueError, OSError, AttributeError):
        found.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    for path in _LIMITS:
        with suppress(ValueError, OSError):  # where there is no limit it says "max"
            found.append(int(Path(path).read_text()))
    return min(found, default=None)


def size(tree: Any) -> int:
    """Bytes of a tree of arrays or of their shapes."""
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree) if hasattr(leaf, "dtype"))


def check_parameters(params: Any, workers: Workers) -> None:
    """Refuse parameters that do not fit on a worker's device together with their gradient."""
    for worker in workers.local:
        room = available(workers.devices[worker], len(workers.local))
        if room is not None and 2 * size(params) > room:
            raise ValueError(
                f"The parameters take {gib(size(params))}, and as much again for their gradient, but worker {worker} "
                f"({workers.devices[worker]}) has {gib(room)}. Use a smaller model, or fewer workers on this host."
            )


def check_batch(batch: int, row: Any) -> None:
    """Refuse a batch whose rows do not fit into the memory of this host; `row` has the shapes of one."""
    rows, room = batch // jax.process_count(), host()
    if room is not None and rows * size(row) > room:
        raise ValueError(
            f"The {rows:,} samples of a step take {gib(rows * size(row))}, and this machine has {gib(room)} of memory. "
            "Lower batch_size."
        )


def gib(size: int) -> str:
    """Bytes for people."""
    return f"{size / 2**30:,.1f} GiB"


def needed(program: Any) -> int | None:
    """Bytes one run of a compiled program takes: arguments, outputs and temporaries, shared buffers counted once."""
    analysis = program.memory_analysis()
    if analysis is None:
        return None
    return (
        analysis.argument_size_in_bytes
        + analysis.output_size_in_bytes
        - analysis.alias_size_in_bytes
        + analysis.temp_size_in_bytes
    )
