"""How much a gradient counts by its batch, and how far updates go by where training stands.

How much each gradient counts by its batch, and how far updates go by where training stands.

Scale what an optimizer is given by the batch, so that every sample counts alike however it was batched.

The gradient of a batch is the mean over its b samples. Times s = b / reference it is their sum, divided by a constant,
and momentum accumulates sums. Scaling the updates instead would not do: momentum spreads a gradient over the updates
that follow, each of which would be scaled by its own batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from hetjax.devices.compile import expected
from hetjax.sampling.ranges import Range
from hetjax.sync.hogbatch.rules import CAP, rate_scale


@dataclass(frozen=True)
class Rate:
    """The factor min(b / reference, cap) on gradients, and the factor schedule(samples / step) on updates.

    `schedule` is for rates that change over training. A schedule inside the optimizer counts updates, whose number
    nobody knows beforehand; this one counts in steps of `step` samples.
    """

    reference: float
    cap: float | None = CAP
    by_batch: bool = True
    schedule: Callable[[float], float] | None = None
    step: int = 1
    alone: bool = False  # there is one worker, which is to do what sequential SGD does

    def scale(self, span: Range, batch: int) -> float:
        """Of the gradient of a range that was handed out for a batch.

        The short range at the end of an epoch counts as what it is: a handful of samples must not move the model like
        a full batch. Sequential SGD does let them, and so does one worker alone.
        """
        counted = batch if self.alone else span.count
        return rate_scale(counted, self.reference, self.cap) if self.by_batch else 1.0

    def at(self, samples: int) -> float:
        """Of an update after so many samples."""
        return 1.0 if self.schedule is None else float(self.schedule(samples / self.step))


Tree = Any


def follows_scale(optimizer: optax.GradientTransformation, params: Tree) -> Tree:
    """Whether u(s g, s p) = s u(g, p) for the updates u of each parameter, found out by trying s = 2.

    True for what is linear in gradients and parameters together: SGD, momentum, weight decay, trust ratios. False for
    optimizers that normalize their gradients, such as Adam and Lion.

    Args:
        optimizer: Any optax optimizer.
        params: Its parameters; only shapes and dtypes matter.

    Returns:
        A tree like `params` of bools.
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


def scaled(
    optimizer: optax.GradientTransformation, follows: Tree, scale: jax.Array, rate: jax.Array
) -> optax.GradientTransformation:
    """An optimizer whose gradients count `scale` times and whose learning rate is `rate` times its own.

    With u(g, p) the updates of the optimizer, those returned are rate u(scale g, scale p) where they follow the scale,
    and rate scale u(scale g, p) elsewhere. The state is that of the optimizer itself.

    Args:
        optimizer: Any optax optimizer.
        follows: Of `follows_scale`.
        scale: Of the gradients, by the batch.
        rate: Of the updates, by the schedule.

    Returns:
        The optimizer for one update.
    """
    times = lambda factor, x: (factor * x).astype(x.dtype)
    with_extra = optax.with_extra_args_support(optimizer).update

    def update(grads: Tree, state: Tree, params: Tree = None, **extra: Any) -> tuple[Tree, Tree]:
        grads = jax.tree.map(lambda g: times(scale, g), grads)
        at = jax.tree.map(lambda p, f: times(scale, p) if f else p, params, follows)
        updates, state = with_extra(grads, state, at, **extra)
        return jax.tree.map(lambda u, f: times(rate if f else rate * scale, u), updates, follows), state

    return optax.GradientTransformationExtraArgs(optimizer.init, update)
