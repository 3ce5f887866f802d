"""The devices to train on: real ones, or fake CPU devices requested before JAX is first used."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

import jax

from hetjax.arguments import whole

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


def fake_devices(count: int | None = None) -> list[jax.Device]:
    """Return devices to train on, splitting a CPU into several simulated devices.

    Call it before anything else uses JAX. With a GPU or TPU it returns the real devices. XLA_FLAGS and
    JAX_NUM_CPU_DEVICES override the number of simulated devices.

    Args:
        count: number of devices. Default: all real devices, or 4 simulated CPU devices.

    Returns:
        The first `count` devices.

    Raises:
        ValueError: if there are fewer devices, or the CPU cannot be split into that many.
    """
    preset = _request(count, DEFAULT)
    return _first(jax.devices(), count, preset)


def devices_of_all(count: int | None = None) -> list[jax.Device]:
    """The devices of this process, or of all processes where one JAX backend spans them, grouped by process.

    Call after `hetjax.fleet.distributed.initialize`.

    Args:
        count: Number of devices per process. Default: all; on CPU, 1.
    """
    preset = _request(count, 1)
    found: dict[int, list[jax.Device]] = {}
    for device in jax.devices():
        found.setdefault(device.process_index, []).append(device)
    return [device for process in sorted(found) for device in _first(found[process], count, preset)]


def _request(count: int | None, default: int) -> int | None:
    """Set JAX's number of CPU devices unless the environment sets it; returns the environment's number."""
    if count is not None:
        whole("The number of devices", count, 1)
    preset = devices_from_environment()
    if preset is None:
        with suppress(RuntimeError):  # JAX is already initialized: its devices are fixed
            jax.config.update("jax_num_cpu_devices", min(count or default, most_fake_devices()))
    return preset


def _first(found: list[jax.Device], count: int | None, preset: int | None) -> list[jax.Device]:
    requested = len(found) if count is None else count
    if found[0].platform == "cpu" and requested > (most := most_fake_devices()):
        raise ValueError(
            f"{requested:,} devices were requested, but this CPU can be split into at most {most}: the compiled "
            f"programs of each take about {_MAPS_EACH:,} memory maps. Request fewer, or raise vm.max_map_count."
        )
    if count is not None and count > len(found):
        why = "set by XLA_FLAGS or JAX_NUM_CPU_DEVICES" if preset else "JAX was initialized before this call"
        hint = f" ({why})" if found[0].platform == "cpu" else ""
        raise ValueError(
            f"{count} devices were requested, but there are {len(found)} of kind {found[0].platform}{hint}. Request "
            "fewer, or omit the number to get all."
        )
    return found[:count]
