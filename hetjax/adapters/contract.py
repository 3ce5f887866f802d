"""The contract with the user's model: one loss and one key per example; values are summed, never averaged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Tree = Any

# Entries of the control vector of a block of rows. It is data, not shape, so no plan recompiles anything.
COUNT, SEED, EPOCH, POSITION = range(4)

_ARRAY: Any = (jax.Array, np.ndarray, np.generic, int, float)


def control(count: int, *, seed: int, epoch: int, position: int) -> np.ndarray:
    """Return the control vector of a block of rows; `position` is that of its first row in the epoch's global order."""
    return np.array([count, seed & 0xFFFFFFFF, epoch, position], np.uint32)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Example:
    """What a loss function returns: one value per example of the batch.

    Reported values and the gradient are sum_b value_b / sum_b weight_b over the global batch. So with weights (such as
    the tokens of a sequence) `loss_b` and the metrics are weighted sums over the example.

    Attributes:
        loss_b: loss of each example, [batch].
        weight_b: weight of each example, [batch]. Default: 1 each.
        metrics: further values by name, each [batch].
    """

    loss_b: jax.Array
    weight_b: jax.Array | None = None
    metrics: dict[str, jax.Array] = field(default_factory=dict)


@dataclass(frozen=True)
class Objective:
    """A user's loss function behind one signature, with or without model state.

    Without model state, `loss_fn(params, batch, keys)` returns `loss_b` or an `Example`. With model state,
    `loss_fn(params, state, batch, keys, mask_b)` returns that and the sums for the state's update.
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
            value, state_sums = returned
        else:
            value, state_sums = self.loss_fn(params, batch, keys_b), ()
        example = as_example(value)
        rows = len(mask_b)
        named = {"the loss": example.loss_b, **{f"metric {name!r}": value for name, value in example.metrics.items()}}
        if example.weight_b is not None:
            named["the weight"] = example.weight_b
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
        return example, state_sums


def as_example(returned: Any) -> Example:
    """Return what a loss function returned as an `Example`."""
    if isinstance(returned, Example):
        return returned
    if not isinstance(returned, _ARRAY):
        raise TypeError(
            f"The loss function returned {_kind(returned)} instead of a loss. Return the loss of each example alone, "
            "or with metrics hetjax.Example(loss, metrics={'accuracy': correct})."
        )
    return Example(returned)


def _kind(value: Any) -> str:
    return f"a tuple of {len(value)}" if isinstance(value, tuple) else f"a {type(value).__name__}"


def example_keys(ctl: jax.Array, rows: int) -> jax.Array:
    """Return one PRNG key per row from (seed, epoch, global position), which does not depend on the split."""
    key = jax.random.fold_in(jax.random.key(ctl[SEED]), ctl[EPOCH])
    return jax.vmap(jax.random.fold_in, (None, 0))(key, ctl[POSITION] + jnp.arange(rows, dtype=jnp.uint32))


def valid_rows(batch: Tree, ctl: jax.Array) -> tuple[Tree, jax.Array]:
    """Return the batch with every padding row replaced by a copy of the first row, and the mask of valid rows.

    0 * NaN is NaN, so the contents of padding rows must not enter the model at all.
    """
    rows = jax.tree.leaves(batch)[0].shape[0]
    mask_b = jnp.arange(rows, dtype=jnp.uint32) < ctl[COUNT]
    keep = lambda x: jnp.where(mask_b.reshape((rows,) + (1,) * (x.ndim - 1)), x, x[:1])
    return jax.tree.map(keep, batch), mask_b
