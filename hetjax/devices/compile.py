"""Compile a program once per kind of device, once for all processes and restarts, and count what was compiled.

Counts the programs XLA compiles, so that "no recompile" is a measured fact, and sees what came from a cache.

A directory of compiled programs, shared by all processes that are given it.

An entry holds machine code and pickled objects: whoever can write one can run anything here. So a directory is used
only if nobody but its user could have written to it, which is checked on an open descriptor; entries are opened
relative to that descriptor, never by path, so the directory cannot be exchanged after the check. An entry carries a
digest of its key and content: what is torn, garbled or renamed is not loaded.

Compile a program once per KIND of device, and once for all processes and restarts of a run.

jit compiles once per device: eight fake CPU devices pay eight times. A compiled program can be serialized and loaded
for another device of the same kind in milliseconds, in this process or, by way of a `ProgramStore`, in any other. JAX's
public loader only knows the devices the program was compiled for, so this file uses its private unpickler; nothing else
does, and where it fails each device compiles for itself.

JAX's own persistent cache does not do this: only process 0 writes to it, and on a CPU an entry is for one device. It
can be used beside this one. A program that came out of it cannot be serialized again, so it is neither shared nor
stored. The bytes that are stored and loaded are always those of the process that compiled.
"""

from __future__ import annotations

import functools
import hashlib
import io
import logging
import os
import platform
import stat
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import jax
import jaxlib
import numpy as np
from jax.sharding import SingleDeviceSharding

from hetjax import environment

_COMPILED = "/jax/core/compile/backend_compile_duration"
_CACHE_HIT = "/jax/compilation_cache/cache_hits"
_mine = threading.local()  # .expected: compiles of this thread are part of a warm-up; .hits: its hits in the cache
_count = 0
_listening = False
_lock = threading.Lock()


def _on_duration(event: str, duration_secs: float, **_: str | int) -> None:
    global _count
    if event == _COMPILED and not getattr(_mine, "expected", False):
        with _lock:
            _count += 1


def _on_event(event: str, **_: str | int) -> None:
    if event == _CACHE_HIT:
        _mine.hits = getattr(_mine, "hits", 0) + 1


def _listen() -> None:
    global _listening
    with _lock:
        if not _listening:
            jax.monitoring.register_event_duration_secs_listener(_on_duration)
            jax.monitoring.register_event_listener(_on_event)
            _listening = True


def compiles() -> int:
    """Programs compiled in this process since the first call; those inside `expected()` do not count."""
    _listen()
    return _count


def cache_hits() -> int:
    """Programs that this thread took from JAX's persistent compilation cache since the first call."""
    _listen()
    return getattr(_mine, "hits", 0)


@contextmanager
def expected() -> Iterator[None]:
    """Compiles of this thread inside the block are part of the warm-up: a ladder's rungs."""
    before = getattr(_mine, "expected", False)
    _mine.expected = True
    try:
        yield
    finally:
        _mine.expected = before


_DIGEST = hashlib.sha256().digest_size


class ProgramStore:
    """Entries by key. Any number of processes may read and write at once.

    Args:
        path: the directory; created for this user alone if there is none.

    Raises:
        OSError: the directory cannot be made or opened.
        PermissionError: somebody else could have written to it.
    """

    def __init__(self, path: str | os.PathLike[str]):
        Path(path).mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        if not _private(os.fstat(self._folder)):
            os.close(self._folder)
            raise PermissionError(
                f"The directory {path} of compiled programs belongs to another user or can be written by others, who "
                "could have this process run anything. Use one of your own with mode 700."
            )

    def read(self, key: str) -> bytes | None:
        """The content stored under this key; None if there is none, or it is damaged."""
        try:
            with open(os.open(key, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._folder), "rb") as file:
                if not _private(os.fstat(file.fileno())):
                    return None
                entry = file.read()
        except OSError:
            return None
        digest, content = entry[:_DIGEST], entry[_DIGEST:]
        return content if digest == _digest(key, content) else None

    def write(self, key: str, content: bytes) -> None:
        """Store under this key: as a whole, or not at all where that fails."""
        part = f".{key}.{os.getpid()}.{threading.get_ident()}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            with open(os.open(part, flags, 0o600, dir_fd=self._folder), "wb") as file:
                file.write(_digest(key, content) + content)
            os.replace(part, key, src_dir_fd=self._folder, dst_dir_fd=self._folder)
        except OSError:  # a full disk, or the directory is gone: the next process compiles again
            with suppress(OSError):
                os.unlink(part, dir_fd=self._folder)


def _private(status: os.stat_result) -> bool:
    """Whether only this user could have written this."""
    return status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _digest(key: str, content: bytes) -> bytes:
    return hashlib.sha256(key.encode() + content).digest()


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
        log.info("A compiled program cannot be serialized (%s).", error)
        return program, None
    if store is not None and key:
        store.write(key, blob)
    return program, blob


def _serialize(program: Any) -> bytes:
    from jax.experimental import serialize_executable

    return serialize_executable.serialize(program)[0]


def _load(blob: bytes, lowered: Any, devices: Sequence[jax.Device]) -> Any:
    """A serialized program on these devices; one for a single device goes to whichever is given."""
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
