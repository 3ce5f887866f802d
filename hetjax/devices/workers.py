"""The workers of a run: one per device of every process, and the mesh over those that one program can span."""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, replace
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from hetjax import processes
from hetjax.devices import memory
from hetjax.devices.chosen import chosen_devices, own_devices_or_problem, raise_problems
from hetjax.devices.targets import target_of
from hetjax.devices.unused import warn_unless_chosen
from hetjax.environment import DEVICES

Tree = Any
DeviceChoice = Sequence[jax.Device] | str | int | None  # devices, or a choice of them as for `hetjax.devices`
AXIS = "data"


@functools.cache
def device_kind(device: jax.Device) -> str:
    """Platform and model: devices of one kind run the same compiled programs.

    A second client of a platform, which has its own arrays and programs, makes a kind of its own.
    """
    kind = f"{device.platform}:{device.device_kind}"
    if target_of(device) is not None:
        return kind
    return kind if device.client is jax.local_devices(backend=device.platform)[0].client else f"{kind}@2"


def on_cpu(kind: str) -> bool:
    """Whether devices of this kind are CPU devices."""
    return kind.partition(":")[0] == "cpu"


@dataclass(frozen=True)
class Worker:
    """One worker as all processes know it."""

    process: int
    platform: str
    kind: str  # see `device_kind`
    name: str  # of its device, for messages
    memory: int | None = None  # bytes it may use; None: unknown


@dataclass(frozen=True)
class Workers:
    """All workers in global order, the same on every process, and the devices of those that this process drives.

    Attributes:
        members: all workers, grouped by process.
        own: the devices of this process's workers.
        spanning: the devices of all workers, where one JAX backend spans all processes; otherwise None.
        process: index of this process among those of the members.
        elastic: expected number of processes, where members may come and go; otherwise 0. Until they have met, the
            members are the workers of this process only.
        memory_given: whether the memory of the members was given by the user, and not reported by their devices.
    """

    members: tuple[Worker, ...]
    own: tuple[jax.Device, ...]
    spanning: tuple[jax.Device, ...] | None = None
    process: int = 0
    elastic: int = 0
    memory_given: bool = False

    @classmethod
    def of(cls, devices: DeviceChoice) -> Workers:
        """Make one worker of every device. With several processes, this is collective.

        Args:
            devices: devices of this process, or of all processes where one JAX backend spans them; or a choice as for
                `hetjax.devices`. Default: the choice of the launcher, if any, else all devices that JAX sees.

        Raises:
            TypeError: if these are no devices.
            ValueError: if a device is listed twice, a process has no worker, or the choice cannot be had.
        """
        if isinstance(devices, str | int) or (devices is None and os.environ.get(DEVICES)):
            if processes.by_host():
                return cls._gathered(*own_devices_or_problem(devices))
            devices = chosen_devices(devices)
        chosen = _checked(devices)
        if processes.by_host():
            return cls._gathered(chosen)
        if not chosen:
            raise ValueError("No devices were given: pass at least one, or None for all devices.")
        process_W = [device.process_index for device in chosen]
        if len(set(process_W)) > 1 and processes.link() is None:
            raise ValueError(
                "This program called jax.distributed.initialize itself, so hetjax cannot reach the other processes. "
                "Call hetjax.fleet.initialize(transport='mesh') instead."
            )
        if len(list(itertools.groupby(process_W))) > len(set(process_W)):
            raise ValueError(f"Devices of one process must be adjacent in the list; got processes {process_W}.")
        me = processes.index()
        _check_idle([process for process, has in enumerate(processes.gather(me in process_W)) if not has])
        own = tuple(device for device in chosen if device.process_index == me)
        members = tuple(_described(device, device.process_index) for device in chosen)
        return cls(members, own, chosen if len(own) < len(chosen) else None, me)

    @classmethod
    def alone(cls, devices: DeviceChoice) -> Workers:
        """The workers of this process only, where every process plans on its own.

        Args:
            devices: as in `of`; those of other processes are left out.
        """
        if isinstance(devices, str | int) or (devices is None and os.environ.get(DEVICES)):
            devices = chosen_devices(devices)
        own = tuple(device for device in _checked(devices) if device.process_index == jax.process_index())
        if not own:
            raise ValueError(f"Process {processes.index()} has no worker: none of the given devices belongs to it.")
        me = processes.index()
        return cls(tuple(_described(device, me) for device in own), own, None, me)

    @classmethod
    def _gathered(cls, own: Sequence[jax.Device], problem: str | None = None) -> Workers:
        """The workers of all processes, each of which has its own backend; `problem`: why this one has no devices."""
        me = processes.index()
        rows = processes.gather([problem, [astuple(_described(device, me)) for device in own]])
        raise_problems([problem for problem, _ in rows])
        gathered = [theirs for _, theirs in rows]
        _check_idle([process for process, theirs in enumerate(gathered) if not theirs])
        members = tuple(Worker(*row) for theirs in gathered for row in theirs)
        return cls(members, tuple(own), None, me, processes.elastic())

    def described(self) -> list[tuple[Any, ...]]:
        """The workers of this process as JSON values, for the other members of an elastic fleet."""
        return [astuple(self.members[i]) for i in self.local]

    def among(self, described_P: Sequence[Sequence[Sequence[Any]]], process: int) -> Workers:
        """The workers of an elastic fleet, from what each of its processes has `described`; this one is `process`."""
        members = (replace(Worker(*row), process=p) for p, described in enumerate(described_P) for row in described)
        return replace(self, members=tuple(members), process=process)

    def with_memory(self, memory_W: np.ndarray) -> Workers:
        """The same workers with this memory instead of what their devices report."""
        members = (replace(member, memory=int(room)) for member, room in zip(self.members, memory_W, strict=True))
        return replace(self, members=tuple(members), memory_given=True)

    def part(self, start: int, stop: int) -> Workers:
        """The workers from `start` to `stop` of a single process."""
        return Workers(self.members[start:stop], self.own[start:stop], None, self.process)

    def __len__(self) -> int:
        return len(self.members)

    @cached_property
    def local(self) -> tuple[int, ...]:
        """Indices of this process's workers."""
        return tuple(i for i, member in enumerate(self.members) if member.process == self.process)

    def device(self, worker: int) -> jax.Device:
        """The device of a worker of this process."""
        return self.own[worker - self.local[0]]

    @property
    def several_processes(self) -> bool:
        """Whether some workers belong to other processes, or may do so."""
        return len(self.own) < len(self) or self.elastic > 0

    @property
    def expected(self) -> int:
        """Expected number of workers."""
        return max(len(self), len(self.own) * self.elastic)

    @property
    def by_host(self) -> bool:
        """Whether processes have their own backends, so that sums travel between them by way of the hosts."""
        return self.several_processes and self.spanning is None

    @cached_property
    def process_W(self) -> np.ndarray:
        """The process of each worker."""
        return np.array([member.process for member in self.members])

    @cached_property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of devices, in order of first appearance."""
        return tuple(dict.fromkeys(member.kind for member in self.members))

    @property
    def backend(self) -> str:
        """What the workers run on, such as 'JAX 0.10.2, backend gpu (Tesla T4) and cpu'."""
        split = (kind.partition(":") for kind in self.kinds)
        names = " and ".join(name if model in (name, "") else f"{name} ({model})" for name, _, model in split)
        return f"JAX {jax.__version__}, backend {names}"

    @cached_property
    def own_kinds(self) -> tuple[str, ...]:
        """Kinds of this process's devices."""
        return tuple(dict.fromkeys(self.members[i].kind for i in self.local))

    @property
    def meshed(self) -> tuple[jax.Device, ...]:
        """The devices that one program can span: those of all workers, or only of this process's."""
        return self.own if self.spanning is None else self.spanning

    @cached_property
    def mesh(self) -> Mesh:
        return Mesh(np.array(self.meshed), (AXIS,), axis_types=(AxisType.Auto,))

    @cached_property
    def sharded(self) -> NamedSharding:
        """Leading axis split across workers."""
        return NamedSharding(self.mesh, PartitionSpec(AXIS))

    @cached_property
    def replicated(self) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec())

    def replicate(self, tree: Tree) -> Tree:
        """Replicate a tree of arrays, identical in every process, on all workers; for targets only its shapes."""
        if target_of(self.own[0]) is not None:
            return shapes_on(self.replicated, tree)
        if self.spanning is None:
            return jax.device_put(tree, self.replicated)

        def put(x: Any) -> jax.Array:
            if isinstance(x, jax.Array) and x.sharding == self.replicated:
                return x
            return jax.make_array_from_process_local_data(self.replicated, np.asarray(x), np.shape(x))

        return jax.tree.map(put, tree)

    def stack(self, parts: Sequence[jax.Array]) -> jax.Array:
        """Assemble an array [meshed workers, ...] from local parts [1, ...], each already on its worker's device."""
        shape = (len(self.meshed), *parts[0].shape[1:])
        return jax.make_array_from_single_device_arrays(shape, self.sharded, list(parts))

    def from_host(self, parts: Sequence[np.ndarray]) -> jax.Array:
        """Assemble an array [meshed workers, ...] from one host array [...] per local worker."""
        if self.spanning is None:
            return jax.device_put(np.stack(parts), self.sharded)
        return self.stack([jax.device_put(part[None], device) for part, device in zip(parts, self.own, strict=True)])

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


