"""Memory available to a worker, and memory that parameters, a batch or a compiled program will take."""

from __future__ import annotations

import math
import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from hetjax import processes
from hetjax.devices.targets import target_of

if TYPE_CHECKING:
    from hetjax.devices.workers import Workers

_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")  # cgroup v2 and v1
SAFE_SHARE = 0.9  # allocators need headroom, and other buffers (optimizer, next batch) exist besides the program


def available(device: jax.Device, sharing: int | None = None) -> int | None:
    """Bytes a worker may use: its device's limit, or a CPU device's share of host memory; None if unknown.

    Args:
        device: The worker's device.
        sharing: Number of CPU devices that share the host. Default: all local ones.
    """
    if (target := target_of(device)) is not None:
        return int(target.memory * SAFE_SHARE)
    stats = device.memory_stats() if device.platform != "cpu" else None
    if stats and "bytes_limit" in stats:
        return int(stats["bytes_limit"] * SAFE_SHARE)
    if device.platform != "cpu":
        return None
    total = host()
    sharing = sharing or max(1, len(device.client.local_devices()))
    return None if total is None else int(total * SAFE_SHARE) // sharing


def host() -> int | None:
    """Bytes of memory of this machine, or of its container if that is less; None if unknown."""
    found = []
    with suppress(ValueError, OSError, AttributeError):
        found.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    for path in _LIMITS:
        with suppress(ValueError, OSError):  # "max" if there is no limit
            found.append(int(Path(path).read_text()))
    return min(found, default=None)


def size(tree: Any) -> int:
    """Bytes of a tree of arrays or `ShapeDtypeStruct`s."""
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree) if hasattr(leaf, "dtype"))


def check_parameters(params: Any, trained: Any, workers: Workers) -> None:
    """Raise ValueError if parameters and gradients (of those trained) do not fit on a local worker's device."""
    for worker in workers.local:
        room = available(workers.device(worker), len(workers.local))
        if room is not None and size(params) + size(trained) > room:
            raise ValueError(
                f"The parameters take {gib(size(params))}, and their gradient {gib(size(trained))}, but worker "
                f"{worker} ({workers.device(worker)}) has {gib(room)}. Use a smaller model, or fewer workers on this "
                "host."
            )


def check_batch(batch: int, row: Any) -> None:
    """Raise ValueError if this process's share of a batch exceeds host memory; `row`: shapes of one sample."""
    rows, room = batch // processes.count(), host()
    if room is not None and rows * size(row) > room:
        raise ValueError(
            f"The {rows:,} samples of a step take {gib(rows * size(row))}, and this machine has {gib(room)} of memory. "
            "Lower batch_size."
        )


def gib(size: int) -> str:
    """Format bytes as GiB."""
    return f"{size / 2**30:,.1f} GiB"


def out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out, on a device or on the host."""
    return isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error) or "out of memory" in str(error).lower()


def needed(program: Any) -> int | None:
    """Bytes that one run of a compiled program takes: arguments, outputs and temporaries, aliased buffers once."""
    analysis = program.memory_analysis()
    if analysis is None:
        return None
    return (
        analysis.argument_size_in_bytes
        + analysis.output_size_in_bytes
        - analysis.alias_size_in_bytes
        + analysis.temp_size_in_bytes
    )
