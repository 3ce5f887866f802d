"""Kinds of device that this machine offers, found without JAX: processes agree on a transport before JAX starts."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

_CPU = "cpu"


def expected_kinds(
    devices: str | int | None = None, environment: Mapping[str, str] = os.environ, root: Path = Path("/")
) -> list[str]:
    """The kinds of device that a process will use, such as ['Tesla T4'] or ['cpu'].

    Args:
        devices: the choice of devices, as for `hetjax.devices`.
        environment: environment variables; JAX_PLATFORMS and CUDA_VISIBLE_DEVICES hide accelerators.
        root: root of the file system.

    Returns:
        The kinds, sorted, each once; ['cpu'] without accelerators.
    """
    found = set() if environment.get("JAX_PLATFORMS", "") == _CPU else accelerators(environment, root)
    text = devices if isinstance(devices, str) else ""
    if text and not text.isdigit():
        parts = {part.split(":")[0].strip() for part in text.split("+")}
        found = set() if parts == {_CPU} else found | ({_CPU} if parts & {_CPU, "all"} else set())
    return sorted(found) or [_CPU]


def accelerators(environment: Mapping[str, str] = os.environ, root: Path = Path("/")) -> set[str]:
    """Models of the NVIDIA, AMD and TPU devices that this process may use, by the files of their drivers."""
    found = set()
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    gpus = sorted(root.glob("proc/driver/nvidia/gpus/*/information"))
    if visible is not None:  # numbers count the GPUs; other names (UUIDs) hide none here
        numbers = [part.strip() for part in visible.split(",")]
        if all(re.fullmatch(r"-?\d*", number) for number in numbers):
            gpus = [gpu for k, gpu in enumerate(gpus) if str(k) in numbers]
    for gpu in gpus:
        if model := re.search(r"^Model:\s*(.+?)\s*$", gpu.read_text(), re.MULTILINE):
            found.add(model[1])
    for node in sorted(root.glob("sys/class/kfd/kfd/topology/nodes/*/properties")):
        target = re.search(r"^gfx_target_version (\d+)$", node.read_text(), re.MULTILINE)
        if target and target[1] != "0":
            found.add(f"AMD gfx {target[1]}")
    if any(root.glob("dev/accel*")) or "TPU_ACCELERATOR_TYPE" in environment:
        found.add(f"TPU {environment.get('TPU_ACCELERATOR_TYPE', '')}".strip())
    return found
