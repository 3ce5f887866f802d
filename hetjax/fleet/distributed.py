"""Several processes as one run: where to meet, who is who, and how to leave; all of it by `jax.distributed`.

    here = initialize()                                             # launcher, srun, mpirun, Kubernetes, Cloud TPU
    here = initialize("host0:29500", processes=4, process=1)        # by hand, on every host

Comes before the first use of JAX's devices. A single process needs nothing and gets nothing. What can go wrong while
processes find each other is said in a sentence within seconds, where JAX itself would wait for minutes or abort.
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
_ROLL = "hetjax/processes"
_SILENT = 5.0  # seconds of waiting about which nothing is said


@dataclass(frozen=True)
class ProcessInfo:
    """Which process this is, of how many, and how that was found out."""

    process: int = 0
    processes: int = 1
    coordinator: str | None = None
    source: str = "a single process"

    @property
    def first(self) -> bool:
        """Whether this is the process that talks and writes."""
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
    """Join the other processes, if there are any; called once, before JAX's devices are used.

    coordinator      HOST:PORT where process 0 is met; all processes give the same
    processes        how many there are; process: which one this is, from 0
    bind             HOST:PORT that process 0 listens on (default: the coordinator's address)
    start_limit      seconds until all have to be there
    wait_limit       seconds that a collective may wait for a process; then the program ends
    heartbeat_limit  seconds after which a silent process counts as dead and all others end

    What is left out comes from the variables that `python -m hetjax launch` sets (HETJAX_COORDINATOR,
    HETJAX_PROCESSES, HETJAX_PROCESS, HETJAX_BIND), else from Slurm, Open MPI, Kubernetes or Cloud TPU.
    """
    place = find_place(coordinator, processes, process, os.environ)
    if place.processes == 1:
        return place
    if not 0 < start_limit < math.inf:
        raise ValueError(f"The limit on the start is {start_limit} s: give more than 0, such as 60.")
    if jax.distributed.is_initialized():
        raise RuntimeError("initialize() was called before: once is enough, at the start of the program.")
    _limit_collectives(wait_limit)
    assert place.coordinator is not None
    bind = bind or os.environ.get(BIND)
    if place.first and bind is not None:
        check_free(bind)
    elif place.first:
        bind = address_to_bind(place.coordinator)
    else:
        with _said_when_slow(f"for process 0 at {place.coordinator}, for at most {start_limit:g} s", place):
            wait_until_reachable(place.coordinator, start_limit)
    _gloo_on(own_address_towards(place.coordinator))
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    told = f"at {place.coordinator} until all {place.processes} are there, for at most {start_limit:g} s"
    with _said_when_slow(told, place), _impatience(place, start_limit):
        jax.distributed.initialize(
            place.coordinator,
            place.processes,
            place.process,
            initialization_timeout=int(start_limit) + 60,  # JAX aborts then; ours comes first, with a sentence
            cluster_detection_method="deactivate" if place.source in _BY_HAND else None,  # else: a GPU for each process
            coordinator_bind_address=bind,
            heartbeat_timeout_seconds=max(1, int(heartbeat_limit)),
            shutdown_timeout_seconds=max(1, int(wait_limit)),
        )
        _agree_on_number(place, start_limit)
    return place


def find_place(
    coordinator: str | None, processes: int | None, process: int | None, environment: Mapping[str, str]
) -> ProcessInfo:
    """Who this process is, by arguments, then by the launcher's variables, then by the cluster it runs in."""
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
            f"To join several processes, their coordinator (HOST:PORT), the number of processes and which one this is "
            f"are needed; {' and '.join(missing)} was not given and no cluster was found that says it."
        )
    if processes < 1:
        raise ValueError(f"The number of processes is {processes}: give at least 1.")
    if not 0 <= process < processes:
        raise ValueError(f"Process {process} of {processes}: processes are numbered from 0 to {processes - 1}.")
    split_address(coordinator)
    return ProcessInfo(process, processes, coordinator, source)


