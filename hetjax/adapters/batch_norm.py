"""Batch normalization whose result does not depend on how the batch is split among workers.

With sync='groups' statistics are taken over fixed groups of consecutive samples of the global batch; counts and
microbatches are multiples of the group, so any split gives the same numbers. Only a short last group is masked. With
sync='exact' they are taken over all valid samples of all workers, which needs a collective in the forward pass, and so
the masked engine.

The layers see one example; the batch is reached through two vmapped axes, the samples of a group and the groups.

Ioffe and Szegedy, Batch Normalization, ICML 2015; groups are the "ghost batches" of Hoffer et al., NeurIPS 2017.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen, nnx

from hetjax.adapters.nnx_versions import promote_dtype
from hetjax.adapters.sync_axis import SyncAxis

SAMPLES, GROUPS = "hetjax_samples", "hetjax_groups"  # names of the vmapped axes
_VALID: ContextVar[jax.Array | None] = ContextVar("hetjax_valid", default=None)


@contextmanager
def _example_is_valid(valid: jax.Array) -> Iterator[None]:
    token = _VALID.set(valid)
    try:
        yield
    finally:
        _VALID.reset(token)


def over_groups(one: Callable[..., Any], group: int, mask_b: jax.Array, *args_b: Any) -> Any:
    """Map `one(*args)` over the examples of a batch; BatchNorm layers inside see their group and the mask."""

    def example(valid: jax.Array, *args: Any) -> Any:
        with _example_is_valid(valid):
            return one(*args)

    rows = len(mask_b)
    if rows % group:
        raise ValueError(f"A block of {rows} rows does not consist of whole groups of {group}. Set quantum={group}.")
    split = lambda x: x.reshape(rows // group, group, *x.shape[1:])
    out = jax.vmap(jax.vmap(example, axis_name=SAMPLES), axis_name=GROUPS)(*jax.tree.map(split, (mask_b, *args_b)))
    return jax.tree.map(lambda x: x.reshape(rows, *x.shape[2:]), out)


def batch_statistics(
    x: jax.Array, axes: tuple[int, ...], group: int, sync: str, mask: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Return mean and variance per feature, in float32 or wider, over the valid samples of a group or of the batch.

    Args:
        x: one example.
        axes: its axes that are averaged: all but the feature axes.
        group: samples of a group, a divisor of the vmapped axis of samples.
        sync: 'groups' or 'exact'.
        mask: the positions of the example that count, broadcastable to x. Default: all.
    """
    valid = _VALID.get()
    if valid is None:
        raise ValueError(
            "hetjax.BatchNorm was called in training mode outside of hetjax, where the batch is unknown. Use from_nnx "
            "or from_linen, or set the model to evaluation mode (with from_linen: pass eval_module)."
        )
    x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    where = None if mask is None else jnp.broadcast_to(jnp.asarray(mask, bool), x.shape)

    def mean(values: jax.Array) -> jax.Array:
        if where is None:  # every example has the same number of positions
            one = jnp.mean(values, axis=axes), jnp.ones((), x.dtype)
        else:
            one = jnp.sum(values, axis=axes, where=where), jnp.sum(where, axis=axes, dtype=x.dtype)
        # One sum per array: before JAX 0.8 a psum of several cannot be transposed if only some have a gradient.
        total, count = (_group_sum(jnp.where(valid, part, 0), group, sync) for part in one)
        return total / jnp.maximum(count, 1)

    center = mean(x)
    return center, mean(jnp.square(x - jnp.expand_dims(center, axes)))


