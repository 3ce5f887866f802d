"""Join several processes into one run, and leave it, on top of `jax.distributed`.

    info = initialize()                                             # launcher, srun, mpirun, Kubernetes, Cloud TPU
    info = initialize("host0:29500", processes=4, process=1)        # by hand, on every host

Call it before JAX's devices are first used. For a single process it does nothing. Mistakes in the setup are reported
within seconds, where `jax.distributed` would wait for minutes or abort.
"""

from __future__ import annotations

import math
import os
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import jax

from hetjax.environment import BIND, COORDINATOR, PROCESS, PROCESSES
from hetjax.fleet.rendezvous import (
    address_to_bind,
    check_free,
    own_address_towards,
    split_address,
    wait_until_reachable,
)

_BY_HAND = ("its arguments", "the launcher")
_COUNTS = "hetjax/processes"  # key prefix and barrier in the key-value store of jax.distributed
_SILENT = 5.0  # seconds of waiting before a message


@dataclass(frozen=True)
class ProcessInfo:
    """Index of this process, number of processes, and where both came from."""

    process: int = 0
    processes: int = 1
    coordinator: str | None = None
    source: str = "a single process"

    @property
    def first(self) -> bool:
        """Whether this is process 0, which prints and writes files."""
        return self.process == 0


def initialize(
    coordinator: str | None = None,
    processes: int | None = None,
    process: int | None = None,
    *,
    bind: str | None = None,
    start_limit: float = 60.0,
    wait_limit: float = 600.0,
    heartbeat_limit: float = 20.0,
) -> ProcessInfo:
    """Join the other processes of the run, if any. Call once, before JAX's devices are used.

    Omitted arguments are taken from the variables that `python -m hetjax launch` sets (HETJAX_COORDINATOR,
    HETJAX_PROCESSES, HETJAX_PROCESS, HETJAX_BIND), else from Slurm, Open MPI, Kubernetes or Cloud TPU.

    Args:
        coordinator: HOST:PORT of process 0; the same in all processes.
        processes: Number of processes.
        process: Index of this process, from 0.
        bind: HOST:PORT that process 0 listens on. Default: the coordinator's address.
        start_limit: Seconds within which all processes must connect.
        wait_limit: Seconds that a collective may wait for a process before the program ends.
        heartbeat_limit: Seconds after which a silent process counts as dead and all others end.

    Returns:
        Which process this is.

    Raises:
        ValueError: Arguments are missing or invalid, or processes disagree about their number.
        OSError: Process 0 cannot listen, or cannot be reached.
        RuntimeError: Called twice.
    """
    info = find_process(coordinator, processes, process, os.environ)
    if info.processes == 1:
        return info
    if not 0 < start_limit < math.inf:
        raise ValueError(f"start_limit is {start_limit} s: give more than 0, such as 60.")
    if jax.distributed.is_initialized():
        raise RuntimeError("initialize() was called twice: call it once, at the start of the program.")
    _limit_collectives(wait_limit)
    assert info.coordinator is not None
    bind = bind or os.environ.get(BIND)
    if info.first and bind is not None:
        check_free(bind)
    elif info.first:
        bind = address_to_bind(info.coordinator)
    else:
        with _message_if_slow(f"for process 0 at {info.coordinator}, for at most {start_limit:g} s", info):
            wait_until_reachable(info.coordinator, start_limit)
    _gloo_on(own_address_towards(info.coordinator))
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    waiting = f"at {info.coordinator} for all {info.processes} processes, for at most {start_limit:g} s"
    with _message_if_slow(waiting, info), _exit_after(info, start_limit):
        jax.distributed.initialize(
            info.coordinator,
            info.processes,
            info.process,
            initialization_timeout=int(start_limit) + 60,  # JAX aborts then; ours comes first, with a message
            cluster_detection_method="deactivate" if info.source in _BY_HAND else None,  # else: one GPU per process
            coordinator_bind_address=bind,
            heartbeat_timeout_seconds=max(1, int(heartbeat_limit)),
            shutdown_timeout_seconds=max(1, int(wait_limit)),
        )
        _agree_on_number(info, start_limit)
    return info


