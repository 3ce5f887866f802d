"""Compile a program once per KIND of device and share it with all devices of that kind.

jit compiles once per device: eight fake CPU devices pay eight times. A compiled program can be serialised and loaded
for another device of the same kind in milliseconds. JAX's public loader only knows the devices the program was compiled
for, so this file uses its private unpickler; nothing else does, and where it fails each device compiles for itself.
Only bytes that this process has just made are ever loaded.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from hetjax.run.compiles import cache_hits

log = logging.getLogger("hetjax")
Tree = Any


def compile_for(fn: Callable, args: tuple, devices: Sequence[jax.Device], donate: tuple[int, ...] = ()) -> list[Any]:
    """`fn` compiled for arguments shaped like `args`, once for each of these devices, which must be of one kind."""
    lead, *others = devices
    hits = cache_hits()
    program = _compile(fn, args, lead, donate)
    if not others:
        return [program]
    if cache_hits() > hits:  # such a program loses its functions when it is serialised again; the others are cached too
        return [program, *(_compile(fn, args, device, donate) for device in others)]
    try:
        share = _Shared(program, lead)
        return [program, *(share.load(device) for device in others)]
    except Exception as error:  # a private interface: anything may have changed
        log.info("Sharing a compiled program between devices failed (%s); compiling it per device instead.", error)
        return [program, *(_compile(fn, args, device, donate) for device in others)]


def _compile(fn: Callable, args: tuple, device: jax.Device, donate: tuple[int, ...]) -> Any:
    place = SingleDeviceSharding(device)
    spec = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), args)
    with jax.default_device(device):  # for programs without arguments
        return jax.jit(fn, donate_argnums=donate).lower(*spec).compile()


class _Shared:
    """A compiled program in serialised form, to be loaded for other devices."""

    def __init__(self, program: Any, lead: jax.Device):
        from jax.experimental import serialize_executable

        self.lead = lead
        self.blob, self.in_tree, self.out_tree = serialize_executable.serialize(program)

    def load(self, device: jax.Device) -> Any:
        from jax._src.lib import xla_client
        from jax.experimental import serialize_executable

        lead = self.lead

        class Unpickler(serialize_executable._JaxPjrtUnpickler):
            def persistent_load(self, pid):
                if pid[0] == "exec":
                    options = xla_client.CompileOptions()
                    options.device_assignment = xla_client.DeviceAssignment.create(np.array([[device.id]]))
                    return self.backend.deserialize_executable(pid[1], self.execution_devices, options)
                return super().persistent_load(pid)

        reader = Unpickler(io.BytesIO(self.blob), device.client, [device])
        reader.devices_by_id = {lead.id: device}
        unloaded, args_info, no_kwargs = reader.load()
        return jax.stages.Compiled(
            unloaded.load(), [], self.in_tree.unflatten(args_info), self.out_tree, no_kwargs=no_kwargs
        )
