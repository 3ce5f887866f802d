"""Which devices form the nodes, and which ones carry the exchanges between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np

from hetjax.devices.workers import Workers
from hetjax.fleet.agree import gather


@dataclass(frozen=True)
class Places:
    nodes: int  # in all
    mine: tuple[int, ...]  # those of this process
    workers: list[Workers]  # of each of them
    leads: list[jax.Device]  # the first worker of every node, of all processes
    carriers: list[jax.Device]  # what carries the exchanges, of every process; none within one process


def in_one_process(workers: Workers, asked: int | Sequence[int] | None) -> Places:
    """Nodes of consecutive workers: so many, as equal as can be, or of so many workers each; two, if there are two
    workers, unless told."""
    count = len(workers)
    asked = min(2, count) if asked is None else asked
    if isinstance(asked, int | np.integer):
        if not 1 <= asked <= count:
            raise ValueError(f"{asked} nodes cannot be made of {count} workers: give 1 to {count}.")
        sizes = [count // asked + (j < count % asked) for j in range(asked)]
    else:
        sizes = [int(size) for size in asked]
        if sum(sizes) != count or min(sizes) < 1:
            raise ValueError(f"Nodes of {sizes} workers were asked for, and there are {count} workers in all.")
    ends = np.cumsum(sizes)
    groups = [Workers(workers.devices[end - size : end]) for end, size in zip(ends, sizes, strict=True)]
    return Places(len(sizes), tuple(range(len(sizes))), groups, [group.devices[0] for group in groups], [])


def across_processes(workers: Workers) -> Places:
    """Every process is a node. All of them have to call this."""
    said = gather([workers.devices[0].platform, workers.devices[0].id, carrier().id, carrier() in workers.devices])
    if busy := [process for process, (*_, computes) in enumerate(said) if computes]:
        raise ValueError(
            f"The last CPU device of a process carries the exchanges between nodes, and in process "
            f"{', '.join(map(str, busy))} it is a worker too. Start every process with one CPU device more than "
            "workers: JAX_NUM_CPU_DEVICES=2 for one worker."
        )
    of = lambda platform, number: next(d for d in jax.devices(platform) if d.id == number)
    leads = [of(platform, number) for platform, number, *_ in said]
    carriers = [of("cpu", number) for _, _, number, _ in said]
    return Places(len(said), (jax.process_index(),), [workers], leads, carriers)


def carrier() -> jax.Device:
    """This process's device for exchanges: its last CPU device."""
    return jax.local_devices(backend="cpu")[-1]


def own_devices(devices: Sequence[jax.Device] | None) -> list[jax.Device]:
    """Those of these devices (None: all) that this process trains on: its own, without the carrier where others are."""
    mine = [d for d in (jax.devices() if devices is None else devices) if d.process_index == jax.process_index()]
    return [d for d in mine if d != carrier()] or mine
