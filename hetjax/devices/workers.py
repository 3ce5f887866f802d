"""The workers of a run: one per JAX device on the mesh's `data` axis, some of them in this process."""

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
    return f"{device.platform}:{device.device_kind}"


def _by_process(device: jax.Device) -> tuple[int, int]:
    return device.process_index, device.id


@dataclass(frozen=True)
class Workers:
    """All workers in global order. The same list on every process; `local` are the indices of this one's."""

    devices: tuple[jax.Device, ...]

    @classmethod
    def of(cls, devices: Sequence[jax.Device] | None) -> Workers:
        if not (devices is None or isinstance(devices, Iterable)) or isinstance(devices, str):
            raise TypeError(f"devices is {devices!r}: expected a list of JAX's devices, such as jax.devices()[:2].")
        chosen = tuple(sorted(jax.devices(), key=_by_process) if devices is None else devices)
        if strange := [device for device in chosen if not isinstance(device, jax.Device)]:
            raise TypeError(f"devices holds {strange[0]!r}: expected JAX's devices, such as jax.devices()[:2].")
        if not chosen:
            raise ValueError("No devices were given: pass at least one, or None for all that JAX sees.")
        if len(set(chosen)) != len(chosen):
            raise ValueError(f"A device is listed twice in {list(chosen)}: each worker needs a device of its own.")
        processes = [d.process_index for d in chosen]
        if len(list(itertools.groupby(processes))) > len(set(processes)):
            raise ValueError(f"List the devices of a process one after the other; got processes {processes}.")
        if jax.process_index() not in processes:
            raise ValueError(
                f"No worker is in this process ({jax.process_index()} of {jax.process_count()}): the devices are those "
                f"of processes {sorted(set(processes))}. Give every process a device, or start fewer processes."
            )
        return cls(chosen)

    def __len__(self) -> int:
        return len(self.devices)

    @cached_property
    def local(self) -> tuple[int, ...]:
        return tuple(i for i, d in enumerate(self.devices) if d.process_index == jax.process_index())

    @property
    def several_processes(self) -> bool:
        return len(self.local) < len(self)

    @cached_property
    def kinds(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(device_kind(d) for d in self.devices))

    @cached_property
    def kind_W(self) -> np.ndarray:
        return np.array([self.kinds.index(device_kind(d)) for d in self.devices], np.int64)

    @cached_property
    def mesh(self) -> Mesh:
        return Mesh(np.array(self.devices), (AXIS,), axis_types=(AxisType.Auto,))

    @cached_property
    def sharded(self) -> NamedSharding:
        """Leading axis split over the workers."""
        return NamedSharding(self.mesh, PartitionSpec(AXIS))

    @cached_property
    def replicated(self) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec())

    def replicate(self, tree: Tree) -> Tree:
        """A tree of arrays, the same in every process, on all workers."""
        if not self.several_processes:
            return jax.device_put(tree, self.replicated)

        def spread(x: Any) -> jax.Array:
            if isinstance(x, jax.Array) and x.sharding == self.replicated:
                return x
            return jax.make_array_from_process_local_data(self.replicated, np.asarray(x), np.shape(x))

        return jax.tree.map(spread, tree)

    def stack(self, parts: Sequence[jax.Array]) -> jax.Array:
        """One global array [workers, ...] from this process's parts [1, ...], each already on its worker's device."""
        shape = (len(self), *parts[0].shape[1:])
        return jax.make_array_from_single_device_arrays(shape, self.sharded, list(parts))

    def from_host(self, parts: Sequence[np.ndarray]) -> jax.Array:
        """The same from one host array [...] per local worker."""
        if not self.several_processes:
            return jax.device_put(np.stack(parts), self.sharded)
        return self.stack(
            [jax.device_put(part[None], self.devices[i]) for part, i in zip(parts, self.local, strict=True)]
        )

    def pieces(self, array: jax.Array) -> list[jax.Array]:
        """This process's single-device pieces of a sharded or replicated global array, in the order of `local`.

        Taken all at once, because donating one piece deletes the whole array.
        """
        return [shard.data for shard in array.addressable_shards]

    def copies(self, tree: Tree) -> list[Tree]:
        """A replicated tree as one single-device tree per local worker."""
        leaves, treedef = jax.tree.flatten(tree)
        pieces = [self.pieces(leaf) for leaf in leaves]
        return [jax.tree.unflatten(treedef, [piece[k] for piece in pieces]) for k in range(len(self.local))]
