"""Simulated CPU devices: how many JAX will make of the CPU, requested before it is first used."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

import jax

DEFAULT = 4
MOST = 256
_MAPS_EACH = 2000  # memory maps taken by one device's compiled programs; a process that runs out of them crashes


def devices_from_environment() -> int | None:
    """Number of CPU devices set by XLA_FLAGS or JAX_NUM_CPU_DEVICES; None if neither sets it."""
    found = re.findall(r"--xla_force_host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", ""))
    if found:
        return int(found[-1])
    number = os.environ.get("JAX_NUM_CPU_DEVICES", "")
    return int(number) if number.isdigit() else None


def most_fake_devices() -> int:
    """Largest number of fake devices that the process's memory maps allow; 32 with Linux's default of 65,530."""
    try:
        maps = int(Path("/proc/sys/vm/max_map_count").read_text())
    except (OSError, ValueError):
        return MOST
    return min(MOST, max(DEFAULT, maps // _MAPS_EACH))


def request(count: int) -> None:
    """Let JAX make this many devices of the CPU, unless the environment sets their number or JAX has started."""
    if devices_from_environment() is None:
        with suppress(RuntimeError):  # JAX is already initialized: its devices are fixed
            jax.config.update("jax_num_cpu_devices", min(count, most_fake_devices()))


def check_number(count: int) -> None:
    """Raise ValueError if the CPU cannot be split into that many devices."""
    if count > (most := most_fake_devices()):
        raise ValueError(
            f"{count:,} devices were requested, but this CPU can be split into at most {most}: the compiled "
            f"programs of each take about {_MAPS_EACH:,} memory maps. Request fewer, or raise vm.max_map_count."
        )


def why_no_more() -> str:
    """Why JAX has no more CPU devices."""
    return (
        "set by XLA_FLAGS or JAX_NUM_CPU_DEVICES"
        if devices_from_environment()
        else ("JAX was used before: choose devices first, before a model or an array is made")
    )
