"""One model for all workers: read without a lock, moved on by deltas in order of arrival, never overwritten.

JAX arrays cannot be changed and nothing here is donated, so a snapshot stays as it was read for as long as somebody
holds it, and to read is to load one attribute. An update is computed from the newest model, whatever version its
gradient was taken at: no worker's progress is lost.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from hetjax.devices.compile import compile_for, expected
from hetjax.devices.workers import device_kind
from hetjax.reduce.layout import HOST_SLOTS, Layout, Parts
from hetjax.reduce.transports import apply_where_finite
from hetjax.reduce.update import Core
from hetjax.sync.base import Rule
from hetjax.sync.hogbatch.scaling import follows_scale, scaled

_SLOTS = np.zeros(HOST_SLOTS, np.float32)  # times and plans do not travel with the sums here


@dataclass(frozen=True)
class ModelSnapshot:
    """The model after `version` updates."""

    version: int
    core: Core

    @property
    def leaves(self) -> list[jax.Array]:
        """Of the parameters and the model state: what a worker computes with."""
        return jax.tree.leaves(self.core[:2])


def compile_updates(layout: Layout, rule: Rule, core: Core, devices: Sequence[jax.Device]) -> dict[jax.Device, Any]:
    """For each device the program (core, sums of a worker, slots, scale, rate) -> core, and what to report."""
    shape = lambda x: jax.ShapeDtypeStruct(np.shape(x), jax.dtypes.canonicalize_dtype(x.dtype))
    shapes = jax.tree.map(shape, core)
    follows = follows_scale(rule.optimizer, shapes[0])

    def step(core: Core, parts_1: Parts, slots: jax.Array, scale: jax.Array, rate: jax.Array) -> tuple[Core, jax.Array]:
        own = layout.outgoing(tuple(part[0] for part in parts_1), slots, 0, 1)
        update = replace(rule, optimizer=scaled(rule.optimizer, follows, scale, rate)).update()
        return apply_where_finite(layout, update, core, own, 1)

    parts = tuple(jax.ShapeDtypeStruct((1, size), layout.dtype) for size in layout.sizes)
    factor = jax.ShapeDtypeStruct((), np.float32)
    arguments = shapes, parts, shape(_SLOTS), factor, factor
    programs: dict[jax.Device, Any] = {}
    with expected():
        for kind in dict.fromkeys(map(device_kind, devices)):
            alike = [device for device in devices if device_kind(device) == kind]
            programs.update(zip(alike, compile_for(step, arguments, alike), strict=True))
    return programs


def run_update(program: Any, core: Core, parts: Parts, scale: float, rate: float) -> tuple[Core, jax.Array]:
    return program(core, parts, _SLOTS, np.float32(scale), np.float32(rate))


class SharedModel:
    """The model on its home device, with a version number."""

    def __init__(self, layout: Layout, rule: Rule, core: Core, home: jax.Device):
        self.home = home
        self.snapshot = ModelSnapshot(0, jax.device_put(core, home))
        self._update = compile_updates(layout, rule, core, [home])[home]
        self._lock = threading.Lock()

    def receive(self, parts: Parts) -> Parts:
        """A worker's sums on the home device: there, or known to be lost, before the lock is taken."""
        return jax.block_until_ready(jax.device_put(parts, self.home))

    def apply(self, parts: Parts, scale: float, rate: float = 1.0) -> tuple[int, jax.Array]:
        """Add the update of these sums to the newest model; its version then, and the report of the update."""
        with self._lock:
            core, tail = run_update(self._update, self.snapshot.core, parts, scale, rate)
            self.snapshot = ModelSnapshot(self.snapshot.version + 1, core)
            return self.snapshot.version, tail


def home_device(devices: tuple[jax.Device, ...]) -> jax.Device:
    """Where the shared model lives: on a CPU device, whose programs do not queue behind one another.

    On an accelerator an update would have to wait for the batch that is being computed there. Without a CPU backend it
    lives on the first worker's device after all.
    """
    for device in devices:
        if device.platform == "cpu":
            return device
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return devices[0]
