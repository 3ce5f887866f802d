"""Kinds of device that this machine offers, found without JAX: processes agree on a transport before JAX starts."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from hetjax.devices.choice import ALL, CPU, parse

_NAMES = {"gpu": ("cuda", "rocm")}  # platforms by a common name


def expected_kinds(
    devices: str | int | None = None, environment: Mapping[str, str] = os.environ, root: Path = Path("/")
) -> list[str]:
    """The kinds of device that a process will use, such as ['Tesla T4'] or ['cpu'].

    Args:
        devices: the choice of devices, as for `hetjax.devices`.
        environment: environment variables; JAX_PLATFORMS and CUDA_VISIBLE_DEVICES hide accelerators.
        root: root of the file system.

    Returns:
        The kinds, sorted, each once; ['cpu'] without accelerators. A platform of which nothing was found is named
        itself.

    Raises:
        ValueError: if the choice is invalid.
    """
    found = {} if environment.get("JAX_PLATFORMS", "") == CPU else accelerators(environment, root)
    choice = parse(devices, environment)
    if choice is None or isinstance(choice, int):
        return sorted({kind for kinds in found.values() for kind in kinds}) or [CPU]
    kinds: set[str] = set()
    for part in choice:
        names = (*found, CPU) if part.platform == ALL else _NAMES.get(part.platform, (part.platform,))
        models = [kind for name in names for kind in _picked(found.get(name, []), part.indices)]
        kinds |= set(models or [part.platform]) | ({CPU} if part.platform == ALL else set())
    return sorted(kinds - {ALL})


def accelerators(environment: Mapping[str, str] = os.environ, root: Path = Path("/")) -> dict[str, list[str]]:
    """Models of the NVIDIA, AMD and TPU devices that this process may use, by the files of their drivers."""
    found: dict[str, list[str]] = {}
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    gpus = sorted(root.glob("proc/driver/nvidia/gpus/*/information"))
    if visible is not None:  # numbers count the GPUs; other names (UUIDs) hide none here
        numbers = [part.strip() for part in visible.split(",")]
        if all(re.fullmatch(r"-?\d*", number) for number in numbers):
            gpus = [gpu for k, gpu in enumerate(gpus) if str(k) in numbers]
    for gpu in gpus:
        if model := re.search(r"^Model:\s*(.+?)\s*$", gpu.read_text(), re.MULTILINE):
            found.setdefault("cuda", []).append(model[1])
    for node in sorted(root.glob("sys/class/kfd/kfd/topology/nodes/*/properties")):
        target = re.search(r"^gfx_target_version (\d+)$", node.read_text(), re.MULTILINE)
        if target and target[1] != "0":
            found.setdefault("rocm", []).append(f"AMD gfx {target[1]}")
    if any(root.glob("dev/accel*")) or "TPU_ACCELERATOR_TYPE" in environment:
        found["tpu"] = [f"TPU {environment.get('TPU_ACCELERATOR_TYPE', '')}".strip()]
    return found


def _picked(models: list[str], indices: tuple[int, ...] | None) -> list[str]:
    """The models at these positions; all of them where their number is unknown, as for TPUs."""
    if indices is None or not all(index < len(models) for index in indices):
        return models
    return [models[index] for index in indices]
