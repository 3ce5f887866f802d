"""The contract with the user's model: one loss per example, one key per example, everything summed, never averaged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Tree = Any

# Words of the control vector that goes with every block of rows: data, so that no plan ever compiles anything.
COUNT, SEED, EPOCH, POSITION = range(4)

_ARRAY: Any = (jax.Array, np.ndarray, np.generic, int, float)


def control(count: int, *, seed: int, epoch: int, position: int) -> np.ndarray:
    """The control vector of a block of rows; `position` is the place of its first row in the epoch's global order."""
    return np.array([count, seed & 0xFFFFFFFF, epoch, position], np.uint32)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Example:
    """What a model says of each example of a batch.

    With weights (tokens of a sequence) `loss_b` and the metrics are weighted SUMS over the example; totals are divided
    by the global weight. Without, the weight of an example is one.
    """

    loss_b: jax.Array
    weight_b: jax.Array | None = None
    metrics: dict[str, jax.Array] = field(default_factory=dict)


@dataclass(frozen=True)
class Objective:
    """A user's loss function behind one signature, stateful or not.

    Without model state: `loss_fn(params, batch, keys)` returns `loss_b` or an `Example`.
    With model state: `loss_fn(params, state, batch, keys, mask_b)` returns that and the sums for the state's update.
    """

    loss_fn: Callable[..., Any]
    stateful: bool = False

    def __call__(
        self, params: Tree, model_state: Tree, batch: Tree, keys_b: jax.Array, mask_b: jax.Array
    ) -> tuple[Example, Tree]:
        if self.stateful:
            returned = self.loss_fn(params, model_state, batch, keys_b, mask_b)
            if not isinstance(returned, tuple) or len(returned) != 2:
                raise TypeError(
                    "With model state, loss_fn must return two values, the losses (or a hetjax.Example) and the sums "
                    f"for the state's update, but it returned {_kind(returned)}."
                )
            told, state_sums = returned
        else:
            told, state_sums = self.loss_fn(params, batch, keys_b), ()
        told = as_example(told)
        rows = len(mask_b)
        named = {"the loss": told.loss_b, **{f"metric {name!r}": value for name, value in told.metrics.items()}}
        if told.weight_b is not None:
            named["the weight"] = told.weight_b
        for name, value in named.items():
            if not isinstance(value, _ARRAY):
                raise TypeError(f"{name.capitalize()} should be an array of one value per example, not {_kind(value)}.")
            if (shape := jnp.shape(value)) != (rows,):
                advice = (
                    "Do not average over the batch, hetjax sums and divides: return for instance "
                    "optax.softmax_cross_entropy_with_integer_labels(logits, labels) without .mean()."
                    if not shape
                    else "Sum or average over the other axes of each example."
                )
                raise ValueError(
                    f"loss_fn must return one value per example: for {rows} rows {name} should have shape ({rows},), "
                    f"but it has shape {shape}. {advice}"
                )
        return told, state_sums


def as_example(returned: Any) -> Example:
    """What a loss function returned, as an `Example`."""
    if isinstance(returned, Example):
        return returned
    if not isinstance(returned, _ARRAY):
        raise TypeError(
            f"The loss function returned {_kind(returned)} in place of a loss. Return the loss of each example alone, "
            "or, with more to report, hetjax.Example(loss, metrics={'accuracy': correct})."
        )
    return Example(returned)


def _kind(value: Any) -> str:
    return f"a tuple of {len(value)}" if isinstance(value, tuple) else f"a {type(value).__name__}"


def example_keys(ctl: jax.Array, rows: int) -> jax.Array:
    """One PRNG key per row from (seed, epoch, global position): the same for a sample however the batch is split."""
    key = jax.random.fold_in(jax.random.key(ctl[SEED]), ctl[EPOCH])
    return jax.vmap(jax.random.fold_in, (None, 0))(key, ctl[POSITION] + jnp.arange(rows, dtype=jnp.uint32))


def valid_rows(batch: Tree, ctl: jax.Array) -> tuple[Tree, jax.Array]:
    """The batch with every padding row replaced by a copy of its first row, and the mask of the valid ones.

    0 * NaN is NaN, so whatever stands in the padding must not enter the model at all.
    """
    rows = jax.tree.leaves(batch)[0].shape[0]
    mask_b = jnp.arange(rows, dtype=jnp.uint32) < ctl[COUNT]
    keep = lambda x: jnp.where(mask_b.reshape((rows,) + (1,) * (x.ndim - 1)), x, x[:1])
    return jax.tree.map(keep, batch), mask_b
