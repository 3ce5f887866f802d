"""The random bits of a program, kept apart from what uses them: a TPU's compiler is quick then, and the bits the same.

JAX's default generator, threefry, has 20 rounds. On TPU JAX unrolls them, and XLA fuses them into every use of the
bits, forward and backward: a transformer of one layer took 151 CPU seconds to compile for a v5e with dropout, and 38
without. With a barrier behind the generator the bits are computed once and stored. On CPU JAX uses loops, on CUDA a
kernel of its own.

The lowering is registered once, for TPU, and applies only while hetjax lowers a program. It takes private names of JAX,
which no other file does for this purpose; where they are missing, programs are lowered as JAX does.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import jax

log = logging.getLogger("hetjax")
_thread = threading.local()  # .active: hetjax is lowering a program


@contextmanager
def quick_to_compile() -> Iterator[None]:
    """Put a barrier behind the random bits of programs that are lowered for TPU inside the block."""
    _register()
    before, _thread.active = getattr(_thread, "active", False), True
    try:
        yield
    finally:
        _thread.active = before


@functools.cache
def _register() -> None:
    try:
        from jax._src.interpreters import mlir

        try:
            jax_threefry = import_module("jax._src.random.threefry2x32")
        except ImportError:  # older versions of JAX
            jax_threefry = import_module("jax._src.prng")
        primitive, of_jax = jax_threefry.threefry2x32_p, jax_threefry._threefry2x32_lowering_rule
        unrolled = functools.partial(jax_threefry._threefry2x32_lowering, use_rolled_loops=False)
        apart = mlir.lower_fun(lambda *args: jax.lax.optimization_barrier(unrolled(*args)), multiple_results=True)

        def rule(context: Any, *args: Any) -> Any:
            return (apart if getattr(_thread, "active", False) else of_jax)(context, *args)

        mlir.register_lowering(primitive, rule, platform="tpu", inline=False)
    except Exception as error:  # a private interface: anything may have changed
        log.info("Random bits are lowered as JAX does (%s).", error)
