"""From a Flax model and a loss of ONE example to the contract of hetjax."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
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
    """What a Step or Trainer takes: `Trainer(m, tx, ...)`, `trainer.init(m.params, m.model_state)`."""

    loss_fn: Callable[..., Any]
    eval_fn: Callable[..., Any]
    params: Tree
    model_state: Tree  # running statistics of BatchNorm; None without
    merge: Callable[[Tree, Tree], Any]  # (params, model_state) -> the model with these values
    quantum: int = 1  # counts are multiples of it: the group size of BatchNorm


def from_nnx(model: nnx.Module, example_loss: ExampleLoss) -> FlaxModel:
    """`example_loss(model, example, rngs)` gives the loss of one example: a number or an `Example` of numbers.

    Each example runs by vmap with its own random streams, so dropout does not depend on the split: `rngs` to pass on
    in a call, and the streams that layers of the model hold are set from the same key. In evaluation `rngs` is None and
    the model is in `.eval()` mode.

    Parameters and `nnx.BatchStat` variables are kept from step to step; every example finds all other variables as the
    model was given. Batch normalization has to be `hetjax.BatchNorm`.
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
        told = example_loss(live, example, nnx.Rngs(key))
        return told, nnx.state(live, nnx.BatchStat)

    def eval_one(params: Tree, stats: Tree, example: Tree, key: jax.Array) -> tuple[Any, Tree]:
        live = nnx.merge(eval_graph, params, stats, streams, rest, copy=True)
        return example_loss(live, example, None), ()

    def merge(params: Tree, model_state: Tree) -> nnx.Module:
        return nnx.merge(eval_graph, params, model_state if stateful else stats, streams, rest, copy=True)

    return _contract(train_one, eval_one, params, stats, groups, merge)


def from_linen(
    module: linen.Module,
    variables: Tree,
    example_loss: ExampleLoss,
    *,
    eval_module: linen.Module | None = None,
    group: int = 16,
) -> FlaxModel:
    """`example_loss(apply, example)` gives the loss of one example; `apply(x, ...)` calls the module on it.

    `variables` come from `module.init`. Dropout gets the example's own key under 'dropout'. `eval_module` is the module
    for evaluation where modes are fixed at construction (`use_running_average=True`, `deterministic=True`). Batch
    normalization has to be `hetjax.LinenBatchNorm`, and `group` is that of these layers.
    """
    params = variables["params"]
    stats = variables.get("batch_stats", {})
    fixed = {name: values for name, values in variables.items() if name not in ("params", "batch_stats")}
    quiet = eval_module or module

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
        return example_loss(lambda *args, **kwargs: quiet.apply(tree, *args, **kwargs), example), ()

    def merge(params: Tree, model_state: Tree) -> linen.Module:
        return quiet.bind({"params": params, "batch_stats": model_state or {}, **fixed})

    return _contract(train_one, eval_one, params, stats, [group] if jax.tree.leaves(stats) else [], merge)


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
        told, stats_b = over_groups(one, quantum, mask_b, batch, keys_b)
        wide = lambda x: x.astype(jnp.promote_types(x.dtype, jnp.float32))
        total = lambda x: jnp.sum(jnp.where(mask_b.reshape(-1, *[1] * (x.ndim - 1)), wide(x), 0), axis=0)
        count = jnp.sum(mask_b, dtype=jnp.float32)
        return as_example(told), (jax.tree.map(total, stats_b), count)

    def eval_fn(params: Tree, state: Tree, batch: Tree, keys_b: jax.Array, mask_b: jax.Array) -> tuple[Example, Tree]:
        told = jax.vmap(lambda example, key: eval_one(params, state, example, key)[0])(batch, keys_b)
        return as_example(told), ()

    return FlaxModel(loss_fn, eval_fn, params, stats, merge, quantum)


def _rekeyed(streams: Tree, key: jax.Array) -> Tree:
    """Every random stream that the model holds, started afresh from this example's key."""
    leaves, tree = jax.tree.flatten(streams)
    is_key = lambda leaf: jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    fresh = [jax.random.fold_in(key, i) if is_key(leaf) else jnp.zeros_like(leaf) for i, leaf in enumerate(leaves)]
    return jax.tree.unflatten(tree, fresh)


def _groups(model: nnx.Module) -> list[int]:
    """Group sizes of the model's BatchNorm layers; a layer that depends on the split is refused."""
    groups = []
    for path, module in nnx.iter_modules(model):
        if isinstance(module, nnx.BatchNorm):
            raise _batch_norm(path, "flax.nnx.BatchNorm", "hetjax.BatchNorm")
        if isinstance(module, BatchNorm):
            groups.append(module.group)
    return groups


def _refuse_batch_norm(call: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
    """An interceptor of Linen's methods; a BatchNorm that only uses its running averages may stay."""
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
