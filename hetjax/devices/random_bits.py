"""The random bits of a program, kept apart from what uses them: compilers are quick then, and the bits the same.

JAX's default generator, threefry, has 20 rounds. For accelerators JAX unrolls them, and XLA fuses them into every use
of the bits, forward and backward: a transformer of one layer took 151 CPU seconds to compile for a v5e with dropout,
and 38 without. On TPU a barrier behind the generator makes XLA compute the bits once and store them. On CUDA JAX has a
kernel for them, which is off by default because stored bits take memory. On CPU JAX uses loops.

The lowerings are registered once and apply only while hetjax lowers a program. They take private names of JAX, which no
other file does for this purpose; where they are missing, programs are lowered as JAX does.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import jax

log = logging.getLogger("hetjax")
_thread = threading.local()  # .active: hetjax is lowering a program


@contextmanager
def quick_to_compile() -> Iterator[None]:
    """Keep the random bits apart in programs that are lowered for TPU or CUDA inside the block."""
    _register()
    before, _thread.active = getattr(_thread, "active", False), True
    try:
        yield
    finally:
        _thread.active = before


@functools.cache
def _register() -> None:
    try:
        from jax._src import config
        from jax._src.interpreters import mlir

        try:
            jax_threefry = import_module("jax._src.random.threefry2x32")
        except ImportError:  # older versions of JAX
            jax_threefry = import_module("jax._src.prng")
        unrolled = functools.partial(jax_threefry._threefry2x32_lowering, use_rolled_loops=False)
        apart = mlir.lower_fun(lambda *args: jax.lax.optimization_barrier(unrolled(*args)), multiple_results=True)
        on_cuda = functools.partial(jax_threefry._threefry2x32_gpu_lowering_rule, target_name_prefix="cu")

        def by_kernel(*args: Any) -> Any:
            with config.threefry_gpu_kernel_lowering(True):
                return on_cuda(*args)

        def register(platform: str, ours: Callable, of_jax: Callable) -> None:
            rule = lambda *args: (ours if getattr(_thread, "active", False) else of_jax)(*args)
            mlir.register_lowering(jax_threefry.threefry2x32_p, rule, platform=platform, inline=False)

        register("tpu", apart, jax_threefry._threefry2x32_lowering_rule)
        register("cuda", by_kernel, on_cuda)
    except Exception as error:  # a private interface: anything may have changed
        log.info("Random bits are lowered as JAX does (%s).", error)
