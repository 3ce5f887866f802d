"""Which process of how many this is: by arguments, by the launcher's variables, or by the cluster it runs in."""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hetjax.environment import COORDINATOR, PROCESS, PROCESSES
from hetjax.fleet.rendezvous import split_address

BY_HAND = ("its arguments", "the launcher")


@dataclass(frozen=True)
class ProcessInfo:
    """Index of this process, number of processes, and where both came from."""

    process: int = 0
    processes: int = 1
    coordinator: str | None = None
    source: str = "a single process"
    transport: str = "mesh"  # how sums travel between processes: 'mesh' or 'host'

    @property
    def first(self) -> bool:
        """Whether this is process 0, which prints and writes files."""
        return self.process == 0


def find_process(
    coordinator: str | None, processes: int | None, process: int | None, environment: Mapping[str, str]
) -> ProcessInfo:
    """Identify this process by arguments, else by the launcher's variables, else by the cluster."""
    source = BY_HAND[1] if coordinator is None and processes is None and process is None else BY_HAND[0]
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
            coordinator = _coordinator_of(cluster, environment.get("JAX_COORDINATOR_PORT"))
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


def _coordinator_of(cluster: Any, port: str | None) -> str:
    """HOST:PORT of process 0; JAX 0.7 has no argument for the port."""
    if "override_coordinator_port" in inspect.signature(cluster.get_coordinator_address).parameters:
        return cluster.get_coordinator_address(60, override_coordinator_port=port)
    address = cluster.get_coordinator_address(60)
    return address if port is None else f"{address.rpartition(':')[0]}:{port}"


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
    def get_coordinator_address(timeout: int) -> str:
        raise ValueError(
            "This version of Open MPI does not provide the address of process 0: pass it to all processes, "
            "`mpirun -x HETJAX_COORDINATOR=HOST:PORT ...` or --coordinator HOST:PORT."
        )


def _whole(environment: Mapping[str, str], name: str) -> int | None:
    value = environment.get(name)
    if value is None or value == "":
        return None
    try:
        return int(value)
    except ValueError:
        raise ValueError(f"The variable {name} is {value!r}: expected a whole number.") from None
