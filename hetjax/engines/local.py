"""The mathematics of the local phase, shared by all engines: from a block of rows to sums."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from hetjax.adapters.contract import Example, Metric, Objective, Prediction, example_keys, valid_rows
from hetjax.adapters.sync_axis import SyncAxis
from hetjax.reduce.layout import Layout, MetricLayout, Parts, StepSums
from hetjax.reduce.trainable import trainable, unfrozen, with_trained

Tree = Any
RowSums = Callable[[Tree, Tree, Tree, jax.Array], Parts]


def _masked_sum(value_b: jax.Array, mask_b: jax.Array, dtype: Any) -> jax.Array:
    """The sum over valid rows, [batch, ...] -> [...]."""
    value_b = jnp.asarray(value_b)
    valid = mask_b.reshape(mask_b.shape + (1,) * (value_b.ndim - 1))
    return jnp.sum(jnp.where(valid, value_b, 0).astype(dtype), axis=0)


def _scalars(example: Example, mask_b: jax.Array, dtype: Any) -> dict[str, Any]:
    total = lambda value_b: _masked_sum(value_b, mask_b, dtype)
    count = jnp.sum(mask_b, dtype=dtype)
    return {
        "loss": total(example.loss_b),
        "weight": count if example.weight_b is None else total(example.weight_b),
        "count": count,
        "metrics": {
            name: total(value.sum_b if isinstance(value, Metric) else value) for name, value in example.metrics.items()
        },
        "metric_weights": {
            name: total(value.weight_b)
            for name, value in example.metrics.items()
            if isinstance(value, Metric) and value.weight_b is not None
        },
    }


def _metric_layout(name: str, value: Any) -> MetricLayout:
    """The layout of a metric, from its shapes."""
    if not isinstance(value, Metric):
        return MetricLayout(name)
    shape = value.sum_b.shape[1:]
    if value.weight_b is not None:
        return MetricLayout(name, shape, "own", value.weight_b.shape[1:])
    return MetricLayout(name, shape, "nothing" if value.reduce == "sum" else "count")


def train_sums(objective: Objective, layout: Layout) -> RowSums:
    """(params, model_state, rows, ctl) -> sums of gradients, model state, loss, weight, count and metrics.

    Computes the gradient of the SUM over valid rows; the reduce divides by the global weight once.
    """

    def sums(params: Tree, model_state: Tree, rows: Tree, ctl: jax.Array) -> Parts:
        rows, mask_b = valid_rows(rows, ctl)
        keys_b = example_keys(ctl, len(mask_b))

        def total_loss(trained: Tree) -> tuple[jax.Array, tuple[Example, Tree]]:
            example, state_sums = objective(unfrozen(with_trained(params, trained)), model_state, rows, keys_b, mask_b)
            return _masked_sum(example.loss_b, mask_b, layout.dtype), (example, state_sums)

        grads, (example, state_sums) = jax.grad(total_loss, has_aux=True)(trainable(params))
        return layout.pack(StepSums(grads, state_sums, **_scalars(example, mask_b, layout.dtype)))

    return sums


def eval_sums(objective: Objective, layout: Layout) -> RowSums:
    """(params, model_state, rows, ctl) -> sums of loss, weight, count and metrics; no gradient."""

    def sums(params: Tree, model_state: Tree, rows: Tree, ctl: jax.Array) -> Parts:
        rows, mask_b = valid_rows(rows, ctl)
        example, _ = objective(unfrozen(params), model_state, rows, example_keys(ctl, len(mask_b)), mask_b)
        return layout.pack(StepSums((), (), **_scalars(example, mask_b, layout.dtype)))

    return sums


def row_outputs(prediction: Prediction) -> RowSums:
    """(params, model_state, rows, ctl) -> leaves of the rows' outputs, [rows, ...] each, and the mask of valid rows."""

    def outputs(params: Tree, model_state: Tree, rows: Tree, ctl: jax.Array) -> Parts:
        rows, mask_b = valid_rows(rows, ctl)
        made = prediction(unfrozen(params), model_state, rows, example_keys(ctl, len(mask_b)))
        return (*map(jnp.asarray, jax.tree.leaves(made)), mask_b)

    return outputs


def outputs_of(prediction: Prediction, params: Tree, model_state: Tree, row: Tree) -> Tree:
    """Shapes of the outputs of one sample, by abstract evaluation."""
    block = jax.tree.map(lambda x: jax.ShapeDtypeStruct((2, *x.shape), x.dtype), row)
    keys_b = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 2))
    made = jax.eval_shape(prediction, unfrozen(params), model_state, block, keys_b)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), made)


def layout_of(
    objective: Objective, params: Tree, model_state: Tree, row: Tree, rows: int, *, train: bool
) -> tuple[Layout, bool]:
    """The layout of a model's sums, by abstract evaluation.

    Args:
        objective: The user's loss.
        params: Shapes of the parameters.
        model_state: Shapes of the model state.
        row: Shapes of one sample.
        rows: Number of rows to trace with.
        train: Whether there are gradients.

    Returns:
        The layout, and whether a layer communicates across workers in the forward pass.
    """
    block = jax.tree.map(lambda x: jax.ShapeDtypeStruct((rows, *x.shape), x.dtype), row)
    keys_b = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), rows))
    mask_b = jax.ShapeDtypeStruct((rows,), jnp.bool_)
    with SyncAxis(None).allowed() as axis:
        example, state_sums = jax.eval_shape(objective, unfrozen(params), model_state, block, keys_b, mask_b)
    grads = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype), trainable(params)) if train else ()
    metrics = [_metric_layout(name, value) for name, value in example.metrics.items()]
    return Layout.of(grads, state_sums if train else (), metrics), axis.used
