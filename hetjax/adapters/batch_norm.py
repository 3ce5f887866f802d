"""Batch normalization whose result does not depend on how the batch is split among workers.

With sync='groups' statistics are taken over fixed groups of consecutive samples of the global batch; counts and
microbatches are multiples of the group, so any split gives the same numbers. Only a short last group is masked. With
sync='exact' they are taken over all valid samples of all workers, which needs a collective in the forward pass, and so
the masked engine.

The layers see one example; the batch is reached through two vmapped axes, the samples of a group and the groups.

Ioffe and Szegedy, Batch Normalization, ICML 2015; groups are the "ghost batches" of Hoffer et al., NeurIPS 2017.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen, nnx

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


def batch_statistics(x: jax.Array, sync: str) -> tuple[jax.Array, jax.Array]:
    """Return mean and variance per feature, in float32 or wider, over the valid samples of a group or of the batch."""
    valid = _VALID.get()
    if valid is None:
        raise ValueError(
            "hetjax.BatchNorm was called in training mode outside of hetjax, where the batch is unknown. Use from_nnx "
            "or from_linen, or set the model to evaluation mode."
        )
    x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    axes = tuple(range(x.ndim - 1))

    def mean(values: jax.Array) -> jax.Array:
        parts = jnp.where(valid, jnp.mean(values, axis=axes), 0), valid.astype(x.dtype)
        total, count = jax.lax.psum(parts, SAMPLES)
        if sync == "exact":
            total, count = SyncAxis.current().sum(jax.lax.psum((total, count), GROUPS))
        return total / jnp.maximum(count, 1)

    center = mean(x)
    return center, mean(jnp.square(x - center))


def _check(sync: str, group: int) -> None:
    if sync not in ("groups", "exact"):
        raise ValueError(f"sync must be 'groups' (fixed groups of the global batch) or 'exact', got {sync!r}.")
    if group < 2:
        raise ValueError(f"A group of {group} has no statistics: use at least 2 samples (default: 16).")


def _normalize(
    x: jax.Array, mean: jax.Array, var: jax.Array, scale: Any, bias: Any, epsilon: float, dtype: Any
) -> jax.Array:
    return ((x - mean) * jax.lax.rsqrt(var + epsilon) * scale + bias).astype(dtype or x.dtype)


class BatchNorm(nnx.Module):
    """Batch normalization for Flax NNX, independent of how the batch is split among workers.

        y = (x - mean) / sqrt(var + epsilon) * scale + bias

    In training mean and var are those of fixed groups of consecutive samples of the global batch (Ioffe and Szegedy,
    ICML 2015; Hoffer et al., NeurIPS 2017), and hetjax averages them over the steps. In evaluation mode
    (`use_running_average`, set by `model.eval()`) the running averages are used.

    Args:
        features: size of the last axis.
        group: samples of a group, at least 2.
        sync: 'groups', or 'exact' for statistics over the whole global batch, which needs engine='masked'.
        epsilon: added to the variance.
        dtype: of the output. Default: that of the input.
        rngs: not used; accepted as in other NNX layers.

    Raises:
        ValueError: if sync is unknown, or group is below 2.
    """

    def __init__(
        self,
        features: int,
        *,
        group: int = 16,
        sync: str = "groups",
        epsilon: float = 1e-5,
        dtype: Any = None,
        rngs: nnx.Rngs | None = None,
    ):
        _check(sync, group)
        self.group, self.sync, self.epsilon, self.dtype = group, sync, epsilon, dtype
        self.use_running_average = False
        self.scale, self.bias = nnx.Param(jnp.ones(features)), nnx.Param(jnp.zeros(features))
        self.mean, self.var = nnx.BatchStat(jnp.zeros(features)), nnx.BatchStat(jnp.ones(features))

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalize one example.

        Args:
            x: one example without a batch axis, features last.

        Returns:
            The normalized example.
        """
        if self.use_running_average:
            mean, var = self.mean[...], self.var[...]
        else:
            mean, var = batch_statistics(x, self.sync)
            self.mean[...], self.var[...] = mean, var
        return _normalize(x, mean, var, self.scale[...], self.bias[...], self.epsilon, self.dtype)


class LinenBatchNorm(linen.Module):
    """Batch normalization for Flax Linen, independent of the split; see `BatchNorm`.

    The statistics are in the collection `batch_stats`.

    Attributes:
        use_running_average: use the running averages instead of the batch's statistics, for evaluation.
        group: samples of a group, at least 2.
        sync: 'groups', or 'exact' for statistics over the whole global batch, which needs engine='masked'.
        epsilon: added to the variance.
        dtype: of the output. Default: that of the input.
    """

    use_running_average: bool = False
    group: int = 16
    sync: str = "groups"
    epsilon: float = 1e-5
    dtype: Any = None

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalize one example.

        Args:
            x: one example without a batch axis, features last.

        Returns:
            The normalized example.
        """
        _check(self.sync, self.group)
        features = (x.shape[-1],)
        mean = self.variable("batch_stats", "mean", jnp.zeros, features)
        var = self.variable("batch_stats", "var", jnp.ones, features)
        scale = self.param("scale", linen.initializers.ones, features)
        bias = self.param("bias", linen.initializers.zeros, features)
        if self.use_running_average or self.is_initializing():
            center, spread = mean.value, var.value
        else:
            center, spread = batch_statistics(x, self.sync)
            mean.value, var.value = center, spread
        return _normalize(x, center, spread, scale, bias, self.epsilon, self.dtype)
