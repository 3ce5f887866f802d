"""The BatchNorm layers of a model: find those of hetjax, convert or refuse those of Flax.

The statistics of Flax's own layers depend on how the batch is split among workers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import jax
from flax import linen, nnx

from hetjax.adapters.batch_norm import BatchNorm, LinenBatchNorm, apply_linen, check_options, trains
from hetjax.adapters.nnx_versions import iter_modules

Path = tuple[Any, ...]

NO_BLOCKS = (
    "batch_loss does not go together with BatchNorm layers in training mode, whose groups are formed by example_loss. "
    "Use example_loss, or set these layers to evaluation mode."
)
_KEPT = 1.0  # momentum of a frozen layer: its statistics stay the same to the bit


def convert_batch_norm(model: nnx.Module, group: int = 16, sync: str = "groups") -> nnx.Module:
    """Return a copy of a Flax NNX model in which every `flax.nnx.BatchNorm` is a `hetjax.BatchNorm`.

    Parameters, running averages, momentum and all other settings are kept, and so are the paths of all variables: a
    checkpoint of either model fits the other.

    Examples:
        >>> model = hetjax.from_nnx(hetjax.convert_batch_norm(network), example_loss)

    Args:
        model: the model; it is not changed. Layers that are `hetjax.BatchNorm` already stay as they are.
        group: samples of a group, at least 2.
        sync: 'groups', or 'exact' for statistics over the whole global batch, which needs engine='masked'.

    Returns:
        The converted copy.

    Raises:
        ValueError: if sync is unknown, group is below 2, or a layer has axis_index_groups.
    """
    check_options(sync, group, None)
    converted = nnx.clone(model)
    for _, layer in iter_modules(converted):
        if type(layer) is nnx.BatchNorm:  # a subclass may compute something else
            check_options(sync, group, layer.axis_index_groups)
            # The attributes are the same. A new object would have to replace this one in every list that holds it.
            layer.__class__ = BatchNorm
            ours = cast(BatchNorm, layer)
            ours.group, ours.sync = group, sync
    return converted


def nnx_layers(model: nnx.Module) -> tuple[list[int], dict[Path, float]]:
    """Return group sizes and momenta of BatchNorm layers in training mode, or raise ValueError for one of Flax."""
    groups, momenta = [], {}
    for path, layer in iter_modules(model):
        if getattr(layer, "use_running_average", False):
            continue
        if isinstance(layer, BatchNorm):
            groups.append(layer.group)
            momenta[path] = float(layer.momentum)
        elif isinstance(layer, nnx.BatchNorm):
            raise _refusal(path, layer, nnx.BatchNorm)
    return groups, momenta


def linen_interceptor(
    group: int, sync: str, convert: bool, momenta: dict[Path, float], block: bool
) -> Callable[[Callable[..., Any], Any, Any, Any], Any]:
    """Return an interceptor of Linen's methods that converts or refuses BatchNorm layers of Flax in training mode.

    Args:
        group: samples of a group of converted layers.
        sync: 'groups' or 'exact' of converted layers.
        convert: whether to convert.
        momenta: receives the momentum of each layer that was called, by its path; 1 if it was never in training mode.
        block: whether the module is called with a block of rows, which refuses layers in training mode.
    """
    if convert:
        check_options(sync, group, None)

    def intercept(call: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
        layer = context.module
        if not isinstance(layer, linen.BatchNorm) or context.method_name != "__call__":
            return call(*args, **kwargs)
        if not trains(layer, args[1] if len(args) > 1 else kwargs.get("use_running_average")):
            momenta.setdefault(layer.path, _KEPT)
            return call(*args, **kwargs)
        if block:
            raise ValueError(NO_BLOCKS)
        momenta[layer.path] = float(layer.momentum)
        if isinstance(layer, LinenBatchNorm):
            return call(*args, **kwargs)
        if convert and type(layer) is linen.BatchNorm:  # a subclass may compute something else
            return apply_linen(layer, group, sync, *args, **kwargs)
        raise _refusal(layer.path, layer, linen.BatchNorm)

    return intercept


def momenta_of(stats: Any, layers: Mapping[tuple[Any, ...], float]) -> tuple[float | None, ...]:
    """Return the momentum of each leaf of the statistics, given that of each BatchNorm layer by its path."""
    of_name = {".".join(map(str, (*path, name))): layers[path] for path in layers for name in ("mean", "var")}
    return tuple(of_name.get(_name(path)) for path, _ in jax.tree_util.tree_leaves_with_path(stats))


def check_unwritten(before: Any, after: Any, layers: Mapping[tuple[Any, ...], float]) -> None:
    """Raise ValueError if a call that was traced has changed statistics of Linen layers that are constants."""
    names = [_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(before)]
    leaves = zip(names, momenta_of(before, layers), jax.tree.leaves(before), jax.tree.leaves(after), strict=True)
    written = [name for name, momentum, old, new in leaves if new is not old and momentum != _KEPT]
    if written:
        raise ValueError(f"A layer changes its statistics {', '.join(written)}. {NO_BLOCKS}")


def _name(path: Iterable[Any]) -> str:
    return jax.tree_util.keystr(tuple(path), simple=True, separator=".").removesuffix(".value")


def _refusal(path: Iterable[Any], layer: Any, stock: type) -> ValueError:
    kind, instead, conversion = (
        ("flax.nnx.BatchNorm", "hetjax.BatchNorm", "hetjax.convert_batch_norm(model)")
        if stock is nnx.BatchNorm
        else ("flax.linen.BatchNorm", "hetjax.LinenBatchNorm", "from_linen(..., convert_batch_norm=True)")
    )
    convert = f"convert all such layers with {conversion}, "
    if type(layer) is not stock:
        kind, convert = f"{type(layer).__name__}, a kind of {kind}", ""
    return ValueError(
        f"The layer {'.'.join(map(str, path))} is {kind}, whose statistics depend on how the batch is split among "
        f"workers. Use {instead} (fixed groups of the global batch) in its place, {convert}or use GroupNorm or "
        "LayerNorm."
    )
