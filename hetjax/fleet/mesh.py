"""One JAX backend over all processes: `jax.distributed`, for fleets whose devices are all of one kind.

Their sums are XLA's own collectives (NCCL, TPU interconnect, gloo between CPUs). The private names of JAX that this
needs stand in this file only.
"""

from __future__ import annotations

import inspect
import os
import sys
import threading
from typing import Any

import jax

from hetjax.fleet.identity import BY_HAND, ProcessInfo
from hetjax.fleet.rendezvous import own_address_towards

_WITH_TIMEOUTS = (0, 8, 2)  # the first jaxlib that is known to have flags for the timeouts of CPU collectives


def start_mesh(
    info: ProcessInfo, coordinator: str, bind: str, *, start_limit: float, wait_limit: float, heartbeat_limit: float
) -> None:
    """Start `jax.distributed`; mistakes in the setup were found before, when the processes met.

    Args:
        info: Which process this is.
        coordinator: HOST:PORT at which the others reach process 0.
        bind: HOST:PORT that process 0 listens on.
        start_limit: Seconds within which all processes must connect.
        wait_limit: Seconds that a collective may wait for a process before the program ends.
        heartbeat_limit: Seconds after which a silent process counts as dead and all others end.
    """
    _limit_collectives(wait_limit)
    _gloo_on(own_address_towards(coordinator))
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    with _exit_after(info, start_limit):
        jax.distributed.initialize(
            coordinator,
            info.processes,
            info.process,
            initialization_timeout=int(start_limit) + 60,  # JAX aborts then; ours comes first, with a message
            cluster_detection_method="deactivate" if info.source in BY_HAND else None,  # else: one GPU per process
            coordinator_bind_address=bind,
            heartbeat_timeout_seconds=max(1, int(heartbeat_limit)),
            **_shutdown_limit(wait_limit),
        )


def _shutdown_limit(seconds: float) -> dict[str, int]:
    """The limit on waiting for the others at the end, which JAX 0.7 does not let one set."""
    name = "shutdown_timeout_seconds"
    known = name in inspect.signature(jax.distributed.initialize).parameters
    return {name: max(1, int(seconds))} if known else {}


def _limit_collectives(seconds: float) -> None:
    """Set XLA's timeouts of CPU collectives unless XLA_FLAGS sets them; older versions have none and end at a flag."""
    from jax._src.lib import version

    if version < _WITH_TIMEOUTS:
        return
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
        from jax._src.distributed import global_state

        client = global_state.client
        return xla_bridge.make_cpu_client(_jax.make_gloo_tcp_collectives(distributed_client=client, hostname=host))

    register_backend_factory("cpu", make, priority=0, fail_quietly=False)


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
