"""Random bits for TPU and CUDA: apart from their use in programs that hetjax lowers, with the same result."""

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

from hetjax.devices.random_bits import quick_to_compile

BARRIER, KERNEL = "stablehlo.optimization_barrier", "cu_threefry2x32_ffi"


def masks(seeds):
    return jax.vmap(lambda seed: jax.random.bernoulli(jax.random.key(seed), 0.9, (4, 4)))(seeds)


def lowered(platform):
    return jax.jit(lambda seeds: masks(seeds)).trace(jnp.arange(3)).lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.parametrize(("platform", "sign"), [("tpu", BARRIER), ("cuda", KERNEL)])
def test_random_bits_are_apart_on_accelerators_only_inside_the_block(platform, sign):
    before = [lowered(platform), lowered("cpu")]
    with quick_to_compile():
        inside, on_cpu = lowered(platform), lowered("cpu")
    assert sign in inside
    assert sign not in before[0]
    assert [lowered(platform), on_cpu] == before


def test_the_lowering_for_tpu_computes_the_bits_of_jax():
    """The program for TPU has only portable operations, so it runs on a CPU as well."""
    anywhere = [jax.export.DisabledSafetyCheck.platform()]
    with quick_to_compile():
        exported = jax.export.export(jax.jit(lambda seeds: masks(seeds)), platforms=("tpu",), disabled_checks=anywhere)
        for_tpu = exported(jax.ShapeDtypeStruct((3,), np.int32))
    assert BARRIER in for_tpu.mlir_module()
    np.testing.assert_array_equal(for_tpu.call(jnp.arange(3)), masks(jnp.arange(3)))
