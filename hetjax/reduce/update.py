"""The update: divide the summed gradients by the global weight once, apply the optimizer, reject nonfinite results."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from hetjax.reduce.finite import NONFINITE, all_finite
from hetjax.reduce.layout import StepSums
from hetjax.reduce.trainable import trained_core, with_trained_core
from hetjax.state import Core

Tree = Any
Finish = Callable[[Any, Any], Any]  # (trained core, sums of the step) -> trained core


@partial(jax.tree_util.register_dataclass, data_fields=["sums", "count"], meta_fields=["momenta"])
@dataclass(frozen=True)
class StateSums:
    """State sums of a step, with the momentum that each variable asks for.

    Momenta are part of the tree's structure and not data, so they are known where the update is compiled.

    Attributes:
        sums: a tree like the model state.
        count: samples in the sums.
        momenta: for each leaf of the state its own momentum, 1 where it is frozen, or None for that of the running
            average.
    """

    sums: Tree
    count: jax.Array
    momenta: tuple[float | None, ...]

    def __iter__(self) -> Iterator[Any]:
        return iter((self.sums, self.count))


@dataclass(frozen=True)
class RunningAverage:
    """Updates model state by a running average over steps; see `running_average`."""

    momentum: float | None = None

    def __call__(self, model_state: Tree, state_sums: Tree) -> Tree:
        sums, count = state_sums
        safe = jnp.maximum(count, 1)
        leaves, tree = jax.tree.flatten(model_state)
        own: Sequence[float | None] = state_sums.momenta if isinstance(state_sums, StateSums) else [None] * len(leaves)
        if self.momentum is not None:  # for all but what is frozen
            own = [momentum if momentum == 1 else None for momentum in own]
        default = 0.9 if self.momentum is None else self.momentum
        momenta = [default if momentum is None else momentum for momentum in own]
        blend = lambda old, total, momentum: (momentum * old + (1 - momentum) * total / safe).astype(old.dtype)
        return jax.tree.map(blend, model_state, sums, jax.tree.unflatten(tree, momenta))


def running_average(momentum: float | None = None) -> RunningAverage:
    """Return an `advance` for `Step` and `Trainer` that averages the model state over the steps.

        state <- momentum * state + (1 - momentum) * sums / count

    `sums` (a tree like the state) and `count` are the state sums of a step, totaled over all workers.

    Args:
        momentum: share of the old state that is kept, for all of the state that is not frozen; 0 takes the new value as
            it is. Default: each BatchNorm layer's own, and 0.9 for everything else.

    Returns:
        A function (model_state, (sums, count)) -> model_state.
    """
    return RunningAverage(momentum)


def optimizer_step(
    optimizer: optax.GradientTransformation,
    advance: Callable[[Tree, Tree], Tree] | None,
    ema_decay: float | None,
    clip_norm: float | None = None,
) -> Finish:
    """Apply an optax update to g = (sum over workers of summed per-example gradients) / (sum of weights).

    Clipping, here by the global norm or in the optimizer, sees the gradient of the whole batch. An optimizer that takes
    the loss (`value`, as reduce_on_plateau does) receives that of the step.
    """
    update = optax.with_extra_args_support(optimizer).update

    def finish(core: Core, sums: StepSums) -> Core:
        params, model_state, opt_state, ema = core
        grads = jax.tree.map(lambda g, p: (g / sums.weight).astype(p.dtype), sums.grads, params)
        if clip_norm is not None:
            norm = optax.tree.norm(grads)
            factor = jnp.where(norm > clip_norm, clip_norm / norm, 1.0)
            grads = jax.tree.map(lambda g: (g * factor).astype(g.dtype), grads)
        updates, new_opt_state = update(grads, opt_state, params, value=sums.loss / sums.weight)
        new_params = optax.apply_updates(params, updates)
        new_state = model_state if advance is None else advance(model_state, sums.state_sums)
        new_ema = (
            ema
            if ema_decay is None
            else jax.tree.map(lambda e, p: ema_decay * e + (1 - ema_decay) * p, ema, new_params)
        )
        return new_params, new_state, new_opt_state, new_ema

    return finish


@dataclass(frozen=True)
class Update:
    """Updates the core if the sums are finite, and reports whether the new core is.

    Parameters that are not trained stay as they are, outside of all this: they cost no copy, and may hold infinities.

    Args:
        finish: Computes the new `trained_core`; None in evaluation, where the sums are the result.
        undo: Keep the old core if the new one is not finite. Both must be held, so nothing is donated. Without it, the
            update is in place, for runs that stop at a nonfinite value.
    """

    finish: Finish | None
    undo: bool = False

    @property
    def donate(self) -> tuple[int, ...]:
        """Arguments that a program (core, ...) -> core may donate."""
        return () if self.undo else (0,)

    def __call__(
        self,
        core: Any,
        sums: Any,
        weight: jax.Array,
        level: jax.Array,
        share: Callable[[jax.Array], jax.Array] = lambda bad: bad,
    ) -> tuple[Any, jax.Array]:
        """Apply one update.

        Args:
            core: The arrays on the devices.
            sums: The argument of `finish`.
            weight: Total weight of the sums; without any, the core is unchanged.
            level: Their `nonfinite_level`; from NONFINITE on, the core is unchanged.
            share: Shares the outcome between workers that update on their own.

        Returns:
            The core, and whether its update was not finite, as returned by `share`.
        """
        if self.finish is None:
            return core, jnp.bool_(False)
        whole, core = core, trained_core(core)
        allowed = (level < NONFINITE) & (weight > 0)
        if not self.undo:
            core = jax.lax.cond(allowed, self.finish, lambda core, _: core, core, sums)
            # NaN in the optimizer state reaches the parameters, but the infinite square of a large gradient does not: a
            # parameter divided by it never moves again.
            fine = jax.lax.cond(level > 0, state_finite, lambda _: jnp.bool_(True), core)
            return with_trained_core(whole, core), share(allowed & ~(all_finite(core[:2]) & fine))
        new = self.finish(core, sums)
        bad = share(allowed & ~(all_finite(new[:2]) & state_finite(new)))
        # A loop of at most one iteration: `cond` would copy the core in either case.
        restore = lambda _: (jnp.bool_(False), core)
        kept = jax.lax.while_loop(lambda carry: carry[0], restore, (~allowed | jnp.any(bad), new))[1]
        return with_trained_core(whole, kept), bad


def state_finite(core: Core) -> jax.Array:
    """Whether the optimizer state is finite, except its scalars: some, such as the best loss so far, start infinite."""
    return all_finite([x for x in jax.tree.leaves(core[2]) if jnp.ndim(x)])


unchanged = Update(None)  # of an evaluation


@dataclass(frozen=True)
class UpdateRule:
    """How summed gradients become new parameters."""

    optimizer: optax.GradientTransformation
    advance: Callable[[Tree, Tree], Tree] | None  # (model_state, state_sums) -> model_state; None: no model state
    ema_decay: float | None
    undo: bool = False  # discard an update that is not finite
    clip_norm: float | None = None  # largest global norm of a gradient

    def finish(self) -> Finish:
        """The function (core, sums) -> core."""
        return optimizer_step(self.optimizer, self.advance, self.ema_decay, self.clip_norm)

    def update(self) -> Update:
        """The same with the check for finite values."""
        return Update(self.finish(), self.undo)
