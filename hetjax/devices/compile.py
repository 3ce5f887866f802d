"""Compile each program once per kind of device, share it between devices and processes, and count every compile.

`jit` compiles once per device: eight fake CPU devices pay eight times. A compiled program can be serialized and loaded
on another device of the same kind within milliseconds, in this process or, through a `ProgramStore`, in any other.
JAX's public loader only knows the devices that a program was compiled for, so this file uses its private unpickler. No
other file does, and where it fails, each device compiles for itself.

JAX's persistent cache cannot replace this: only process 0 writes to it, and a CPU entry is tied to one device. Both can
be used together, but a program that came from JAX's cache cannot be serialized again, so it is neither shared nor
stored.
"""

from __future__ import annotations

import functools
import hashlib
import io
import logging
import os
import platform
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jaxlib
import numpy as np
from jax.sharding import SingleDeviceSharding

from hetjax import environment, processes
from hetjax.devices.program_store import ProgramStore
from hetjax.devices.random_bits import quick_to_compile
from hetjax.devices.targets import target_of

log = logging.getLogger("hetjax")

_HELD_BY_PROCESS = ("callback", "CustomSPMDPartitioning")  # custom calls into Python objects of this process
_COMPILED = "/jax/core/compile/backend_compile_duration"
_CACHE_HIT = "/jax/compilation_cache/cache_hits"
# .expected: compiles of this thread are warm-up; .hits: its hits in JAX's cache; .record: its programs
_thread = threading.local()
_count = 0
_listening = False
_lock = threading.Lock()


@dataclass(frozen=True)
class Compiled:
    """A program that was compiled while `recorded()`.

    Attributes:
        name: what it computes.
        program: the compiled program.
        donated: number of donated buffers.
        seconds: for tracing, lowering and compiling it.
        cpu_seconds: the same in CPU time of this process, which other processes disturb less.
    """

    name: str
    program: Any
    donated: int
    seconds: float
    cpu_seconds: float


def compile_for(
    fn: Callable, args: tuple, devices: Sequence[jax.Device], donate: tuple[int, ...] = (), name: str = ""
) -> list[Any]:
    """Compile `fn` for arguments shaped like `args`: one program per device. All devices must be of one kind.

    For targets, which cannot run it, all get the same program. `name`: of what is computed, for the record.
    """
    lead, *others = devices

    def lower(device: jax.Device) -> Any:
        place = SingleDeviceSharding(device)
        spec = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), args)
        with jax.default_device(device):  # for programs without arguments
            return _lower(fn, spec, donate)

    began = _clocks()
    lowered = lower(lead)
    program, blob = _compile_or_load(lowered, [lead])
    _record(name or getattr(fn, "__name__", ""), lowered, program, began)
    if target_of(lead) is not None:
        return [program] * len(devices)
    if blob is not None:
        try:
            return [program, *(_load(blob, lowered, [device]) for device in others)]
        except Exception as error:
            log.info("Sharing a compiled program between devices failed (%s); compiling it per device instead.", error)
    return [program, *(lower(device).compile() for device in others)]


def compile_over(
    fn: Callable, args: tuple, devices: Sequence[jax.Device], donate: tuple[int, ...] = (), name: str = ""
) -> Any:
    """Compile `fn` as one program over all `devices`, which hold `args` (arrays or their shapes)."""
    shardings = [str(getattr(x, "sharding", None)) for x in jax.tree.leaves(args)]
    began = _clocks()
    lowered = _lower(fn, args, donate)
    program, _ = _compile_or_load(lowered, devices, (*shardings, *(device.id for device in devices)))
    _record(name or getattr(fn, "__name__", ""), lowered, program, began)
    return program


@contextmanager
def recorded() -> Iterator[list[Compiled]]:
    """Collect the programs that this thread compiles inside the block, in their order."""
    before, _thread.record = getattr(_thread, "record", None), []
    try:
        yield _thread.record
    finally:
        _thread.record = before


def compiles() -> int:
    """Number of programs compiled in this process since the first call, except those inside `expected()`."""
    _listen()
    return _count


@contextmanager
def expected() -> Iterator[None]:
    """Do not count compiles of this thread inside the block: they belong to a warm-up, such as a ladder's rungs."""
    before = getattr(_thread, "expected", False)
    _thread.expected = True
    try:
        yield
    finally:
        _thread.expected = before


