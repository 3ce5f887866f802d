"""Which CPU cores and which GPUs of this machine each process gets."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from hetjax.devices.choice import ALL, parse


def visible_gpus(environment: Mapping[str, str], dev: Path = Path("/dev")) -> int:
    """Number of GPUs that a process would see; 0 if JAX_PLATFORMS selects other platforms."""
    platforms = environment.get("JAX_PLATFORMS", "").lower()
    if platforms and not any(name in platforms for name in ("cuda", "gpu", "rocm")):
        return 0
    present = sum(bool(re.fullmatch(r"nvidia\d+", path.name)) for path in dev.glob("nvidia*"))
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    return present if visible is None else min(present, len([name for name in visible.split(",") if name.strip()]))


def share_gpus(devices_P: Sequence[str | None], gpus: int) -> list[tuple[str | None, str | None]]:
    """The choice of devices of each process, and the GPUs that it may see: those it names, or a share of the others.

    A JAX process takes memory on every GPU that it sees. Indices count all GPUs of this machine, but JAX numbers those
    that a process sees, so the choices returned name no indices of GPUs.

    Args:
        devices_P: choice of each process as for `hetjax.devices`; None: the default.
        gpus: number of GPUs; 0: nothing is shared out.

    Raises:
        ValueError: if a process would have no GPU although it needs one, or names one that does not exist.
    """
    if gpus == 0:
        return [(devices, None) for devices in devices_P]
    parts_P = [parse(devices, {}) for devices in devices_P]
    on_gpu = lambda part: part.platform in ("gpu", "cuda", "rocm", ALL)
    named_P = [
        None if not isinstance(parts, tuple) else [i for part in parts if on_gpu(part) for i in part.indices or ()]
        for parts in parts_P
    ]
    if wrong := [index for named in named_P for index in named or () if index >= gpus]:
        raise ValueError(f"--devices names GPU {wrong[0]}, but there are {gpus} on this machine, counted from 0.")
    needs_P = [
        not isinstance(parts, tuple) or any(on_gpu(part) and part.indices is None for part in parts)
        for parts in parts_P
    ]
    free = [gpu for gpu in range(gpus) if all(gpu not in (named or ()) for named in named_P)]
    shares = iter(split_gpus(sum(needs_P), len(free)) if any(needs_P) else ())
    placed: list[tuple[str | None, str | None]] = []
    for devices, parts, named, needs in zip(devices_P, parts_P, named_P, needs_P, strict=True):
        own = [free[i] for i in next(shares)] if needs else []
        seen = ",".join(map(str, [*(named or ()), *own]))
        if named and isinstance(parts, tuple):
            devices = "+".join(part.platform if on_gpu(part) else str(part) for part in parts)
        placed.append((devices, seen or None))
    return placed


def split_gpus(processes: int, gpus: int) -> list[list[int]]:
    """Indices of the GPUs of each process: disjoint, equal in number up to one."""
    if processes > gpus:
        raise ValueError(
            f"{processes} processes need a GPU each, and there are {gpus}. Start fewer, or train on the CPU with "
            "JAX_PLATFORMS=cpu in the environment."
        )
    bounds = [gpus * i // processes for i in range(processes + 1)]
    return [list(range(bounds[i], bounds[i + 1])) for i in range(processes)]


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
