"""The contract with the user's model: one loss and one key per example; values are summed, never averaged."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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
class Metric:
    """A metric with a weight or a shape of its own, as a value in `Example.metrics`.

        mean = sum_b sum_b[b] / sum_b weight_b[b], for each entry; NaN where the total weight is 0

    Examples:
        >>> hetjax.Example(
        ...     loss_b=token_losses.sum(-1),  # with weight_b, a mean over tokens
        ...     weight_b=tokens_b,
        ...     metrics={
        ...         "token_accuracy": correct_tokens_b,  # a plain array is divided by the weights of the examples
        ...         "sequence_accuracy": hetjax.Metric(correct_b),  # a mean over sequences
        ...         "recall": hetjax.Metric(hits_bxc, weight_b=labels_bxc),  # one for each class
        ...         "confusion": hetjax.Metric(pairs_bxcxc, reduce="sum"),  # counts
        ...     },
        ... )

    Attributes:
        sum_b: value of each example, [batch] or [batch, ...]; with weights, its weighted sum over the example.
        weight_b: weight of each example, [batch], or [batch, ...] such that it broadcasts to the shape of `sum_b`.
            Default: 1 for each example, whatever weight the loss has.
        reduce: 'mean' (default), or 'sum' for the sum over all examples, which has no weight.
    """

    sum_b: jax.Array
    weight_b: jax.Array | None = None
    reduce: str = field(default="mean", metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Example:
    """What a loss function returns: one value per example of the batch.

    Reported values and the gradient are sum_b value_b / sum_b weight_b over the global batch. So with weights (such as
    the tokens of a sequence) `loss_b` and the metrics are weighted sums over the example. A `Metric` has a weight of
    its own, or none.

    Attributes:
        loss_b: loss of each example, [batch].
        weight_b: weight of each example, [batch]. Default: 1 each.
        metrics: further values by name, each [batch] or a `Metric`; the name 'loss' is taken.
    """

    loss_b: jax.Array
    weight_b: jax.Array | None = None
    metrics: dict[str, jax.Array | Metric] = field(default_factory=dict)


def is_flax(value: Any) -> bool:
    """Whether a value is a Flax module, NNX or Linen."""
    return any(base.__module__.startswith("flax.") and base.__name__ == "Module" for base in type(value).__mro__)


def check_loss(name: str, loss_fn: Callable[..., Any], stateful: bool) -> None:
    """Refuse a loss function that cannot be called as the contract says; one without a signature is let through.

    Args:
        name: what to call it in the message.
        loss_fn: the function.
        stateful: whether there is model state.

    Raises:
        TypeError: if its arguments are others.
    """
    try:
        signature = inspect.signature(loss_fn)
    except (TypeError, ValueError):
        return
    takes = {with_state: _binds(signature, arguments) for with_state, arguments in _ARGUMENTS.items()}
    if takes[stateful]:
        return
    advice = "keys has a random key for each example; take it also if nothing is random."
    if takes[not stateful]:
        advice = (
            "Give init no model_state, or take it."
            if stateful
            else "Give its model state to init, as in trainer.init(params, model_state)."
        )
    raise TypeError(f"{name} is called as {name}({', '.join(_ARGUMENTS[stateful])}), but takes {signature}. {advice}")


_ARGUMENTS = {False: ("params", "batch", "keys"), True: ("params", "model_state", "batch", "keys", "mask_b")}


def _binds(signature: inspect.Signature, arguments: Sequence[str]) -> bool:
    try:
        signature.bind(*arguments)
    except TypeError:
        return False
    return True


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
        with _explained(batch):
            returned = (
                self.loss_fn(params, model_state, batch, keys_b, mask_b)
                if self.stateful
                else self.loss_fn(params, batch, keys_b)
            )
        if self.stateful:
            if not isinstance(returned, tuple) or len(returned) != 2:
                raise TypeError(
                    "With model state, loss_fn must return two values, the losses (or a hetjax.Example) and the sums "
                    f"for the state's update, but it returned {_kind(returned)}."
                )
            value, state_sums = returned
        else:
            value, state_sums = returned, ()
        example = as_example(value)
        if "loss" in example.metrics:
            raise ValueError(
                "A metric is named 'loss', the name of the mean of loss_b in the results of evaluate. Give it another "
                "name, such as 'cross_entropy'."
            )
        rows = len(mask_b)
        named = {"the loss": example.loss_b}
        for name, value in example.metrics.items():
            if isinstance(value, Metric):
                _check_metric(name, value, rows)
            else:
                named[f"metric {name!r}"] = value
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
                    if not name.startswith("metric")
                    else "Sum or average over the other axes, or return a hetjax.Metric, which may have any shape."
                )
                raise ValueError(
                    f"loss_fn must return one value per example: for {rows} rows {name} should have shape ({rows},), "
                    f"but it has shape {shape}. {advice}"
                )
        return example, state_sums


@dataclass(frozen=True)
class Prediction:
    """A user's function for predictions behind one signature, with or without model state.

    `predict_fn(params, batch, keys)`, or with model state `predict_fn(params, model_state, batch, keys)`, returns a
    tree of arrays with one entry per example.
    """

    predict_fn: Callable[..., Any]
    stateful: bool = False

    def __call__(self, params: Tree, model_state: Tree, batch: Tree, keys_b: jax.Array) -> Tree:
        state = (model_state,) if self.stateful else ()
        outputs = self.predict_fn(params, *state, batch, keys_b)
        leaves = jax.tree.leaves(outputs)
        if not leaves or not all(isinstance(leaf, _ARRAY) for leaf in leaves):
            raise TypeError(f"predict_fn must return an array or a tree of arrays, but it returned {_kind(outputs)}.")
        for shape in map(jnp.shape, leaves):
            if shape[:1] != keys_b.shape:
                raise ValueError(
                    f"predict_fn must return one output per example: for {len(keys_b)} rows arrays should have shape "
                    f"({len(keys_b)}, ...), but one has shape {shape}."
                )
        return outputs


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


@contextmanager
def _explained(batch: Tree) -> Iterator[None]:
    """Say which fields the data have if the user's function asks for another one."""
    try:
        yield
    except KeyError as error:
        if isinstance(batch, Mapping) and error.args and error.args[0] not in batch:
            error.add_note(f"The data have the fields {', '.join(map(repr, batch))}.")
        raise