# -- compile or load --


def _clocks() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def _record(name: str, lowered: Any, program: Any, began: tuple[float, float]) -> None:
    """Add a program to this thread's record, if it keeps one."""
    if (record := getattr(_thread, "record", None)) is not None:
        donated = sum(info.donated for info in jax.tree.leaves(lowered.args_info))
        seconds, cpu_seconds = (now - then for now, then in zip(_clocks(), began, strict=True))
        record.append(Compiled(name, program, donated, seconds, cpu_seconds))


def _lower(fn: Callable, args: tuple, donate: tuple[int, ...]) -> Any:
    """Lower a fresh wrapper of `fn`: a hit in JAX's in-memory cache would hide where the program came from.

    Unused arguments are kept, so the program's text names all arguments of the function.
    """

    @functools.wraps(fn)
    def fresh(*args: Any) -> Any:
        return fn(*args)

    with quick_to_compile():
        return jax.jit(fresh, donate_argnums=donate, keep_unused=True).lower(*args)


def _compile_or_load(
    lowered: Any, devices: Sequence[jax.Device], layout: tuple[Any, ...] = ()
) -> tuple[Any, bytes | None]:
    """The program and its serialized form; None if it cannot be serialized.

    `layout`: what the program depends on besides the kind of its devices; empty if any device of the kind will do.
    """
    if target_of(devices[0]) is not None:  # it cannot be loaded here
        return lowered.compile(), None
    store, key = _store(os.environ.get(environment.PROGRAMS)), ""
    if store is not None:
        try:
            key = _key(lowered, devices[0], layout)
            if key and (blob := store.read(key)) is not None:
                return _load(blob, lowered, devices), blob
        except Exception as error:  # a private interface: anything may have changed
            log.info("A stored program could not be loaded (%s); compiling it again.", error)
    hits = _cache_hits()
    program = lowered.compile()
    if _cache_hits() > hits:  # it came from JAX's cache
        return program, None
    try:
        blob = _serialize(program)
    except Exception as error:
        log.info("A compiled program cannot be serialized (%s).", error)
        return program, None
    if store is not None and key:
        store.write(key, blob)
    return program, blob


def _serialize(program: Any) -> bytes:
    from jax.experimental import serialize_executable

    return serialize_executable.serialize(program)[0]


def _load(blob: bytes, lowered: Any, devices: Sequence[jax.Device]) -> Any:
    """Load a serialized program onto these devices; a single-device program loads onto any device of its kind."""
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


# -- keys of the store --


@functools.cache
def _store(path: str | None) -> ProgramStore | None:
    if not path:
        return None
    try:
        return ProgramStore(path)
    except (OSError, AttributeError) as error:  # AttributeError: this platform has no owners of directories
        log.warning("Compiled programs are not stored: %s", error)
        return None


def _key(lowered: Any, lead: jax.Device, layout: tuple[Any, ...]) -> str:
    """A digest of everything a compiled program depends on; empty if only this process can run it."""
    from jax._src.lib import xla_client

    text = lowered.as_text()
    if any(name in text for name in _HELD_BY_PROCESS):
        return ""
    options = xla_client.CompileOptions()
    options.executable_build_options.debug_options  # noqa: B018  fills in XLA's flags as it has parsed them
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
    """What XLA tunes a CPU program for: the instruction set and the number of cores this process may use."""
    return platform.machine(), _cpu(), processes.usable_cores()


@functools.cache
def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features", "CPU p"))}))


# -- counting, by JAX's monitoring events --


def _cache_hits() -> int:
    """Number of programs that this thread took from JAX's persistent cache since the first call."""
    _listen()
    return getattr(_thread, "hits", 0)


def _listen() -> None:
    global _listening
    with _lock:
        if not _listening:
            jax.monitoring.register_event_duration_secs_listener(_on_duration)
            jax.monitoring.register_event_listener(_on_event)
            _listening = True


def _on_duration(event: str, duration_secs: float, **_: str | int) -> None:
    global _count
    if event == _COMPILED and not getattr(_thread, "expected", False):
        with _lock:
            _count += 1


def _on_event(event: str, **_: str | int) -> None:
    if event == _CACHE_HIT:
        _thread.hits = getattr(_thread, "hits", 0) + 1
