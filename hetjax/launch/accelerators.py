"""Which of this machine's GPUs each process gets: JAX would let every process take all of them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path


def gpus_here(environment: Mapping[str, str], dev: Path = Path("/dev")) -> int:
    """How many GPUs a process of this machine sees; 0 where JAX was told to use the CPU."""
    platforms = environment.get("JAX_PLATFORMS", "").lower()
    if platforms and not any(name in platforms for name in ("cuda", "gpu", "rocm")):
        return 0
    there = sum(bool(re.fullmatch(r"nvidia\d+", path.name)) for path in dev.glob("nvidia*"))
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    return there if visible is None else min(there, len([name for name in visible.split(",") if name.strip()]))


def shares_of_gpus(processes: int, gpus: int) -> list[str | None]:
    """JAX_LOCAL_DEVICE_IDS for each process: GPUs of its own, as many as the others, give or take one."""
    if gpus == 0:
        return [None] * processes
    if processes > gpus:
        raise ValueError(
            f"{processes} processes need a GPU each, and there are {gpus}. Start fewer, or train on the CPU with "
            "JAX_PLATFORMS=cpu in the environment."
        )
    bounds = [gpus * i // processes for i in range(processes + 1)]
    return [",".join(map(str, range(bounds[i], bounds[i + 1]))) for i in range(processes)]
