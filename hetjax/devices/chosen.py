"""The devices to train on, as chosen: those of several kinds, simulated ones on a CPU, different ones per process."""

from __future__ import annotations

import os
from collections.abc import Sequence

import jax
from jax.extend.backend import backends

from hetjax import processes
from hetjax.devices import fake
from hetjax.devices.choice import ALL, CPU, Selection, parse
from hetjax.devices.unused import cpu_chosen, unused_here, warn_of_unused
from hetjax.environment import PROCESSES


def chosen_devices(choice: str | int | None = None) -> list[jax.Device]:
    """The chosen devices of this process, or of all processes where one JAX backend spans them, grouped by process.

    Collective: a choice that cannot be had in one process is an error in all of them.

    Args:
        choice: see `hetjax.devices`.

    Raises:
        ValueError: if the choice is invalid, or cannot be had.
    """
    devices = _of_all(choice)
    parts = parse(choice)
    if isinstance(parts, tuple) and any(part.platform == CPU for part in parts):
        cpu_chosen(devices)
    return devices


def _of_all(choice: str | int | None) -> list[jax.Device]:
    """The chosen devices of this process, or of all processes."""
    if processes.count() == 1:
        return own_devices(choice)
    own, problem = own_devices_or_problem(choice)
    gathered = processes.gather([problem, [device.id for device in own]])
    raise_problems([problem for problem, _ in gathered])
    if processes.by_host():
        return own
    by_id = {device.id: device for device in jax.devices(own[0].platform)}
    return [by_id[number] for _, numbers in gathered for number in numbers]


def own_devices_or_problem(choice: str | int | None) -> tuple[list[jax.Device], str | None]:
    """The chosen devices of this process, or why they cannot be had: all processes have to know before one ends."""
    try:
        return own_devices(choice), None
    except (ValueError, TypeError) as error:
        return [], str(error)


def raise_problems(problems_P: Sequence[str | None]) -> None:
    """Raise ValueError with what the processes found wrong, if anything."""
    if found := [f"Process {process}: {problem}" for process, problem in enumerate(problems_P) if problem]:
        raise ValueError(" ".join(found))


def own_devices(choice: str | int | None) -> list[jax.Device]:
    """The chosen devices of this process.

    Raises:
        ValueError: if the choice is invalid, or cannot be had.
    """
    parsed = parse(choice)
    default = 1 if processes.count() > 1 or PROCESSES in os.environ else fake.DEFAULT
    if parsed is None or isinstance(parsed, int):
        return _usual(parsed, default)
    parts, alone = parsed, len(parsed) == 1
    if cpus := [_cpus(part, default if alone else 1) for part in parts if part.platform in (CPU, ALL)]:
        fake.check_number(cpus[0])
        fake.request(cpus[0])  # before JAX is used for another part
    if parts == (Selection(ALL),):
        platforms = sorted(backends(), key=lambda platform: platform == CPU)
        parts, alone = tuple(map(Selection, platforms)), len(platforms) == 1
    devices = [device for part in parts for device in _selected(part, default if alone else 1)]
    if len(set(devices)) < len(devices):
        raise ValueError(f"devices is {choice!r}, which names a device twice: give each kind once.")
    return devices


def _usual(count: int | None, default: int) -> list[jax.Device]:
    """The first devices of JAX's default platform: its accelerators, or simulated CPU devices."""
    fake.request(count or default)
    found = jax.local_devices()
    on_cpu = found[0].platform == CPU
    if on_cpu:
        warn_of_unused()
        fake.check_number(count or len(found))
    if count is not None and count > len(found):
        hint = f" ({fake.why_no_more()})" if on_cpu else ""
        raise ValueError(
            f"{count} devices were requested, but there are {len(found)} of kind {found[0].platform}{hint}. Request "
            "fewer, or omit the number to get all."
        )
    return found[:count]


def _cpus(part: Selection, default: int) -> int:
    """Number of CPU devices that a part needs."""
    return default if part.indices is None else max(part.indices) + 1


def _selected(part: Selection, cpus: int) -> list[jax.Device]:
    """The devices of one platform; `cpus`: how many are meant by `cpu`, one beside another platform."""
    try:
        found = jax.local_devices(backend=part.platform)
    except (RuntimeError, ValueError) as error:
        advice = unused_here() or f"Choose one of these, or install JAX for {part.platform}."
        raise ValueError(f"There is no {part.platform} that JAX can use here: it has {_present()}. {advice}") from error
    if part.indices is None:
        by_user = cpus > 1 and fake.devices_from_environment() is not None
        return found if part.platform != CPU or by_user else found[:cpus]
    if missing := [index for index in part.indices if index >= len(found)]:
        why = f" ({fake.why_no_more()})" if part.platform == CPU else ""
        raise ValueError(
            f"There is no {part.platform}:{missing[0]} here: there {'is' if len(found) == 1 else 'are'} {len(found)} "
            f"of kind {part.platform}{why}, counted from 0. Give other indices, or the kind alone for all."
        )
    return [found[index] for index in part.indices]


def _present() -> str:
    """The platforms that JAX has, such as "cuda (2 devices), cpu (1 device)"."""
    count = {name: len(client.local_devices()) for name, client in backends().items()}
    return ", ".join(f"{name} ({number} device{'' if number == 1 else 's'})" for name, number in count.items())
