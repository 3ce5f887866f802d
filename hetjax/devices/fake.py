"""The devices to train on: real ones, or so many fake ones of the CPU, asked for before JAX's first use."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

import jax

from hetjax.arguments import whole

DEFAULT = 4
MOST = 256
_MAPS_EACH = 2000  # memory maps of a device's compiled programs; a process that has no more of them crashes


def said_by_environment() -> int | None:
    """The number of fake CPU devices that XLA_FLAGS or JAX_NUM_CPU_DEVICES ask for; None if neither does."""
    found = re.findall(r"--xla_force_host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", ""))
    if found:
        return int(found[-1])
    number = os.environ.get("JAX_NUM_CPU_DEVICES", "")
    return int(number) if number.isdigit() else None


def most_fake_devices() -> int:
    """How many fake devices the memory maps of this process are enough for; 32 with the usual 65,530 of Linux."""
    try:
        maps = int(Path("/proc/sys/vm/max_map_count").read_text())
    except (OSError, ValueError):
        return MOST
    return min(MOST, max(DEFAULT, maps // _MAPS_EACH))


def fake_devices(count: int | None = None) -> list[jax.Device]:
    """The first `count` devices; where there is only a CPU, it is split into that many (4 unless told) fake ones.

    Has to come before anything that uses JAX. With a GPU or TPU its devices are returned, all or the first `count`.
    """
    said = _ask_for(count, DEFAULT)
    return _first(jax.devices(), count, said)


def devices_of_all(count: int | None = None, spare: int = 0) -> list[jax.Device]:
    """The devices of several processes, those of each one after the other: the first `count` of each, or all.

    Where a process has only a CPU, that is one device unless told. Comes after `hetjax.fleet.distributed.initialize`.
    `spare`: so many CPU devices more in each process, which are not among those returned.
    """
    said = _ask_for(None if count is None else count + spare, 1 + spare)
    found: dict[int, list[jax.Device]] = {}
    for device in jax.devices():
        found.setdefault(device.process_index, []).append(device)
    if spare and jax.default_backend() == "cpu" and count is None:
        found = {process: devices[:-spare] or devices for process, devices in found.items()}
    return [device for process in sorted(found) for device in _first(found[process], count, said)]


def _ask_for(count: int | None, default: int) -> int | None:
    """Say how many fake devices a CPU shall be, unless the environment does; what that says."""
    if count is not None:
        whole("The number of devices", count, 1)
    said = said_by_environment()
    if said is None:
        with suppress(RuntimeError):  # JAX is in use already: what it has now is all there is
            jax.config.update("jax_num_cpu_devices", min(count or default, most_fake_devices()))
    return said


def _first(found: list[jax.Device], count: int | None, said: int | None) -> list[jax.Device]:
    asked = len(found) if count is None else count
    if found[0].platform == "cpu" and asked > (most := most_fake_devices()):
        raise ValueError(
            f"{asked:,} devices were asked for, but a CPU can be split into {most} at most here: the compiled programs "
            f"of each take some {_MAPS_EACH:,} memory maps. Ask for fewer, or raise vm.max_map_count."
        )
    if count is not None and count > len(found):
        why = "XLA_FLAGS or JAX_NUM_CPU_DEVICES ask" if said else "JAX was in use already and had been asked"
        hint = f"; {why} for {len(found)}" if found[0].platform == "cpu" else ""
        raise ValueError(
            f"{count} devices were asked for, but there are {len(found)} of kind {found[0].platform}{hint}. Ask for "
            "fewer, or for all by leaving the number out."
        )
    return found[:count]
