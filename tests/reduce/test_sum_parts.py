"""Sums over workers: their dtype, and small parts summed by one all-to-all."""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from hetjax.devices.workers import AXIS, Workers
from hetjax.reduce import transports
from hetjax.reduce.layout import Layout


@pytest.mark.parametrize("count", [2, 3, 8])
@pytest.mark.parametrize("sizes", [(5,), (7, 1, 20)])
def test_all_workers_get_the_sum_in_worker_order(monkeypatch, count, sizes):
    monkeypatch.setattr(transports, "at_once", lambda nbytes, workers: True)
    workers, rng = Workers.of(jax.devices()[:count]), np.random.default_rng(0)
    parts = tuple(rng.normal(size=(count, size)).astype(np.float32) for size in sizes)
    program = jax.shard_map(
        lambda *parts: tuple(x[None] for x in transports.sum_parts(tuple(part[0] for part in parts), workers)),
        mesh=workers.mesh, in_specs=P(AXIS), out_specs=P(AXIS), check_vma=False,
    )  # fmt: skip
    for summed, part in zip(jax.jit(program)(*parts), parts, strict=True):
        for result in np.asarray(summed):
            np.testing.assert_array_equal(result, functools.reduce(np.add, part))


@pytest.mark.parametrize(
    ("platform", "several", "nbytes", "expected"),
    [
        ("cpu", True, 80_000, True),
        ("cpu", True, 2**19, False),
        ("cpu", False, 80_000, False),
        ("gpu", True, 80_000, False),
    ],
)
def test_only_small_vectors_between_cpu_processes_use_all_to_all(platform, several, nbytes, expected):
    class FakeWorkers(list):
        members, spanning = [SimpleNamespace(platform=platform)] * 4, () if several else None

    assert transports.at_once(nbytes, FakeWorkers(range(4))) is expected


@pytest.mark.parametrize(
    ("parameters", "sums"), [(jnp.bfloat16, jnp.float32), (jnp.float32, jnp.float32), (jnp.float64, jnp.float64)]
)
def test_sums_are_kept_in_float32_or_wider(parameters, sums, float64):
    grads = {"w": jax.ShapeDtypeStruct((3,), parameters)}
    assert Layout.of(grads, (), ()).dtype == sums
