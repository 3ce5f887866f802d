"""Join several processes into one run, and leave it.

    info = initialize()                                             # launcher, srun, mpirun, Kubernetes, Cloud TPU
    info = initialize("host0:29500", processes=4, process=1)        # by hand, on every host

Call it before JAX's devices are first used. For a single process it does nothing. All processes meet through a carrier
(`hetjax.fleet.carrier`); then their sums travel either over it (`host`: any mix of devices, every process with its own
JAX backend) or by XLA's collectives (`mesh`: one backend over all processes, for devices of one kind).
"""

from __future__ import annotations

import logging
import math
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from hetjax import processes as group
from hetjax.devices.accelerators import expected_kinds
from hetjax.environment import BIND, HOLDERS, JOIN, KEY, PROCESSES, RENDEZVOUS, TRANSPORT
from hetjax.fleet.carrier import Carrier
from hetjax.fleet.elastic import ElasticCarrier
from hetjax.fleet.identity import BY_HAND, ProcessInfo, find_process
from hetjax.fleet.keys import NO_KEY, read_key
from hetjax.fleet.mesh import start_mesh
from hetjax.fleet.registration import Registration
from hetjax.fleet.rendezvous import (
    address_to_bind,
    check_free,
    free_port,
    is_loopback,
    join_address,
    split_address,
    wait_until_reachable,
)

log = logging.getLogger("hetjax")
TRANSPORTS = ("auto", "mesh", "host")
_SILENT = 5.0  # seconds of waiting before a message


def initialize(
    coordinator: str | None = None,
    processes: int | None = None,
    process: int | None = None,
    *,
    bind: str | None = None,
    transport: str | None = None,
    devices: str | int | None = None,
    key: str | Path | None = None,
    start_limit: float = 60.0,
    wait_limit: float = 600.0,
    heartbeat_limit: float = 20.0,
) -> ProcessInfo:
    """Join the other processes of the run, if any. Call once, before JAX's devices are used.

    Omitted arguments are taken from the variables that `python -m hetjax launch` sets (HETJAX_COORDINATOR,
    HETJAX_PROCESSES, HETJAX_PROCESS, HETJAX_BIND, HETJAX_TRANSPORT, HETJAX_DEVICES, HETJAX_KEY), else from Slurm, Open
    MPI, Kubernetes or Cloud TPU.

    Args:
        coordinator: HOST:PORT of process 0; the same in all processes.
        processes: Number of processes.
        process: Index of this process, from 0.
        bind: HOST:PORT that process 0 listens on. Default: the coordinator's address.
        transport: How sums travel between processes. 'host': by way of the hosts, for any mix of devices; each process
            has its own JAX backend, in which `jax.process_count()` is 1. 'mesh': by XLA's collectives, for accelerators
            of one kind. 'auto' (default): 'mesh' if all processes have accelerators of one and the same kind.
        devices: The devices that this process will use, as for `hetjax.devices`; decides what 'auto' means.
        key: File with the key of the fleet (`python -m hetjax key FILE`): connections of the carrier are authenticated
            and encrypted. Default: none, for trusted networks.
        start_limit: Seconds within which all processes must connect.
        wait_limit: Seconds to wait for a process in an exchange before the program ends.
        heartbeat_limit: Seconds after which a silent process counts as dead and all others end.

    Returns:
        Which process this is, and the transport.

    Raises:
        ValueError: Arguments are missing or invalid, or processes disagree.
        OSError: Process 0 cannot listen, or cannot be reached.
        RuntimeError: Called twice.
    """
    rendezvous = os.environ.get(RENDEZVOUS)
    if rendezvous and coordinator is None:
        return _join_fleet(rendezvous, transport or os.environ.get(TRANSPORT) or "auto", devices, key, start_limit,
                           wait_limit)  # fmt: skip
    info = find_process(coordinator, processes, process, os.environ)
    transport = transport or os.environ.get(TRANSPORT) or "auto"
    if info.processes == 1:
        _checked(transport, devices)
        return info
    if not 0 < start_limit < math.inf:
        raise ValueError(f"start_limit is {start_limit} s: give more than 0, such as 60.")
    if group.link() is not None:
        raise RuntimeError("initialize() was called twice: call it once, at the start of the program.")
    key = key or os.environ.get(KEY)
    secret = None if not key else read_key(key)
    assert info.coordinator is not None
    bind = bind or os.environ.get(BIND)
    if info.first and bind is not None:
        check_free(bind)
    elif info.first:
        bind = address_to_bind(info.coordinator)
    else:
        with _message_if_slow(f"for process 0 at {info.coordinator}, for at most {start_limit:g} s", info):
            wait_until_reachable(info.coordinator, start_limit)
    limits = {"start_limit": start_limit, "wait_limit": wait_limit, "heartbeat_limit": heartbeat_limit}
    waiting = f"at {info.coordinator} for all {info.processes} processes, for at most {start_limit:g} s"
    with _message_if_slow(waiting, info):
        carrier = Carrier(
            info.process,
            info.processes,
            coordinator=info.coordinator,
            bind=bind,
            key=secret,
            description=_description(transport, devices),
            **limits,
        )
    try:
        carrier.transport = chosen = chosen_transport(transport, [row["kinds"] for row in carrier.table])
    except ValueError:  # in all processes
        carrier.close(together=True)
        raise
    if info.first and secret is None and not is_loopback(split_address(info.coordinator)[0]):
        log.warning(NO_KEY)
    group.join(carrier)
    if chosen == "mesh":
        address = ""
        if info.first:
            assert bind is not None
            port = free_port(split_address(bind)[0])
            bind, address = (join_address(split_address(where)[0], port) for where in (bind, info.coordinator))
        address = group.broadcast_bytes(address.encode() if info.first else None).decode()
        start_mesh(info, address, bind or address, **limits)
    return replace(info, transport=chosen)


