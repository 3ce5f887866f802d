"""Compile a program once per KIND of device, and once for all processes and restarts of a run.

jit compiles once per device: eight fake CPU devices pay eight times. A compiled program can be serialised and loaded
for another device of the same kind in milliseconds, in this process or, by way of a `ProgramStore`, in any other. JAX's
public loader only knows the devices the program was compiled for, so this file uses its private unpickler; nothing else
does, and where it fails each device compiles for itself.

JAX's own persistent cache does not do this: only process 0 writes to it, and on a CPU an entry is for one device. It
can be used beside this one. A program that came out of it cannot be serialised again, so it is neither shared nor
stored. The bytes that are stored and loaded are always those of the process that compiled.
"""

from __future__ import annotations

import functools
import hashlib
import io
import logging
import os
import platform
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jaxlib
import numpy as np
from jax.sharding import SingleDeviceSharding

from hetjax import environment
from hetjax.devices.compiles import cache_hits
from hetjax.devices.program_store import ProgramStore

log = logging.getLogger("hetjax")
Tree = Any
_HELD_BY_PROCESS = ("callback", "CustomSPMDPartitioning")  # custom calls into Python objects of this process


def compile_for(fn: Callable, args: tuple, devices: Sequence[jax.Device], donate: tuple[int, ...] = ()) -> list[Any]:
    """`fn` compiled for arguments shaped like `args`, once for each of these devices, which must be of one kind."""
    lead, *others = devices

    def lower(device: jax.Device) -> Any:
        place = SingleDeviceSharding(device)
        spec = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), args)
        with jax.default_device(device):  # for programs without arguments
            return _lower(fn, spec, donate)

    lowered = lower(lead)
    program, blob = _compile_or_load(lowered, [lead])
    if blob is not None:
        try:
            return [program, *(_load(blob, lowered, [device]) for device in others)]
        except Exception as error:
            log.info("Sharing a compiled program between devices failed (%s); compiling it per device instead.", error)
    return [program, *(lower(device).compile() for device in others)]


def compile_over(fn: Callable, args: tuple, devices: Sequence[jax.Device], donate: tuple[int, ...] = ()) -> Any:
    """`fn` compiled as one program over all of these devices, on which `args` (arrays or their shapes) lie."""
    shardings = [str(getattr(x, "sharding", None)) for x in jax.tree.leaves(args)]
    return _compile_or_load(_lower(fn, args, donate), devices, (*shardings, *(device.id for device in devices)))[0]


def _lower(fn: Callable, args: tuple, donate: tuple[int, ...]) -> Any:
    """A function that is new to JAX each time: its memory cache does not say where a program came from.

    With unused arguments kept, those of the program are those of the function: its text tells all.
    """

    @functools.wraps(fn)
    def fresh(*args: Any) -> Any:
        return fn(*args)

    return jax.jit(fresh, donate_argnums=donate, keep_unused=True).lower(*args)


def _compile_or_load(
    lowered: Any, devices: Sequence[jax.Device], layout: tuple[Any, ...] = ()
) -> tuple[Any, bytes | None]:
    """The program, and what others can load it from; None if that cannot be had.

    `layout`: what the program depends on beside the kind of its devices; nothing, where any device of the kind will do.
    """
    store, key = _store(os.environ.get(environment.PROGRAMS)), ""
    if store is not None:
        try:
            key = _key(lowered, devices[0], layout)
            if key and (blob := store.read(key)) is not None:
                return _load(blob, lowered, devices), blob
        except Exception as error:  # a private interface: anything may have changed
            log.info("A stored program could not be loaded (%s); compiling it again.", error)
    hits = cache_hits()
    program = lowered.compile()
    if cache_hits() > hits:  # it came from JAX's cache
        return program, None
    try:
        blob = _serialize(program)
    except Exception as error:
        log.info("A compiled program cannot be serialised (%s).", error)
        return program, None
    if store is not None and key:
        store.write(key, blob)
    return program, blob


def _serialize(program: Any) -> bytes:
    from jax.experimental import serialize_executable

    return serialize_executable.serialize(program)[0]


def _load(blob: bytes, lowered: Any, devices: Sequence[jax.Device]) -> Any:
    """A serialised program on these devices; one for a single device goes to whichever is given."""
    from jax._src.lib import xla_client
    from jax.experimental import serialize_executable

    class Unpickler(serialize_executable._JaxPjrtUnpickler):
        def persistent_load(self, pid):
            if pid[0] == "exec" and len(devices) == 1:
                options = xla_client.CompileOptions()
                options.device_assignment = xla_client.DeviceAssignment.create(np.array([[devices[0].id]]))
                return self.backend.deserialize_executable(pid[1], self.execution_devices, options)
            return super().persistent_load(pid)

    reader = Unpickler(io.BytesIO(blob), devices[0].client, list(devices))
    if len(devices) == 1:
        reader.devices_by_id = defaultdict(lambda: devices[0])
    unloaded, _, no_kwargs = reader.load()
    return jax.stages.Compiled(unloaded.load(), [], lowered.args_info, lowered.out_tree, no_kwargs=no_kwargs)


# -- the store --


@functools.cache
def _store(path: str | None) -> ProgramStore | None:
    if not path:
        return None
    try:
        return ProgramStore(path)
    except (OSError, AttributeError) as error:  # AttributeError: this platform does not say who owns a directory
        log.warning("Compiled programs are not stored: %s", error)
        return None


def _key(lowered: Any, lead: jax.Device, layout: tuple[Any, ...]) -> str:
    """A digest of what a compiled program depends on; empty for one that only this process can run."""
    from jax._src.lib import xla_client

    text = lowered.as_text()
    if any(name in text for name in _HELD_BY_PROCESS):
        return ""
    options = xla_client.CompileOptions()
    options.executable_build_options.debug_options  # noqa: B018  puts XLA's flags in, as it has read them
    parts = (
        text,
        jax.tree.leaves(lowered.args_info),
        layout,
        (lead.platform, lead.device_kind, lead.client.platform_version),
        (jax.__version__, jaxlib.__version__),
        sorted(jax.config.values.items()),
        (options.SerializeAsString(), os.environ.get("LIBTPU_INIT_ARGS")),
        _host() if lead.platform == "cpu" else None,
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _host() -> tuple[Any, ...]:
    """What XLA fits a program for the CPU to: its instructions, and how many cores this process may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return platform.machine(), _cpu(), cores


@functools.cache
def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features", "CPU p"))}))
