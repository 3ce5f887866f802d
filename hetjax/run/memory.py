"""How much memory a worker has, and how much a compiled program will take, before it runs."""

from __future__ import annotations

import os
from typing import Any

import jax

SAFE_SHARE = 0.9  # allocators need room; other buffers (optimiser, next batch) live beside the program


def available(device: jax.Device) -> int | None:
    """Bytes a worker may use: its device's limit, or for a CPU device its share of the host's; None if unknown."""
    stats = device.memory_stats() if device.platform != "cpu" else None
    if stats and "bytes_limit" in stats:
        return int(stats["bytes_limit"] * SAFE_SHARE)
    if device.platform != "cpu":
        return None
    try:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return None
    return int(total * SAFE_SHARE) // max(1, len(device.client.local_devices()))


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
