"""A second PJRT client of the CPU: its arrays cannot enter programs of the first, as with a CPU beside a GPU."""

from __future__ import annotations

import jax


def second_client() -> list[jax.Device]:
    """Register the platform 'second' before JAX starts, and return its devices."""
    from jax._src import xla_bridge
    from jax._src.lib import xla_client

    xla_bridge.register_backend_factory(
        "second", lambda: xla_client.make_cpu_client(asynchronous=True), priority=-100, fail_quietly=False
    )
    return jax.devices("second")
