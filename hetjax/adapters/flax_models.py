"""Flax models: turn a model and the loss of one example into the loss function that hetjax takes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen, nnx

from hetjax.adapters.batch_norm import over_groups
from hetjax.adapters.batch_norm_layers import NO_BLOCKS, check_unwritten, linen_interceptor, momenta_of, nnx_layers
from hetjax.adapters.contract import Example, as_example
from hetjax.adapters.frozen import frozen
from hetjax.adapters.linen_calls import apply_in_training
from hetjax.adapters.loss_arguments import AskedLoss, Loss, chosen_loss
from hetjax.adapters.lost_writes import LostWrites
from hetjax.adapters.nnx_optimizer import own_copy, write_optimizer
from hetjax.adapters.nnx_versions import iter_modules, value_of
from hetjax.arguments import whole
from hetjax.reduce.trainable import unfrozen
from hetjax.reduce.update import StateSums
from hetjax.state import LiveState, State

Tree = Any


@dataclass(frozen=True)
class FlaxModel:
    """A Flax model for `Step` and `Trainer`, as made by `from_nnx` and `from_linen`.

    Examples:
        >>> model = hetjax.from_nnx(network, example_loss)
        >>> trainer = hetjax.Trainer(model, optax.adamw(1e-3), batch_size=512)
        >>> state = trainer.init(model.params, model.model_state)

    Attributes:
        loss_fn: loss for training; see `hetjax.Step`.
        eval_fn: loss for evaluation.
        params: initial parameters; those that `wrt` does not select are marked as frozen.
        model_state: initial running statistics of BatchNorm; None without.
        merge: (params, model_state) -> the model with these values.
        quantum: counts are multiples of it: the group size of BatchNorm or of a batch_loss, or 1.
        predict_fn: outputs for `Trainer.predict`; None if none were asked for.
    """

    loss_fn: Callable[..., Any]
    eval_fn: Callable[..., Any]
    params: Tree
    model_state: Tree
    merge: Callable[[Tree, Tree], Any]
    quantum: int = 1
    predict_fn: Callable[..., Any] | None = None

    def update(self, model: nnx.Module, state: State | LiveState, optimizer: nnx.Optimizer | None = None) -> None:
        """Write the result of training into a Flax NNX model, and its optimizer, in place.

        Examples:
            >>> adapted = hetjax.from_nnx(model, example_loss)
            >>> trainer = hetjax.Trainer(adapted, optimizer, batch_size=512)     # optimizer: an nnx.Optimizer
            >>> state, history = trainer.fit(trainer.init(adapted.params), data, epochs=10)
            >>> adapted.update(model, state, optimizer)

        Args:
            model: the model that was given to `from_nnx`, or one like it.
            state: of `Step` or `Trainer`, with one set of parameters (`Trainer.answer`).
            optimizer: an optimizer of the model, whose state and step count are replaced.

        Raises:
            TypeError: if the model is not an NNX module; use `merge` for Linen.
            ValueError: if the state holds several sets of parameters, or the optimizer is for other parameters.
        """
        if not isinstance(model, nnx.Module):
            raise TypeError(
                f"update writes into a Flax NNX module, got {type(model).__name__}. For Linen, use merge(state.params, "
                "state.model_state)."
            )
        state = state.whole() if isinstance(state, LiveState) else state
        if state.replicas:
            raise ValueError("The state holds one set of parameters per worker or node: pass trainer.answer(state).")
        for values in (unfrozen(state.params), state.model_state):
            if jax.tree.leaves(values):
                nnx.update(model, jax.tree.map(own_copy, values))
        if optimizer is not None:
            write_optimizer(optimizer, state)


def from_nnx(
    model: nnx.Module,
    example_loss: Loss | None = None,
    *,
    batch_loss: Loss | None = None,
    group: int = 16,
    wrt: Any = None,
    predict: Callable[[Any, Any], Any] | None = None,
) -> FlaxModel:
    """Turn a Flax NNX model and the loss of one example into a `FlaxModel`.

    Examples are vmapped, each with its own random streams, so dropout does not depend on the split: `rngs` and the
    streams held by layers of the model derive from the example's key. Parameters and `nnx.BatchStat` variables are kept
    from step to step; all other variables are the given model's for every example, and a warning names those that the
    model writes.

    Training uses the modes of the given model: a Dropout or BatchNorm layer that was set to `.eval()` stays so, and its
    statistics are constant. Call `model.train()` before, if the whole model was in evaluation mode.

    Examples:
        >>> def example_loss(model, example, rngs):
        ...     logits = model(example["image"])
        ...     return optax.softmax_cross_entropy_with_integer_labels(logits, example["label"])
        >>> model = hetjax.from_nnx(network, example_loss)

    Args:
        model: the model; it is not changed. Batch normalization in training mode must be `hetjax.BatchNorm`;
            see `convert_batch_norm`.
        example_loss: `example_loss(model, example, rngs)` returns the loss of one example, a number or an `Example` of
            numbers, in which a `Metric` may hold arrays. In evaluation `rngs` is None and the model is in `.eval()`
            mode. A parameter named `train` receives the mode: `example_loss(model, example, rngs, train)`.
        batch_loss: instead of example_loss, for models that take a block of rows: `batch_loss(model, batch, keys)`
            returns the loss of each row. It is called on fixed groups of consecutive rows of the global batch, so that
            the result does not depend on the split. In evaluation `keys` is None. Parameters named `mask` and `train`
            receive which rows are valid (a short last group is filled up by copies) and whether it is training.
        group: rows of a group, for batch_loss; counts are multiples of it.
        wrt: a filter of the variables to train, such as `nnx.LoRAParam`; see `hetjax.frozen`. All other variables are
            constant: without gradient, exchange and optimizer state. Default: all of `nnx.Param`.
        predict: `predict(model, example)` returns the output of one example for `Trainer.predict`, an array or a tree
            of arrays; the model is in `.eval()` mode.

    Returns:
        Loss functions, parameters and model state.

    Raises:
        TypeError: unless exactly one of example_loss and batch_loss is given.
        ValueError: if the model contains `flax.nnx.BatchNorm` in training mode.
    """
    loss = chosen_loss(example_loss, batch_loss, with_rngs=True)
    groups, momenta = nnx_layers(model)
    trained, evaluated = nnx.clone(model), nnx.clone(model)
    evaluated.eval()
    kept = nnx.Param if wrt is None else _all_arrays(wrt)
    live_stats = nnx.All(nnx.BatchStat, nnx.Not(_fixed_stats(trained)))
    graph, *states = nnx.split(trained, kept, live_stats, nnx.RngState, ...)
    params, stats, streams, rest = states
    params = params if wrt is None else frozen(params, wrt=wrt)
    eval_graph = nnx.graphdef(evaluated)
    stateful = bool(jax.tree.leaves(stats))
    writes = LostWrites(nnx.Any(live_stats, nnx.RngState))

    def train_one(params: Tree, stats: Tree, rows: Tree, key: jax.Array, mask: jax.Array | None) -> tuple[Any, Tree]:
        own = _rekeyed(streams, key[0] if loss.block else key)
        make = lambda: nnx.merge(graph, params, stats, own, rest, copy=True)
        run = lambda live: loss(live, rows, key if loss.block else nnx.Rngs(key), mask, train=True)
        returned, live = writes.call(make, run)
        return returned, nnx.state(live, live_stats)

    def eval_one(params: Tree, stats: Tree, rows: Tree, key: jax.Array, mask: jax.Array | None) -> tuple[Any, Tree]:
        live = nnx.merge(eval_graph, params, stats, streams, rest, copy=True)
        return loss(live, rows, None, mask, train=False), ()

    def predict_one(params: Tree, stats: Tree, example: Tree) -> Any:
        assert predict is not None
        return predict(nnx.merge(eval_graph, params, stats, streams, rest, copy=True), example)

    def merge(params: Tree, model_state: Tree) -> nnx.Module:
        stored = model_state if stateful else stats
        return nnx.merge(eval_graph, unfrozen(params), stored, streams, rest, copy=True)

    made = _contract(loss, train_one, eval_one, params, stats, groups, group, merge, momenta)
    return made if predict is None else replace(made, predict_fn=_over_batch(predict_one, stats))


def from_linen(
    module: linen.Module,
    variables: Tree,
    example_loss: Loss | None = None,
    *,
    batch_loss: Loss | None = None,
    eval_module: linen.Module | None = None,
    group: int = 16,
    wrt: Any = None,
    predict: Callable[[Any, Any], Any] | None = None,
    convert_batch_norm: bool = False,
    sync: str = "groups",
) -> FlaxModel:
    """Turn a Flax Linen module and the loss of one example into a `FlaxModel`.

    Examples are vmapped, each with random streams of its own under any name, so dropout does not depend on the split.

    The layers decide for themselves whether they train: a BatchNorm layer that uses its running averages in training is
    frozen, and its statistics stay the same to the bit.

    Args:
        module: the module for training. Batch normalization must be `hetjax.LinenBatchNorm`, or converted.
        variables: what `module.init` returned.
        example_loss: `example_loss(apply, example)` returns the loss of one example, a number or an `Example` of
            numbers; `apply(x, ...)` calls the module, with the arguments of `module.apply` but the variables; `rngs`
            take the place of the example's own, and with `mutable` it returns the output and these collections. A
            parameter named `train` receives whether it is training: `example_loss(apply, example, train)` may call
            `apply(x, train=train)`.
        batch_loss: instead of example_loss, for models that take a block of rows: `batch_loss(apply, batch, keys)`; see
            `from_nnx`.
        eval_module: the module for evaluation, where modes are fixed at construction (`use_running_average=True`,
            `deterministic=True`). Default: `module`.
        group: rows of a group, for batch_loss; counts are multiples of it. Each BatchNorm layer has a group size of its
            own, which must divide this one; converted layers have this one. 1, if all of them are frozen.
        wrt: which parameters to train: a function of path and parameter, or a tree of booleans like the parameters; see
            `hetjax.frozen`. Default: all.
        predict: `predict(apply, example)` returns the output of one example for `Trainer.predict`, an array or a tree
            of arrays; `apply(x, ...)` calls the module for evaluation.
        convert_batch_norm: let every `flax.linen.BatchNorm` take its statistics as `hetjax.LinenBatchNorm` does. The
            variables are the same.
        sync: 'groups' or 'exact' of converted layers.

    Returns:
        Loss functions, parameters and model state.

    Raises:
        TypeError: unless exactly one of example_loss and batch_loss is given.
        ValueError: if layers are to be converted, and sync is unknown or group is below 2.
    """
    loss = chosen_loss(example_loss, batch_loss, with_rngs=False)
    params = variables["params"] if wrt is None else frozen(variables["params"], wrt=wrt)
    stats = variables.get("batch_stats", {})
    fixed = {name: values for name, values in variables.items() if name not in ("params", "batch_stats")}
    if loss.block:  # of frozen layers: constant
        fixed, stats = {**fixed, "batch_stats": stats}, {}
    evaluated = eval_module or module
    momenta: dict[tuple[str, ...], float] = {}  # of the layers by path, known once the module was called
    intercept = linen_interceptor(group, sync, convert_batch_norm, momenta, loss.block)

    def train_one(params: Tree, stats: Tree, rows: Tree, key: jax.Array, mask: jax.Array | None) -> tuple[Any, Tree]:
        given = {"params": params, "batch_stats": stats, **fixed}
        seen = given["batch_stats"]

        def apply(*args: Any, **kwargs: Any) -> Any:
            nonlocal seen
            with linen.intercept_methods(intercept):
                out, seen = apply_in_training(module, given, key[0] if loss.block else key, *args, **kwargs)
            if loss.block:
                check_unwritten(given["batch_stats"], seen, momenta)
            return out

        return loss(apply, rows, key, mask, train=True), seen

    def evaluating(params: Tree, stats: Tree) -> Callable[..., Any]:
        def apply(*args: Any, **kwargs: Any) -> Any:
            with linen.intercept_methods(intercept):
                return evaluated.apply({"params": params, "batch_stats": stats, **fixed}, *args, **kwargs)

        return apply

    def eval_one(params: Tree, stats: Tree, rows: Tree, key: jax.Array, mask: jax.Array | None) -> tuple[Any, Tree]:
        return loss(evaluating(params, stats), rows, None, mask, train=False), ()

    def predict_one(params: Tree, stats: Tree, example: Tree) -> Any:
        assert predict is not None
        return predict(evaluating(params, stats), example)

    def merge(params: Tree, model_state: Tree) -> linen.Module:
        return evaluated.bind({"params": unfrozen(params), "batch_stats": model_state or {}, **fixed})

    groups = [group] if jax.tree.leaves(stats) else []
    made = _contract(loss, train_one, eval_one, params, stats, groups, group, merge, momenta)
    return made if predict is None else replace(made, predict_fn=_over_batch(predict_one, stats))


def _contract(
    loss: AskedLoss,
    train_one: Callable,
    eval_one: Callable,
    params: Tree,
    stats: Tree,
    groups: list[int],
    group: int,
    merge: Callable,
    momenta: Mapping[tuple[Any, ...], float],
) -> FlaxModel:
    stateful = bool(jax.tree.leaves(stats))
    if loss.block:
        if stateful:
            raise ValueError(NO_BLOCKS)
        return _block_contract(loss, train_one, eval_one, params, stats, whole("group", group, 1), merge)
    quantum = math.lcm(*groups) if groups else 1
    if not stateful:
        run = lambda one: (
            lambda params, batch, keys_b: as_example(
                jax.vmap(lambda example, key: one(unfrozen(params), stats, example, key, None)[0])(batch, keys_b)
            )
        )
        return FlaxModel(run(train_one), run(eval_one), params, None, merge)

    def loss_fn(params: Tree, state: Tree, batch: Tree, keys_b: jax.Array, mask_b: jax.Array) -> tuple[Example, Tree]:
        one = lambda example, key: train_one(unfrozen(params), state, example, key, None)
        losses, stats_b = over_groups(one, quantum, mask_b, batch, keys_b)
        wide = lambda x: x.astype(jnp.promote_types(x.dtype, jnp.float32))
        total = lambda x: jnp.sum(jnp.where(mask_b.reshape(-1, *[1] * (x.ndim - 1)), wide(x), 0), axis=0)
        count = jnp.sum(mask_b, dtype=jnp.float32)
        sums = jax.tree.map(total, stats_b)
        return as_example(losses), StateSums(sums, count, momenta_of(sums, momenta))

    def eval_fn(params: Tree, state: Tree, batch: Tree, keys_b: jax.Array, mask_b: jax.Array) -> tuple[Example, Tree]:
        one = lambda example, key: eval_one(unfrozen(params), state, example, key, None)[0]
        return as_example(jax.vmap(one)(batch, keys_b)), ()

    return FlaxModel(loss_fn, eval_fn, params, stats, merge, quantum)


def _block_contract(
    loss: AskedLoss, train_one: Callable, eval_one: Callable, params: Tree, stats: Tree, group: int, merge: Callable
) -> FlaxModel:
    """The contract of a batch_loss. A mask is part of the contract with model state, so that state is then empty."""

    def losses(one: Callable, params: Tree, batch: Tree, keys_b: jax.Array, mask_b: jax.Array | None) -> Example:
        rows = len(keys_b)
        if rows % group:
            raise ValueError(f"A block of {rows} rows does not consist of whole groups of {group}. Set {group=}.")
        split = lambda x: x.reshape(rows // group, group, *x.shape[1:])
        on_group = lambda batch, keys, mask: one(unfrozen(params), stats, batch, keys, mask)[0]
        groups = jax.tree.map(split, (batch, keys_b, mask_b))
        if mask_b is not None:
            groups = _without_empty_groups(*groups)
        example = as_example(jax.vmap(on_group)(*groups))
        return jax.tree.map(lambda x: x.reshape(rows, *x.shape[2:]), example)

    def with_mask(one: Callable, state_sums: Callable[[jax.Array], Tree]) -> Callable:
        def loss_fn(params: Tree, *given: Any) -> tuple[Example, Tree]:
            if len(given) == 2:
                raise TypeError("This model's batch_loss takes a mask: pass init(model.params, model.model_state).")
            _, batch, keys_b, mask_b = given
            return losses(one, params, batch, keys_b, mask_b), state_sums(mask_b)

        return loss_fn

    if "mask" in loss.names:
        train_fn = with_mask(train_one, lambda mask_b: ({}, jnp.sum(mask_b, dtype=jnp.float32)))
        return FlaxModel(train_fn, with_mask(eval_one, lambda mask_b: ()), params, {}, merge, group)
    run = lambda one: lambda params, batch, keys_b: losses(one, params, batch, keys_b, None)
    return FlaxModel(run(train_one), run(eval_one), params, None, merge, group)


def _without_empty_groups(batch_GxR: Tree, keys_GxR: jax.Array, mask_GxR: jax.Array) -> tuple[Tree, Any, Any]:
    """Replace groups of nothing but padding by the first group, as a mean over no rows would be NaN.

    The values of such a group are not used, but 0 * NaN is NaN in the gradient.
    """
    valid_G = mask_GxR.any(axis=1)
    mask_GxR = mask_GxR | ~valid_G[0]  # a worker without rows
    keep = lambda x: jnp.where(valid_G.reshape(-1, *[1] * (x.ndim - 1)), x, x[:1])
    return jax.tree.map(keep, (batch_GxR, keys_GxR, mask_GxR))


def _all_arrays(wrt: Any) -> Callable[..., bool]:
    """A filter of the variables to train and of all constant arrays: arguments of the programs, not part of them."""
    to_train = nnx.filterlib.to_predicate(wrt)

    def keep(path: Any, variable: Any) -> bool:
        if isinstance(variable, nnx.BatchStat | nnx.RngState):
            return False
        return isinstance(value_of(variable), jax.Array) or to_train(path, variable)

    return keep


def _fixed_stats(model: nnx.Module) -> Callable[..., bool]:
    """A filter of the variables of BatchNorm layers that use their running averages in training."""
    fixed = {path for path, module in iter_modules(model) if getattr(module, "use_running_average", False)}
    return lambda path, variable: tuple(path[:-1]) in fixed


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