def _checked(devices: Sequence[jax.Device] | None) -> tuple[jax.Device, ...]:
    if not (devices is None or isinstance(devices, Iterable)):
        raise TypeError(
            f"devices is {devices!r}: expected a list of JAX's devices, such as jax.devices()[:2], or a choice, "
            "such as 'gpu+cpu'."
        )
    chosen = tuple(sorted(jax.devices(), key=_by_process) if devices is None else devices)
    if invalid := [device for device in chosen if not isinstance(device, jax.Device)]:
        raise TypeError(f"devices holds {invalid[0]!r}: expected JAX's devices, such as jax.devices()[:2].")
    if len(set(chosen)) != len(chosen):
        raise ValueError(f"A device is listed twice in {list(chosen)}: each worker needs a device of its own.")
    if chosen:
        warn_unless_chosen(chosen)
    return chosen


def _check_idle(idle: Sequence[int]) -> None:
    """Raise, in all processes, for those without any device."""
    if idle:
        raise ValueError(
            f"Process {', '.join(map(str, idle))} of {processes.count()} has no worker. Give every process a device, "
            "or start fewer processes."
        )


def shapes_on(sharding: Sharding, tree: Tree) -> Tree:
    """Shapes of arrays with a sharding: what targets have instead of the arrays."""
    shape = lambda x: jax.ShapeDtypeStruct(np.shape(x), jax.dtypes.canonicalize_dtype(x.dtype), sharding=sharding)
    return jax.tree.map(shape, tree)


def _by_process(device: jax.Device) -> tuple[int, int]:
    return device.process_index, device.id


def _described(device: jax.Device, process: int) -> Worker:
    return Worker(process, device.platform, device_kind(device), str(device), memory.available(device))