def find_process(
    coordinator: str | None, processes: int | None, process: int | None, environment: Mapping[str, str]
) -> ProcessInfo:
    """Identify this process by arguments, else by the launcher's variables, else by the cluster."""
    source = _BY_HAND[1] if coordinator is None and processes is None and process is None else _BY_HAND[0]
    coordinator = environment.get(COORDINATOR) if coordinator is None else coordinator
    processes = _whole(environment, PROCESSES) if processes is None else processes
    process = _whole(environment, PROCESS) if process is None else process
    if processes == 1:
        return ProcessInfo()
    if None in (coordinator, processes, process) and (cluster := detected_cluster(environment)) is not None:
        source = cluster.name or cluster.__name__
        processes = cluster.get_process_count() if processes is None else processes
        if processes == 1:
            return ProcessInfo()
        process = cluster.get_process_id() if process is None else process
        if coordinator is None:
            coordinator = cluster.get_coordinator_address(60, environment.get("JAX_COORDINATOR_PORT"))
    if coordinator is None and processes is None and process is None:
        return ProcessInfo()
    missing = [
        name
        for name, value in (("coordinator", coordinator), ("processes", processes), ("process", process))
        if value is None
    ]
    if coordinator is None or processes is None or process is None:
        raise ValueError(
            "Several processes need a coordinator (HOST:PORT), the number of processes and the index of this process; "
            f"{' and '.join(missing)} was not given, and no cluster was detected that provides it."
        )
    if processes < 1:
        raise ValueError(f"The number of processes is {processes}: expected at least 1.")
    if not 0 <= process < processes:
        raise ValueError(f"Process {process} of {processes}: processes are numbered from 0 to {processes - 1}.")
    split_address(coordinator)
    return ProcessInfo(process, processes, coordinator, source)


def detected_cluster(environment: Mapping[str, str]) -> Any:
    """JAX's class for the cluster that this process runs in; None outside of a cluster.

    A Kubernetes pod counts only if it belongs to an indexed job; others may be notebooks. Without the package that JAX
    uses to query Kubernetes, every pod would train alone, so that is an error.
    """
    from jax._src.clusters import ClusterEnv

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # JAX hints in every pod to install a package for Kubernetes
        for cluster in ClusterEnv._cluster_types:
            if cluster.__name__ == "K8sCluster" and "JOB_COMPLETION_INDEX" not in environment:
                continue
            if not cluster.opt_in_only_method and cluster.is_env_present():
                return cluster
    if "OMPI_COMM_WORLD_SIZE" in environment:
        return _OpenMpi5
    if "KUBERNETES_SERVICE_HOST" in environment and "JOB_COMPLETION_INDEX" in environment:
        raise ValueError(
            f"This is pod {environment['JOB_COMPLETION_INDEX']} of an indexed job of Kubernetes, but the package "
            "to find the other pods is missing: pip install 'jax[k8s]'. Or give coordinator, number of processes and "
            "index of this process; with 1 process every pod trains alone."
        )
    return None


class _OpenMpi5:
    """Open MPI 5 and later, which JAX does not detect: it does not provide the address of process 0."""

    name = "ompi"

    @staticmethod
    def get_process_count() -> int:
        return int(os.environ["OMPI_COMM_WORLD_SIZE"])

    @staticmethod
    def get_process_id() -> int:
        return int(os.environ["OMPI_COMM_WORLD_RANK"])

    @staticmethod
    def get_coordinator_address(timeout: int, port: str | None) -> str:
        raise ValueError(
            "This version of Open MPI does not provide the address of process 0: pass it to all processes, "
            "`mpirun -x HETJAX_COORDINATOR=HOST:PORT ...` or --coordinator HOST:PORT."
        )


