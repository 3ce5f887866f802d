"""Which cores and which GPUs each process gets.

Which of this machine's GPUs each process gets: JAX would let every process take all of them.

Which cores each process keeps to: a share of them in proportion to its quota, or one that it shares.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
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


def cores_for(weights: Sequence[float], cores: Sequence[int]) -> list[list[int]]:
    """Cores for each process by its weight (all alike: round robin).

    With enough cores each process has its own, at least one, the others going where weight per core is highest. With
    more processes than cores each has one, the heaviest first onto the core with the least weight.
    """
    heaviest = sorted(range(len(weights)), key=lambda i: (-weights[i], i))
    if len(weights) <= len(cores):
        shares = [1] * len(weights)
        for _ in range(len(cores) - len(weights)):
            shares[max(range(len(weights)), key=lambda i: (weights[i] / shares[i], -i))] += 1
        starts = [sum(shares[:i]) for i in range(len(weights))]
        return [list(cores[start : start + share]) for start, share in zip(starts, shares, strict=True)]
    load = dict.fromkeys(cores, 0.0)
    chosen: dict[int, int] = {}
    for i in heaviest:
        core = min(cores, key=lambda c: (load[c], cores.index(c)))
        chosen[i], load[core] = core, load[core] + weights[i]
    return [[chosen[i]] for i in range(len(weights))]
