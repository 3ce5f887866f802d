"""Which CPU cores and which GPUs of this machine each process gets."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path


def visible_gpus(environment: Mapping[str, str], dev: Path = Path("/dev")) -> int:
    """Number of GPUs that a process would see; 0 if JAX_PLATFORMS selects other platforms."""
    platforms = environment.get("JAX_PLATFORMS", "").lower()
    if platforms and not any(name in platforms for name in ("cuda", "gpu", "rocm")):
        return 0
    present = sum(bool(re.fullmatch(r"nvidia\d+", path.name)) for path in dev.glob("nvidia*"))
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    return present if visible is None else min(present, len([name for name in visible.split(",") if name.strip()]))


def split_gpus(processes: int, gpus: int) -> list[str | None]:
    """JAX_LOCAL_DEVICE_IDS of each process: disjoint, equal in number up to one; None for all without GPUs.

    Without it JAX would let every process use all GPUs.
    """
    if gpus == 0:
        return [None] * processes
    if processes > gpus:
        raise ValueError(
            f"{processes} processes need a GPU each, and there are {gpus}. Start fewer, or train on the CPU with "
            "JAX_PLATFORMS=cpu in the environment."
        )
    bounds = [gpus * i // processes for i in range(processes + 1)]
    return [",".join(map(str, range(bounds[i], bounds[i + 1]))) for i in range(processes)]


def split_cores(weights: Sequence[float], cores: Sequence[int]) -> list[list[int]]:
    """Cores of each process in proportion to its weight.

    With enough cores they are disjoint: one for each process, the rest one by one to the highest weight per core. With
    more processes than cores each gets one, the heaviest first onto the core with the least weight; equal weights
    give round robin.
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
