"""Flax models: turn a model and the loss of one example into the loss function that hetjax takes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen, nnx

from hetjax.adapters.batch_norm import BatchNorm, over_groups
from hetjax.adapters.contract import Example, as_example

Tree = Any
ExampleLoss = Callable[..., Any]


@dataclass(frozen=True)
class FlaxModel:
    """A Flax model for `Step` and `Trainer`, as made by `from_nnx` and `from_linen`.

    Example:
        >>> model = hetjax.from_nnx(network, example_loss)
        >>> trainer = hetjax.Trainer(model, optax.adamw(1e-3), batch_size=512)
        >>> state = trainer.init(model.params, model.model_state)

    Attributes:
        loss_fn: loss for training; see `hetjax.Step`.
        eval_fn: loss for evaluation.
        params: initial parameters.
        model_state: initial running statistics of BatchNorm; None without.
        merge: (params, model_state) -> the model with these values.
        quantum: counts are multiples of it: the group size of BatchNorm, or 1.
        predict_fn: outputs for `Trainer.predict`; None if none were asked for.
    """

    loss_fn: Callable[..., Any]
    eval_fn: Callable[..., Any]
    params: Tree
    model_state: Tree
    merge: Callable[[Tree, Tree], Any]
    quantum: int = 1
    predict_fn: Callable[..., Any] | None = None


def from_nnx(
    model: nnx.Module, example_loss: ExampleLoss, *, predict: Callable[[Any, Any], Any] | None = None
) -> FlaxModel:
    """Turn a Flax NNX model and the loss of one example into a `FlaxModel`.

    Examples are vmapped, each with its own random streams, so dropout does not depend on the split: `rngs` and the
    streams held by layers of the model derive from the example's key. Parameters and `nnx.BatchStat` variables are kept
    from step to step; all other variables are the given model's for every example.

    Example:
        >>> def example_loss(model, example, rngs):
        ...     logits = model(example["image"])
        ...     return optax.softmax_cross_entropy_with_integer_labels(logits, example["label"])
        >>> model = hetjax.from_nnx(network, example_loss)

    Args:
        model: the model; it is not changed. Batch normalization must be `hetjax.BatchNorm`.
        example_loss: `example_loss(model, example, rngs)` returns the loss of one example, a number or an `Example` of
            numbers, in which a `Metric` may hold arrays. In evaluation `rngs` is None and the model is in `.eval()`
            mode.
        predict: `predict(model, example)` returns the output of one example for `Trainer.predict`, an array or a tree
            of arrays; the model is in `.eval()` mode.

    Returns:
        Loss functions, parameters and model state.

    Raises:
        ValueError: if the model contains `flax.nnx.BatchNorm`.
    """
    groups = _groups(model)
    trained, evaluated = nnx.clone(model), nnx.clone(model)
    trained.train()
    evaluated.eval()
    graph, *states = nnx.split(trained, nnx.Param, nnx.BatchStat, nnx.RngState, ...)
    params, stats, streams, rest = states
    eval_graph = nnx.graphdef(evaluated)
    stateful = bool(jax.tree.leaves(stats))

    def train_one(params: Tree, stats: Tree, example: Tree, key: jax.Array) -> tuple[Any, Tree]:
        live = nnx.merge(graph, params, stats, _rekeyed(streams, key), rest, copy=True)
        loss = example_loss(live, example, nnx.Rngs(key))
        return loss, nnx.state(live, nnx.BatchStat)

    def eval_one(params: Tree, stats: Tree, example: Tree, key: jax.Array) -> tuple[Any, Tree]:
        live = nnx.merge(eval_graph, params, stats, streams, rest, copy=True)
        return example_loss(live, example, None), ()

    def predict_one(params: Tree, stats: Tree, example: Tree) -> Any:
        assert predict is not None
        return predict(nnx.merge(eval_graph, params, stats, streams, rest, copy=True), example)

    def merge(params: Tree, model_state: Tree) -> nnx.Module:
        return nnx.merge(eval_graph, params, model_state if stateful else stats, streams, rest, copy=True)

    made = _contract(train_one, eval_one, params, stats, groups, merge)
    return made if predict is None else replace(made, predict_fn=_over_batch(predict_one, stats))


def from_linen(
    module: linen.Module,
    variables: Tree,
    example_loss: ExampleLoss,
    *,
    eval_module: linen.Module | None = None,
    group: int = 16,
    predict: Callable[[Any, Any], Any] | None = None,
) -> FlaxModel:
    """Turn a Flax Linen module and the loss of one example into a `FlaxModel`.

    Examples are vmapped, each with its own key under 'dropout', so dropout does not depend on the split.

    Args:
        module: the module for training. Batch normalization must be `hetjax.LinenBatchNorm`.
        variables: what `module.init` returned.
        example_loss: `example_loss(apply, example)` returns the loss of one example, a number or an `Example` of
            numbers; `apply(x, ...)` calls the module.
        eval_module: the module for evaluation, where modes are fixed at construction (`use_running_average=True`,
            `deterministic=True`). Default: `module`.
        group: group size of the module's BatchNorm layers.
        predict: `predict(apply, example)` returns the output of one example for `Trainer.predict`, an array or a tree
            of arrays; `apply(x, ...)` calls the module for evaluation.

    Returns:
        Loss functions, parameters and model state.
    """
    params = variables["params"]
    stats = variables.get("batch_stats", {})
    fixed = {name: values for name, values in variables.items() if name not in ("params", "batch_stats")}
    evaluated = eval_module or module

    def train_one(params: Tree, stats: Tree, example: Tree, key: jax.Array) -> tuple[Any, Tree]:
        seen = stats

        def apply(*args: Any, **kwargs: Any) -> Any:
            nonlocal seen
            tree = {"params": params, "batch_stats": stats, **fixed}
            with linen.intercept_methods(_refuse_batch_norm):
                out, changed = module.apply(tree, *args, rngs={"dropout": key}, mutable=["batch_stats"], **kwargs)
            seen = changed.get("batch_stats", stats)
            return out

        return example_loss(apply, example), seen

    def eval_one(params: Tree, stats: Tree, example: Tree, key: jax.Array) -> tuple[Any, Tree]:
        tree = {"params": params, "batch_stats": stats, **fixed}
        return example_loss(lambda *args, **kwargs: evaluated.apply(tree, *args, **kwargs), example), ()

    def predict_one(params: Tree, stats: Tree, example: Tree) -> Any:
        assert predict is not None
        tree = {"params": params, "batch_stats": stats, **fixed}
        return predict(lambda *args, **kwargs: evaluated.apply(tree, *args, **kwargs), example)

    def merge(params: Tree, model_state: Tree) -> linen.Module:
        return evaluated.bind({"params": params, "batch_stats": model_state or {}, **fixed})

    made = _contract(train_one, eval_one, params, stats, [group] if jax.tree.leaves(stats) else [], merge)
    return made if predict is None else replace(made, predict_fn=_over_batch(predict_one, stats))


def _contract(
    train_one: Callable, eval_one: Callable, params: Tree, stats: Tree, groups: list[int], merge: Callable
) -> FlaxModel:
    stateful = bool(jax.tree.leaves(stats))
    quantum = math.lcm(*groups) if groups else 1
    if not stateful:
        run = lambda one: (
            lambda params, batch, keys_b: as_example(
                jax.vmap(lambda example, key: one(params, stats, example, key)[0])(batch, keys_b)
            )
        )
        return FlaxModel(run(train_one), run(eval_one), params, None, merge)

    def loss_fn(params: Tree, state: Tree, batch: Tree, keys_b: jax.Array, mask_b: jax.Array) -> tuple[Example, Tree]:
        one = lambda example, key: train_one(params, state, example, key)
        losses, stats_b = over_groups(one, quantum, mask_b, batch, keys_b)
        wide = lambda x: x.astype(jnp.promote_types(x.dtype, jnp.float32))
        total = lambda x: jnp.sum(jnp.where(mask_b.reshape(-1, *[1] * (x.ndim - 1)), wide(x), 0), axis=0)
        count = jnp.sum(mask_b, dtype=jnp.float32)
        return as_example(losses), (jax.tree.map(total, stats_b), count)

    def eval_fn(params: Tree, state: Tree, batch: Tree, keys_b: jax.Array, mask_b: jax.Array) -> tuple[Example, Tree]:
        losses = jax.vmap(lambda example, key: eval_one(params, state, example, key)[0])(batch, keys_b)
        return as_example(losses), ()

    return FlaxModel(loss_fn, eval_fn, params, stats, merge, quantum)


def _over_batch(predict_one: Callable[[Tree, Tree, Tree], Any], stats: Tree) -> Callable[..., Any]:
    """Return the function of a batch for predictions, from that of one example."""
    if jax.tree.leaves(stats):
        return lambda params, state, batch, keys_b: jax.vmap(lambda one: predict_one(params, state, one))(batch)
    return lambda params, batch, keys_b: jax.vmap(lambda one: predict_one(params, stats, one))(batch)


def _rekeyed(streams: Tree, key: jax.Array) -> Tree:
    """Return the random streams of a model, restarted from an example's key."""
    leaves, tree = jax.tree.flatten(streams)
    is_key = lambda leaf: jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    fresh = [jax.random.fold_in(key, i) if is_key(leaf) else jnp.zeros_like(leaf) for i, leaf in enumerate(leaves)]
    return jax.tree.unflatten(tree, fresh)


def _groups(model: nnx.Module) -> list[int]:
    """Return the group sizes of the model's BatchNorm layers; refuse layers that depend on the split."""
    groups = []
    for path, module in nnx.iter_modules(model):
        if isinstance(module, nnx.BatchNorm):
            raise _batch_norm(path, "flax.nnx.BatchNorm", "hetjax.BatchNorm")
        if isinstance(module, BatchNorm):
            groups.append(module.group)
    return groups


def _refuse_batch_norm(call: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
    """Intercept Linen's methods and refuse a BatchNorm, unless it only uses its running averages."""
    layer = context.module
    if isinstance(layer, linen.BatchNorm) and context.method_name == "__call__":
        given = args[1] if len(args) > 1 else kwargs.get("use_running_average")
        if not (layer.use_running_average if given is None else given):
            raise _batch_norm(layer.path, "flax.linen.BatchNorm", "hetjax.LinenBatchNorm")
    return call(*args, **kwargs)


def _batch_norm(path: Iterable[Any], given: str, instead: str) -> ValueError:
    return ValueError(
        f"The layer {'.'.join(map(str, path))} is {given}, whose statistics depend on how the batch is split among "
        f"workers. Use {instead} (fixed groups of the global batch), GroupNorm or LayerNorm."
    )