def detected_cluster(environment: Mapping[str, str]) -> Any:
    """The class by which JAX knows the cluster that this process runs in; None outside of one.

    A pod of Kubernetes is one only if it belongs to an indexed job; elsewhere it may be a notebook. Without the package
    by which JAX asks Kubernetes about the job, every pod would train alone.
    """
    from jax._src.clusters import ClusterEnv

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the hint to install a package for Kubernetes, in any pod
        for cluster in ClusterEnv._cluster_types:
            if cluster.__name__ == "K8sCluster" and "JOB_COMPLETION_INDEX" not in environment:
                continue
            if not cluster.opt_in_only_method and cluster.is_env_present():
                return cluster
    if "OMPI_COMM_WORLD_SIZE" in environment:
        return _OpenMpi5
    if "KUBERNETES_SERVICE_HOST" in environment and "JOB_COMPLETION_INDEX" in environment:
        raise ValueError(
            f"This is pod {environment['JOB_COMPLETION_INDEX']} of an indexed job of Kubernetes, and the package is "
            "missing by which it finds the others: pip install 'jax[k8s]'. Or say who is who (coordinator, number of "
            "processes, which one this is); with 1 process every pod trains on its own."
        )
    return None


class _OpenMpi5:
    """Open MPI from version 5 on, which JAX does not detect: it does not say where the first process is."""

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
            "This version of Open MPI does not say where process 0 runs: pass its address to all processes, "
            "`mpirun -x HETJAX_COORDINATOR=HOST:PORT ...` or --coordinator HOST:PORT."
        )


def leave(code: int, together: bool) -> NoReturn:
    """End this process with an exit code.

    `together`: the end was agreed on, so wait for the others, at most as long as the wait limit and not at all for
    dead ones. Otherwise end at once: after an error the others may sit in a collective that waits for this process,
    and threads or JAX's own goodbye would wait for them.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    if together or not jax.distributed.is_initialized():
        sys.exit(code)  # JAX says goodbye when Python ends
    os._exit(code)


def _whole(environment: Mapping[str, str], name: str) -> int | None:
    value = environment.get(name)
    if value is None or value == "":
        return None
    try:
        return int(value)
    except ValueError:
        raise ValueError(f"The variable {name} is {value!r}: expected a whole number.") from None


def _limit_collectives(seconds: float) -> None:
    """XLA's limits on waiting inside a CPU collective, unless XLA_FLAGS say otherwise already."""
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
    """Let the CPU's collectives listen on the address that leads to the coordinator.

    By itself gloo takes what the host's name resolves to: on some hosts that is 127.0.1.1, which the others cannot
    reach, on others it is a public address, where nobody should be let in to a run on loopback.
    """
    from jax._src import distributed, xla_bridge
    from jax._src.lib import _jax
    from jax.extend.backend import register_backend_factory

    def make() -> Any:
        client = distributed.global_state.client
        return xla_bridge.make_cpu_client(_jax.make_gloo_tcp_collectives(distributed_client=client, hostname=host))

    register_backend_factory("cpu", make, priority=0, fail_quietly=False)


def _agree_on_number(place: ProcessInfo, limit: float) -> None:
    """All compare with process 0 how many they think there are: JAX would wait for those that nobody started."""
    from jax._src.distributed import global_state

    client: Any = global_state.client
    client.key_value_set(f"{_ROLL}/{place.process}", str(place.processes))
    others = range(1, place.processes) if place.first else (0,)
    told = {i: int(client.blocking_key_value_get(f"{_ROLL}/{i}", int(limit * 1000))) for i in others}
    client.wait_at_barrier(_ROLL, int(limit * 1000))  # all have read
    for other, number in told.items():
        if number != place.processes:
            if place.first:
                time.sleep(1.0)  # its end aborts the others, who have something to say as well
            raise ValueError(
                f"Process {place.process} was told that there are {place.processes} processes, process {other} that "
                f"there are {number}. Start all with the same number."
            )


@contextmanager
def _said_when_slow(what: str, place: ProcessInfo) -> Iterator[None]:
    """Tells once for what the body waits, if it waits for long."""
    told = f"Process {place.process} waits {what}."
    timer = threading.Timer(_SILENT, print, (told,), {"file": sys.stderr, "flush": True})
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


class _impatience:
    """Ends the program with a sentence if the body takes longer than the limit: JAX's connect cannot be interrupted."""

    def __init__(self, place: ProcessInfo, limit: float):
        self.place, self.limit = place, limit
        self.timer = threading.Timer(limit, self._end)
        self.timer.daemon = True

    def _end(self) -> None:
        print(
            f"error: Not all {self.place.processes} processes came to {self.place.coordinator} within "
            f"{self.limit:.0f} s; this is process {self.place.process}. Check that every one was started, with the "
            "same number of processes and a number of its own.",
            file=sys.stderr,
            flush=True,
        )
        os._exit(2)

    def __enter__(self) -> None:
        self.timer.start()

    def __exit__(self, *_: object) -> None:
        self.timer.cancel()
