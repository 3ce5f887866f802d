"""The workers of a run: one per JAX device along the mesh axis `data`, across all processes."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

Tree = Any
AXIS = "data"


def device_kind(device: jax.Device) -> str:
    """Platform and model: devices of one kind run the same compiled programs."""
    return f"{device.platform}:{device.device_kind}"


def _by_process(device: jax.Device) -> tuple[int, int]:
    return device.process_index, device.id


@dataclass(frozen=True)
class Workers:
    """All workers in global order, the same on every process; `local` holds the indices of this process's workers."""

    devices: tuple[jax.Device, ...]

    @classmethod
    def of(cls, devices: Sequence[jax.Device] | None) -> Workers:
        """Check a list of devices; None stands for all devices, ordered by process."""
        if not (devices is None or isinstance(devices, Iterable)) or isinstance(devices, str):
            raise TypeError(f"devices is {devices!r}: expected a list of JAX's devices, such as jax.devices()[:2].")
        chosen = tuple(sorted(jax.devices(), key=_by_process) if devices is None else devices)
        if invalid := [device for device in chosen if not isinstance(device, jax.Device)]:
            raise TypeError(f"devices holds {invalid[0]!r}: expected JAX's devices, such as jax.devices()[:2].")
        if not chosen:
            raise ValueError("No devices were given: pass at least one, or None for all devices.")
        if len(set(chosen)) != len(chosen):
            raise ValueError(f"A device is listed twice in {list(chosen)}: each worker needs a device of its own.")
        processes = [d.process_index for d in chosen]
        if len(list(itertools.groupby(processes))) > len(set(processes)):
            raise ValueError(f"Devices of one process must be adjacent in the list; got processes {processes}.")
        if jax.process_index() not in processes:
            raise ValueError(
                f"Process {jax.process_index()} of {jax.process_count()} has no worker: the given devices belong to "
                f"processes {sorted(set(processes))}. Give every process a device, or start fewer processes."
            )
        return cls(chosen)

    def __len__(self) -> int:
        return len(self.devices)

    @cached_property
    def local(self) -> tuple[int, ...]:
        """Indices of this process's workers."""
        return tuple(i for i, d in enumerate(self.devices) if d.process_index == jax.process_index())

    @property
    def several_processes(self) -> bool:
        """Whether some workers belong to other processes."""
        return len(self.local) < len(self)

    @cached_property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of devices, in order of first appearance."""
        return tuple(dict.fromkeys(device_kind(d) for d in self.devices))

    @cached_property
    def mesh(self) -> Mesh:
        return Mesh(np.array(self.devices), (AXIS,), axis_types=(AxisType.Auto,))

    @cached_property
    def sharded(self) -> NamedSharding:
        """Leading axis split across workers."""
        return NamedSharding(self.mesh, PartitionSpec(AXIS))

    @cached_property
    def replicated(self) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec())

    def replicate(self, tree: Tree) -> Tree:
        """Replicate a tree of arrays, identical in every process, on all workers."""
        if not self.several_processes:
            return jax.device_put(tree, self.replicated)

        def put(x: Any) -> jax.Array:
            if isinstance(x, jax.Array) and x.sharding == self.replicated:
                return x
            return jax.make_array_from_process_local_data(self.replicated, np.asarray(x), np.shape(x))

        return jax.tree.map(put, tree)

    def stack(self, parts: Sequence[jax.Array]) -> jax.Array:
        """Assemble a global array [workers, ...] from local parts [1, ...], each already on its worker's device."""
        shape = (len(self), *parts[0].shape[1:])
        return jax.make_array_from_single_device_arrays(shape, self.sharded, list(parts))

    def from_host(self, parts: Sequence[np.ndarray]) -> jax.Array:
        """Assemble a global array [workers, ...] from one host array [...] per local worker."""
        if not self.several_processes:
            return jax.device_put(np.stack(parts), self.sharded)
        return self.stack(
            [jax.device_put(part[None], self.devices[i]) for part, i in zip(parts, self.local, strict=True)]
        )

    def pieces(self, array: jax.Array) -> list[jax.Array]:
        """The single-device shards of a global array in this process, in the order of `local`.

        All are taken at once, because donating one shard deletes the whole array.
        """
        return [shard.data for shard in array.addressable_shards]

    def copies(self, tree: Tree) -> list[Tree]:
        """Split a global tree into one single-device tree per local worker."""
        leaves, treedef = jax.tree.flatten(tree)
        pieces = [self.pieces(leaf) for leaf in leaves]
        return [jax.tree.unflatten(treedef, [piece[k] for piece in pieces]) for k in range(len(self.local))]
