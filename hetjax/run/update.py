"""From the summed vector to new parameters: divide by the global weight once, apply the optimiser, keep it finite."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from hetjax.run.layout import Sums

Tree = Any
Core = tuple[Tree, Tree, Tree, Tree]  # params, model_state, opt_state, ema: what the devices hold
Finish = Callable[[Any, Sums], Any]  # (core, sums of the step) -> core


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


def check_state(state: Any) -> None:
    """Refuse what is no state, such as the parameters themselves."""
    if not isinstance(state, State):
        raise TypeError(
            f"state is a {type(state).__module__}.{type(state).__name__}: expected what `init` or an earlier `fit` "
            "returned, as in trainer.fit(trainer.init(params), source, steps=100)."
        )


def running_average(momentum: float = 0.9) -> Callable[[Tree, Tree], Tree]:
    """state <- momentum * state + (1 - momentum) * sums / count, for state sums (sums like the state, count)."""

    def advance(model_state: Tree, state_sums: Tree) -> Tree:
        sums, count = state_sums
        safe = jnp.maximum(count, 1)
        blend = lambda old, total: (momentum * old + (1 - momentum) * total / safe).astype(old.dtype)
        return jax.tree.map(blend, model_state, sums)

    return advance


def optimiser_step(
    optimizer: optax.GradientTransformation, advance: Callable[[Tree, Tree], Tree] | None, ema_decay: float | None
) -> Finish:
    """g = (sum over workers of the sum of per-example gradients) / (sum of weights), then any optax update.

    Clipping belongs into the optimiser: here it sees the whole batch's gradient. The reduce applies it only where all
    sums are finite.
    """

    def finish(core: Core, sums: Sums) -> Core:
        params, model_state, opt_state, ema = core
        grads = jax.tree.map(lambda g, p: (g / sums.weight).astype(p.dtype), sums.grads, params)
        updates, new_opt_state = optimizer.update(grads, opt_state, params)
        new_params = optax.apply_updates(params, updates)
        new_state = model_state if advance is None else advance(model_state, sums.state_sums)
        new_ema = (
            ema
            if ema_decay is None
            else jax.tree.map(lambda e, p: ema_decay * e + (1 - ema_decay) * p, ema, new_params)
        )
        return new_params, new_state, new_opt_state, new_ema

    return finish


def unchanged(core: Any, sums: Sums) -> Any:
    """Evaluation: the sums are the result."""
    return core
