"""The random bits of a program, lowered so that the compiler of a TPU is quick with them; the bits are the same.

JAX's default generator, threefry, has 20 rounds. On TPU JAX unrolls them, and the compiler fuses them into every use of
the bits, forward and backward: three layers of dropout cost four times the compile of the rest of the model. On CPU JAX
itself uses loops, on CUDA a kernel of its own.

The lowering is registered for TPU once, and applies only while hetjax lowers a program. It takes private names of JAX,
which no other file does for this purpose; where they are missing, programs are lowered as JAX does.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

log = logging.getLogger("hetjax")
_thread = threading.local()  # .active: hetjax is lowering a program


@contextmanager
def quick_to_compile() -> Iterator[None]:
    """Lower threefry for TPU by loops inside the block."""
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
            from jax._src.random import threefry2x32 as jax_threefry
        except ImportError:  # before jax 0.10
            from jax._src import prng as jax_threefry  # type: ignore[no-redef]
        primitive, of_jax = jax_threefry.threefry2x32_p, jax_threefry._threefry2x32_lowering_rule
        looped = mlir.lower_fun(
            functools.partial(jax_threefry._threefry2x32_lowering, use_rolled_loops=True), multiple_results=True
        )

        def rule(context: Any, *args: Any) -> Any:
            return (looped if getattr(_thread, "active", False) else of_jax)(context, *args)

        mlir.register_lowering(primitive, rule, platform="tpu", inline=False)
    except Exception as error:  # a private interface: anything may have changed
        log.info("Random bits are lowered as JAX does (%s).", error)