def _check_metric(name: str, metric: Metric, rows: int) -> None:
    """Refuse a metric whose arrays do not fit the rows or each other."""
    if metric.reduce not in ("mean", "sum"):
        raise ValueError(f"Metric {name!r} has reduce={metric.reduce!r}: use 'mean' or 'sum'.")
    if metric.reduce == "sum" and metric.weight_b is not None:
        raise ValueError(f"Metric {name!r} is a sum, which has no weight: leave out weight_b, or use reduce='mean'.")
    for what, value in (("sum_b", metric.sum_b), ("weight_b", metric.weight_b)):
        if value is None and what == "weight_b":
            continue
        if not isinstance(value, _ARRAY):
            raise TypeError(f"Metric {name!r}: {what} should be an array, not {_kind(value)}.")
        if jnp.shape(value)[:1] != (rows,):
            raise ValueError(
                f"Metric {name!r}: for {rows} rows {what} should have shape ({rows}, ...), one entry per example, but "
                f"it has shape {jnp.shape(value)}. Do not add over the batch, hetjax does."
            )
    if metric.weight_b is not None:
        sum_shape, weight_shape = jnp.shape(metric.sum_b)[1:], jnp.shape(metric.weight_b)[1:]
        try:
            fits = np.broadcast_shapes(sum_shape, weight_shape) == sum_shape
        except ValueError:
            fits = False
        if not fits:
            raise ValueError(
                f"Metric {name!r}: the weight of an example has shape {weight_shape}, which does not broadcast to "
                f"{sum_shape}, the shape of its sum. Give one weight per example, or one per entry."
            )


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