def leave(code: int, together: bool) -> NoReturn:
    """Exit this process.

    Args:
        code: Exit code.
        together: All processes end now, so wait for the others, up to the wait limit. Otherwise exit at once: after an
            error, other processes may be blocked in a collective with this one, and JAX's shutdown would wait for them.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    if together or not jax.distributed.is_initialized():
        sys.exit(code)  # JAX shuts down when Python exits
    os._exit(code)


def coordination_client() -> Any:
    """The client of `jax.distributed`: key-value store and barriers, for which JAX has no public name."""
    from jax._src.distributed import global_state

    return global_state.client


def _whole(environment: Mapping[str, str], name: str) -> int | None:
    value = environment.get(name)
    if value is None or value == "":
        return None
    try:
        return int(value)
    except ValueError:
        raise ValueError(f"The variable {name} is {value!r}: expected a whole number.") from None


def _limit_collectives(seconds: float) -> None:
    """Set XLA's timeouts of CPU collectives unless XLA_FLAGS sets them."""
    flags, limit = os.environ.get("XLA_FLAGS", ""), max(1, int(seconds))
    for name, value in (
        ("xla_cpu_collective_timeout_seconds", limit),
        ("xla_cpu_collective_call_terminate_timeout_seconds", limit),
        ("xla_cpu_collective_call_warn_stuck_timeout_seconds", max(1, limit // 2)),
    ):
        if name not in flags:
            flags = f"{flags} --{name}={value}".strip()
    os.environ["XLA_FLAGS"] = flags


def _gloo_on(host: str) -> None:
    """Let gloo, which runs the CPU collectives, listen on the address that leads to the coordinator.

    By default gloo uses what the host name resolves to: on some hosts that is 127.0.1.1, which other hosts cannot
    reach; on others a public address, which would expose a run on loopback.
    """
    from jax._src import xla_bridge
    from jax._src.lib import _jax
    from jax.extend.backend import register_backend_factory

    def make() -> Any:
        client = coordination_client()
        return xla_bridge.make_cpu_client(_jax.make_gloo_tcp_collectives(distributed_client=client, hostname=host))

    register_backend_factory("cpu", make, priority=0, fail_quietly=False)


def _agree_on_number(info: ProcessInfo, limit: float) -> None:
    """Compare the number of processes with process 0: JAX would wait for processes that do not exist."""
    client = coordination_client()
    client.key_value_set(f"{_COUNTS}/{info.process}", str(info.processes))
    others = range(1, info.processes) if info.first else (0,)
    counts = {i: int(client.blocking_key_value_get(f"{_COUNTS}/{i}", int(limit * 1000))) for i in others}
    client.wait_at_barrier(_COUNTS, int(limit * 1000))  # all have read the counts
    for other, number in counts.items():
        if number != info.processes:
            if info.first:
                time.sleep(1.0)  # its exit aborts the others, which have a message to print as well
            raise ValueError(
                f"Process {info.process} expects {info.processes} processes, process {other} expects {number}. Start "
                "all with the same number."
            )


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


class _exit_after:
    """Exit with a message if the body exceeds the limit: connecting in JAX cannot be interrupted."""

    def __init__(self, info: ProcessInfo, limit: float):
        self.info, self.limit = info, limit
        self.timer = threading.Timer(limit, self._end)
        self.timer.daemon = True

    def _end(self) -> None:
        print(
            f"error: Not all {self.info.processes} processes connected to {self.info.coordinator} within "
            f"{self.limit:.0f} s; this is process {self.info.process}. Check that all were started, with the same "
            "number of processes and different indices.",
            file=sys.stderr,
            flush=True,
        )
        os._exit(2)

    def __enter__(self) -> None:
        self.timer.start()

    def __exit__(self, *_: object) -> None:
        self.timer.cancel()
