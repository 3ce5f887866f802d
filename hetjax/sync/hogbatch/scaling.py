"""The update program: an optimizer whose gradients are scaled by batch size, compiled once per kind of device.

The gradient of a batch is the mean over its b samples. Times s = b / reference it is their sum over a constant, and
momentum accumulates sums: every sample has the same weight in any batch. Scaling updates instead would not do this:
momentum spreads a gradient over later updates, each scaled by its own batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from hetjax.devices.compile import compile_for, expected
from hetjax.devices.workers import device_kind
from hetjax.reduce.layout import HOST_SLOTS, Layout, Parts
from hetjax.reduce.trainable import trainable
from hetjax.reduce.transports import apply_where_finite
from hetjax.state import Core
from hetjax.sync.base import UpdateRule

Tree = Any
_SLOTS = np.zeros(HOST_SLOTS, np.float32)  # times and plans do not travel with the sums here


def is_homogeneous(optimizer: optax.GradientTransformation, params: Tree) -> Tree:
    """Tests for each parameter whether its update u(g, p) satisfies u(s g, s p) = s u(g, p), by trying s = 2.

    True for optimizers linear in gradients and parameters together: SGD, momentum, weight decay, trust ratios. False
    for optimizers that normalize gradients, such as Adam and Lion.

    Args:
        optimizer: Any optax optimizer.
        params: Its parameters; only shapes and dtypes matter.

    Returns:
        A tree of bools with the structure of `params`.
    """
    with_extra = optax.with_extra_args_support(optimizer).update
    small = 0.01 / max(len(jax.tree.leaves(params)), 1) ** 0.5  # a gradient of norm 0.01, below any sensible clipping

    def size_of_updates(scale: float) -> Tree:
        at = jax.tree.map(lambda p: jnp.full(p.shape, 0.1 * scale, p.dtype), params)
        grads = jax.tree.map(lambda p: jnp.zeros(p.size, p.dtype).at[:1].set(small * scale).reshape(p.shape), params)
        state, size = optimizer.init(at), jax.tree.map(lambda p: 0.0, params)
        for _ in range(2):  # the first update of a warm-up is zero
            updates, state = with_extra(grads, state, at, value=jnp.ones(()))
            size = jax.tree.map(lambda s, u: s + jnp.abs(u.reshape(-1)[:1].astype(jnp.float32)).sum(), size, updates)
        return size

    with expected():
        one, two = jax.device_get(jax.jit(lambda: (size_of_updates(1.0), size_of_updates(2.0)))())
    return jax.tree.map(lambda a, b: not 0 < b <= 1.5 * a, one, two)


def scale_by_batch(
    optimizer: optax.GradientTransformation, homogeneous: Tree, scale: jax.Array, rate: jax.Array
) -> optax.GradientTransformation:
    """Wraps an optimizer so that gradients have weight `scale` and the learning rate is multiplied by `rate`.

    With u(g, p) the optimizer's update, returns rate u(scale g, scale p) for homogeneous parameters and
    rate scale u(scale g, p) for the others. The optimizer state is unchanged.

    Args:
        optimizer: Any optax optimizer.
        homogeneous: The result of `is_homogeneous`.
        scale: Factor on the gradients, by batch size.
        rate: Factor on the updates, by schedule.

    Returns:
        The optimizer for one update.
    """
    times = lambda factor, x: (factor * x).astype(x.dtype)
    with_extra = optax.with_extra_args_support(optimizer).update

    def update(grads: Tree, state: Tree, params: Tree = None, **extra: Any) -> tuple[Tree, Tree]:
        grads = jax.tree.map(lambda g: times(scale, g), grads)
        at = jax.tree.map(lambda p, h: times(scale, p) if h else p, params, homogeneous)
        updates, state = with_extra(grads, state, at, **extra)
        return jax.tree.map(lambda u, h: times(rate if h else rate * scale, u), updates, homogeneous), state

    return optax.GradientTransformationExtraArgs(optimizer.init, update)


def compile_updates(
    layout: Layout, rule: UpdateRule, core: Core, devices: Sequence[jax.Device]
) -> dict[jax.Device, Any]:
    """The program (core, a worker's sums, slots, scale, rate) -> (core, report) of each device."""
    shape = lambda x: jax.ShapeDtypeStruct(np.shape(x), jax.dtypes.canonicalize_dtype(x.dtype))
    shapes = jax.tree.map(shape, core)
    homogeneous = is_homogeneous(rule.optimizer, trainable(shapes[0]))

    def step(core: Core, parts_1: Parts, slots: jax.Array, scale: jax.Array, rate: jax.Array) -> tuple[Core, jax.Array]:
        own = layout.outgoing(tuple(part[0] for part in parts_1), slots, 0, 1)
        update = replace(rule, optimizer=scale_by_batch(rule.optimizer, homogeneous, scale, rate)).update()
        return apply_where_finite(layout, update, core, own, 1)

    parts = tuple(jax.ShapeDtypeStruct((1, size), layout.dtype) for size in layout.sizes)
    factor = jax.ShapeDtypeStruct((), np.float32)
    arguments = shapes, parts, shape(_SLOTS), factor, factor
    programs: dict[jax.Device, Any] = {}
    with expected():
        for kind in dict.fromkeys(map(device_kind, devices)):
            alike = [device for device in devices if device_kind(device) == kind]
            programs.update(zip(alike, compile_for(step, arguments, alike), strict=True))
    return programs


def run_update(program: Any, core: Core, parts: Parts, scale: float, rate: float) -> tuple[Core, jax.Array]:
    """Run a program of `compile_updates`; returns the new core, and loss and metrics as `StepReport` reads them."""
    return program(core, parts, _SLOTS, np.float32(scale), np.float32(rate))
