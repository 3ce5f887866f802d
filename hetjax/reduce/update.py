"""From the summed vector to new parameters: divide by the global weight once, apply the optimizer, keep it finite."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import optax

from hetjax.arguments import whole
from hetjax.reduce.finite import NONFINITE, all_finite
from hetjax.reduce.layout import StepSums
from hetjax.reduce.optimizer import has_gradient, trainable, with_trained

Tree = Any
Core = tuple[Tree, Tree, Tree, Tree]  # params, model_state, opt_state, ema: what the devices hold
Finish = Callable[[Any, Any], Any]  # (core, sums of the step) -> core


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class State:
    """Everything a run is made of: what the devices hold, and two integers of the host.

    `cursor` counts the samples consumed since the start; with it any number of workers can go on. A sync that keeps
    several sets of parameters stacks them: all arrays then have a leading axis of `replicas`.
    """

    params: Tree
    model_state: Tree
    opt_state: Tree
    ema: Tree  # exponential moving average of the parameters, or None
    step: int = 0
    cursor: int = 0
    replicas: int = 0  # sets of parameters along a leading axis; 0: one set, without that axis
    more: Tree = None  # what else a sync keeps on the devices, such as an exchange under way

    @classmethod
    def of(cls, core: Core, step: int, cursor: int) -> State:
        params, model_state, opt_state, ema = core
        return cls(params, model_state, opt_state, ema, step, cursor)

    @property
    def core(self) -> Core:
        return self.params, self.model_state, self.opt_state, self.ema


def checked(state: Any) -> State:
    """The state with whole numbers for step and cursor, which a checkpoint may hold as arrays.

    Raises:
        TypeError: If it is no state, such as the parameters themselves.
        ValueError: If step or cursor are out of range.
    """
    if not isinstance(state, State):
        raise TypeError(
            f"state is a {type(state).__module__}.{type(state).__name__}: expected what `init` or an earlier `fit` "
            "returned, as in trainer.fit(trainer.init(params), source, steps=100)."
        )
    return replace(state, step=whole("state.step", state.step, 0), cursor=whole("state.cursor", state.cursor, 0))


@dataclass(frozen=True)
class RunningAverage:
    """How a model state moves on: a running average over the steps."""

    momentum: float = 0.9

    def __call__(self, model_state: Tree, state_sums: Tree) -> Tree:
        sums, count = state_sums
        safe = jnp.maximum(count, 1)
        blend = lambda old, total: (self.momentum * old + (1 - self.momentum) * total / safe).astype(old.dtype)
        return jax.tree.map(blend, model_state, sums)


def running_average(momentum: float = 0.9) -> RunningAverage:
    """state <- momentum * state + (1 - momentum) * sums / count, for state sums (sums like the state, count)."""
    return RunningAverage(momentum)


def optimizer_step(
    optimizer: optax.GradientTransformation, advance: Callable[[Tree, Tree], Tree] | None, ema_decay: float | None
) -> Finish:
    """g = (sum over workers of the sum of per-example gradients) / (sum of weights), then any optax update.

    Clipping belongs into the optimizer: here it sees the whole batch's gradient. An optimizer that takes the loss
    (`value`, as reduce_on_plateau does) is given that of the step.
    """
    update = optax.with_extra_args_support(optimizer).update

    def finish(core: Core, sums: StepSums) -> Core:
        params, model_state, opt_state, ema = core
        trained = trainable(params)
        grads = jax.tree.map(lambda g, p: (g / sums.weight).astype(p.dtype), sums.grads, trained)
        updates, new_opt_state = update(grads, opt_state, trained, value=sums.loss / sums.weight)
        new_params = with_trained(params, optax.apply_updates(trained, updates))
        new_state = model_state if advance is None else advance(model_state, sums.state_sums)
        new_ema = (
            ema
            if ema_decay is None
            else jax.tree.map(
                lambda e, p: ema_decay * e + (1 - ema_decay) * p if has_gradient(p) else p, ema, new_params
            )
        )
        return new_params, new_state, new_opt_state, new_ema

    return finish


@dataclass(frozen=True)
class Update:
    """Moves the core on where the sums are finite, and says whether what came of them is.

    Args:
        finish: makes the new core; None in an evaluation, where the sums are the result.
        undo: keep the old core where the new one is not finite. Both are held then, so nothing is donated. Without it
            the update is in place, for runs that stop.
    """

    finish: Finish | None
    undo: bool = False

    @property
    def donate(self) -> tuple[int, ...]:
        """The arguments that a program (core, ...) -> core may overwrite."""
        return () if self.undo else (0,)

    def __call__(
        self,
        core: Any,
        sums: Any,
        weight: jax.Array,
        level: jax.Array,
        tell: Callable[[jax.Array], jax.Array] = lambda bad: bad,
    ) -> tuple[Any, jax.Array]:
        """Move on by sums of this weight and of this `nonfinite_level`.

        Returns:
            The core, and whether its update was bad: what `tell` makes of that, where workers update on their own.
        """
        if self.finish is None:
            return core, jnp.bool_(False)
        allowed = (level < NONFINITE) & (weight > 0)
        if not self.undo:
            core = jax.lax.cond(allowed, self.finish, lambda core, _: core, core, sums)
            # NaN in the optimizer's state reaches the parameters, but the infinite square of a large gradient does not:
            # a parameter divided by it just never moves again.
            state_finite = jax.lax.cond(level > 0, _state_finite, lambda _: jnp.bool_(True), core)
            return core, tell(allowed & ~(all_finite(core[:2]) & state_finite))
        new = self.finish(core, sums)
        bad = tell(allowed & ~(all_finite(new[:2]) & _state_finite(new)))
        # A loop of one turn or none: `cond` would copy the core in either case.
        back = lambda _: (jnp.bool_(False), core)
        return jax.lax.while_loop(lambda turn: turn[0], back, (~allowed | jnp.any(bad), new))[1], bad


def _state_finite(core: Core) -> jax.Array:
    """Of the optimizer's state. Its scalars do not count: some, such as the best loss so far, start infinite."""
    return all_finite([x for x in jax.tree.leaves(core[2]) if jnp.ndim(x)])


unchanged = Update(None)