def _join_fleet(
    rendezvous: str, transport: str, devices: str | int | None, key: str | Path | None, start_limit: float,
    wait_limit: float,
) -> ProcessInfo:  # fmt: skip
    """Become a member of an elastic fleet; the members meet when the first step has been compiled."""
    if group.link() is not None:
        raise RuntimeError("initialize() was called twice: call it once, at the start of the program.")
    key, joins = key or os.environ.get(KEY), bool(os.environ.get(JOIN))
    secret, expected = None if not key else read_key(key), int(os.environ.get(PROCESSES) or 1)
    if transport == "mesh":
        raise ValueError("An elastic fleet needs the transport 'host': a mesh ends with any of its processes.")

    def register(place: dict[str, str], notify: Callable[[], None]) -> Registration:
        return Registration(rendezvous, description=_description("host", devices), key=secret,
                            start_limit=start_limit, joins=joins, notify=notify, **place)  # fmt: skip

    holders = int(os.environ.get(HOLDERS) or 2)
    carrier = ElasticCarrier(
        register, rendezvous, key=secret, expected=expected, holders=holders, joins=joins, wait_limit=wait_limit
    )
    try:
        if not joins:
            assert carrier.registration is not None
            carrier.registration.wait_newer(0, start_limit)  # all founders are there
    except BaseException:
        carrier.close(together=False)
        raise
    group.join(carrier)
    return ProcessInfo(carrier.number, expected, rendezvous, BY_HAND[1], "host")


def _checked(transport: str, devices: str | int | None) -> list[str]:
    """The kinds of device that this process will use, after a check of both arguments."""
    if transport not in TRANSPORTS:
        raise ValueError(f"Unknown transport {transport!r}: use 'auto', 'mesh' or 'host'.")
    return expected_kinds(devices)


def _description(transport: str, devices: str | int | None) -> dict[str, Any]:
    """What process 0 learns of this process; a mistake is part of it, so that all processes end with its sentence."""
    try:
        return {"kinds": _checked(transport, devices), "alike": {"transport": transport}}
    except (ValueError, TypeError) as error:
        return {"problem": str(error)}


def chosen_transport(transport: str, kinds_P: Sequence[Sequence[str]]) -> str:
    """How sums travel between processes with devices of these kinds."""
    kinds = sorted({kind for kinds in kinds_P for kind in kinds})
    if transport == "auto":
        return "mesh" if len(kinds) == 1 and kinds != ["cpu"] else "host"
    if transport == "mesh" and len(kinds) > 1:
        raise ValueError(
            f"The transport 'mesh' needs devices of one kind, but the processes have {', '.join(kinds)}: XLA cannot "
            "compile one program for several kinds. Use transport 'host' (or 'auto')."
        )
    return transport


def leave(code: int, together: bool) -> NoReturn:
    """Exit this process.

    Args:
        code: Exit code.
        together: All processes end now, so wait for the others, up to the wait limit. Otherwise exit at once: after an
            error, other processes may be blocked in an exchange with this one.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    carrier = group.link()
    if carrier is None:
        sys.exit(code)
    carrier.close(together)
    if together and carrier.transport == "mesh":
        sys.exit(code)  # JAX shuts down when Python exits
    os._exit(code)


@contextmanager
def _message_if_slow(what: str, info: ProcessInfo) -> Iterator[None]:
    """Print once what the body waits for, if it takes long."""
    message = f"Process {info.process} waits {what}."
    timer = threading.Timer(_SILENT, print, (message,), {"file": sys.stderr, "flush": True})
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