def _group_sum(part: jax.Array, group: int, sync: str) -> jax.Array:
    """Sum over the examples of a group, or with sync='exact' over those of all workers."""
    samples = jax.lax.axis_size(SAMPLES)
    if sync == "exact":
        return SyncAxis.current().sum(jax.lax.psum(jax.lax.psum(part, SAMPLES), GROUPS))
    if samples == group:
        return jax.lax.psum(part, SAMPLES)
    if samples % group:
        raise ValueError(
            f"A BatchNorm layer has groups of {group} samples, but the batch is cut into blocks of {samples}, which do "
            f"not consist of whole groups. Pass group={math.lcm(samples, group)} to from_linen, or group={samples} to "
            "the layer."
        )
    own = jax.lax.axis_index(SAMPLES) // group
    part_S = jax.lax.all_gather(part, SAMPLES)
    return part_S.reshape(samples // group, group, *part.shape).sum(1)[own]


def check_options(sync: str, group: int, axis_index_groups: Any) -> None:
    """Raise ValueError unless a layer with these options has statistics that do not depend on the split."""
    if sync not in ("groups", "exact"):
        raise ValueError(f"sync must be 'groups' (fixed groups of the global batch) or 'exact', got {sync!r}.")
    if group < 2:
        raise ValueError(f"A group of {group} has no statistics: use at least 2 samples (default: 16).")
    if axis_index_groups is not None:
        raise ValueError(
            f"axis_index_groups={axis_index_groups} selects devices, but here statistics do not depend on which device "
            "computes a sample. Leave it out and choose the samples of a group by group=... ."
        )


def _reduced(ndim: int, axis: int | Iterable[int]) -> tuple[int, ...]:
    """Return all axes but the feature axes."""
    features = (axis,) if isinstance(axis, int) else tuple(axis)
    if not all(-ndim <= a < ndim for a in features):
        raise ValueError(
            f"A BatchNorm layer has axis={axis}, but its input has {ndim} axes: an example has no batch axis. Count "
            "from the last axis, such as axis=-1."
        )
    return tuple(i for i in range(ndim) if i not in [a % ndim for a in features])


def _normalize(
    x: jax.Array,
    mean: jax.Array,
    var: jax.Array,
    scale: Any,
    bias: Any,
    axes: tuple[int, ...],
    epsilon: float,
    dtype: Any,
) -> jax.Array:
    wide = lambda vector: jnp.expand_dims(vector, axes)
    y = (x - wide(mean)) * jax.lax.rsqrt(wide(var) + epsilon)
    if scale is not None:
        y = y * wide(scale)
    if bias is not None:
        y = y + wide(bias)
    return y.astype(linen.dtypes.canonicalize_dtype(x, scale, bias, dtype=dtype))


class BatchNorm(nnx.BatchNorm):
    """Batch normalization for Flax NNX, independent of how the batch is split among workers.

        y = (x - mean) / sqrt(var + epsilon) * scale + bias

    It takes the place of `flax.nnx.BatchNorm`: the same arguments, and the same variables under the same paths. In
    training mean and var are those of fixed groups of consecutive samples of the global batch (Ioffe and Szegedy, ICML
    2015; Hoffer et al., NeurIPS 2017), and after each step hetjax blends them into the running averages:

        running <- momentum * running + (1 - momentum) * (mean over all samples of their group's statistics)

    In evaluation mode (`use_running_average`, set by `model.eval()`) the running averages are used. A layer called
    several times for one example keeps the statistics of the last call.

    Args:
        num_features: size of the feature axis.
        group: samples of a group, at least 2.
        sync: 'groups', or 'exact' for statistics over the whole global batch, which needs engine='masked'.
        rngs: random streams for scale_init and bias_init. Default: `nnx.Rngs(0)`.
        **options: the other arguments of `flax.nnx.BatchNorm`, with its defaults: use_running_average, axis, momentum
            (0.99), epsilon, dtype, param_dtype, use_bias, use_scale, bias_init, scale_init, promote_dtype,
            bias_metadata, scale_metadata. `axis` counts the axes of one example: a negative one fits with and without
            a batch axis. `axis_name` and `use_fast_variance` have no effect: hetjax sums over the batch itself, and
            the variance is always E|x - E x|^2. `axis_index_groups` is refused.

    Raises:
        ValueError: if sync is unknown, group is below 2, or axis_index_groups is given.
    """

    def __init__(
        self,
        num_features: int,
        *,
        group: int = 16,
        sync: str = "groups",
        rngs: nnx.Rngs | None = None,
        **options: Any,
    ):
        check_options(sync, group, options.get("axis_index_groups"))
        super().__init__(num_features, rngs=nnx.Rngs(0) if rngs is None else rngs, **options)
        self.group, self.sync = group, sync

    def __call__(
        self, x: jax.Array, use_running_average: bool | None = None, *, mask: jax.Array | None = None
    ) -> jax.Array:
        """Normalize one example.

        Args:
            x: one example without a batch axis.
            use_running_average: use the running averages. Default: the layer's own `use_running_average`.
            mask: the positions of x that enter the statistics, broadcastable to x. Default: all.

        Returns:
            The normalized example.

        Raises:
            ValueError: if x does not have num_features features.
        """
        axes = _reduced(x.ndim, self.axis)
        if math.prod(n for i, n in enumerate(x.shape) if i not in axes) != self.num_features:
            raise ValueError(
                f"A BatchNorm layer of {self.num_features} features with axis={self.axis} was called with an example "
                f"of shape {x.shape}. An example has no batch axis: count from the last axis, such as axis=-1."
            )
        average = self.use_running_average if use_running_average is None else use_running_average
        value = lambda variable: None if variable is None else variable[...]
        x, mean, var, scale, bias = promote_dtype(
            self, (x, self.mean[...], self.var[...], value(self.scale), value(self.bias))
        )
        if not average:
            mean, var = batch_statistics(x, axes, self.group, self.sync, mask)
            self.mean[...], self.var[...] = mean, var
        return _normalize(x, mean, var, scale, bias, axes, self.epsilon, self.dtype)


class LinenBatchNorm(linen.BatchNorm):
    """Batch normalization for Flax Linen, independent of the split; see `BatchNorm`.

    It takes the place of `flax.linen.BatchNorm`: the same arguments in the same order, and the same variables under the
    same paths, `BatchNorm_0` where the layer has no name. The statistics are in the collection `batch_stats`.

    Attributes:
        use_running_average: use the running averages instead of the batch's statistics, for evaluation.
        axis: the feature axis of an example; a negative one fits with and without a batch axis.
        momentum: share of the running averages that is kept in a step.
        epsilon: added to the variance.
        dtype: of the output. Default: that of input and parameters.
        param_dtype: of the parameters.
        use_bias, use_scale: whether there is a bias and a scale.
        bias_init, scale_init: their initializers.
        axis_name, use_fast_variance: no effect: hetjax sums over the batch itself, and the variance is always
            E|x - E x|^2.
        axis_index_groups: refused, as it selects devices.
        force_float32_reductions: whether the running averages are kept in float32, and not in param_dtype.
        group: samples of a group, at least 2.
        sync: 'groups', or 'exact' for statistics over the whole global batch, which needs engine='masked'.
    """

    group: int = 16
    sync: str = "groups"

    @linen.compact
    def __call__(
        self, x: jax.Array, use_running_average: bool | None = None, *, mask: jax.Array | None = None
    ) -> jax.Array:
        """Normalize one example.

        Args:
            x: one example without a batch axis.
            use_running_average: use the running averages. Default: the layer's own `use_running_average`, or False.
            mask: the positions of x that enter the statistics, broadcastable to x. Default: all.

        Returns:
            The normalized example.
        """
        return apply_linen(self, self.group, self.sync, x, use_running_average, mask=mask)


LinenBatchNorm.__name__ = "BatchNorm"  # Linen names a layer after its class, and checkpoints hold the name


def apply_linen(
    layer: linen.BatchNorm,
    group: int,
    sync: str,
    x: jax.Array,
    use_running_average: bool | None = None,
    *,
    mask: jax.Array | None = None,
) -> jax.Array:
    """Call a `linen.BatchNorm`, of Flax or of hetjax, with the statistics of a group; inside its `__call__`."""
    check_options(sync, group, layer.axis_index_groups)
    axes = _reduced(x.ndim, layer.axis)
    features = [n for i, n in enumerate(x.shape) if i not in axes]
    kept = jnp.float32 if layer.force_float32_reductions else layer.param_dtype
    mean = layer.variable("batch_stats", "mean", jnp.zeros, features, kept)
    var = layer.variable("batch_stats", "var", jnp.ones, features, kept)
    scale = layer.param("scale", layer.scale_init, features, layer.param_dtype) if layer.use_scale else None
    bias = layer.param("bias", layer.bias_init, features, layer.param_dtype) if layer.use_bias else None
    if trains(layer, use_running_average) and not layer.is_initializing():
        mean.value, var.value = batch_statistics(x, axes, group, sync, mask)
    return _normalize(x, mean.value, var.value, scale, bias, axes, layer.epsilon, layer.dtype)


def trains(layer: linen.BatchNorm, use_running_average: bool | None = None) -> bool:
    """Return whether a call of a Linen layer with this argument takes statistics of the batch."""
    return not (layer.use_running_average if use_running_average is None else use_running_average)
