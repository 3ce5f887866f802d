"""A probe of the model state before training, which refuses models that would silently train wrong.

It does not look at layer types. It computes the state for a few samples, for their two halves, and after a change of
the old state:

    split     the sums of the halves must add up to those of the whole; statistics over the rows of a microbatch do not
    averages  `running_average` averages statistics over the steps, so a new value must not depend on the old one, as
              it does in a layer that keeps its own running average
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hetjax.adapters.contract import Objective, control, example_keys, valid_rows
from hetjax.adapters.sync_axis import SyncAxis
from hetjax.devices.compile import expected
from hetjax.reduce.trainable import unfrozen
from hetjax.reduce.update import StateSums
from hetjax.state import State

log = logging.getLogger("hetjax")
Tree = Any

_LEAST = 4  # rows of a half: one row has no variance
# Tolerance relative to the largest value of a variable. Rounding changes sums by 1e-6, wrong rows by 1 / rows.
_APART = 1e-3
_REMEDY = (
    "Use hetjax.BatchNorm or hetjax.LinenBatchNorm, or a layer without statistics of the batch, such as GroupNorm or "
    "LayerNorm."
)


def warn_of_idle_workers(batch: int, group: int, workers: int) -> None:
    """Log a warning if a batch has fewer groups than there are workers."""
    groups = -(-batch // group)
    if group == 1 or groups >= workers:
        return
    smaller = f"groups of at most {batch // workers} (BatchNorm(group=...)) or " if batch >= 2 * workers else ""
    log.warning(
        "A batch of %d samples has only %d group%s of %d, which cannot be split: at least %d of the %d workers are "
        "idle in every step. Use %sbatch_size=%d or more.",
        batch, groups, "s" * (groups > 1), group, workers - groups, workers, smaller, group * workers,
    )  # fmt: skip


def probe_size(quantum: int) -> int:
    """Return the number of samples of a probe: two halves of whole groups."""
    return 2 * quantum * -(-_LEAST // quantum)


def sample_size(state: State, quantum: int) -> int:
    """Return the number of rows to compile with: one for the shapes, or those of a probe of the model state."""
    return 1 if state.model_state is None else probe_size(quantum)


def probe_indices(samples: int, quantum: int) -> np.ndarray:
    """Return the indices of the samples to probe, spread evenly over the source."""
    rows = probe_size(quantum)
    return np.arange(rows) * samples // rows


def check_model_state(
    loss_fn: Callable[..., Any], advance: Callable[..., Any], state: State, rows: Tree, device: jax.Device
) -> None:
    """Refuse a model whose state would be trained wrong, naming the variable.

    Args:
        loss_fn: the loss function with model state.
        advance: how state sums become the new state. Averages are checked only if it is a `running_average`.
        state: the first state. Of several parameter sets, the first one of this process is used.
        rows: the samples at `probe_indices`.
        device: a device of this process.

    Raises:
        ValueError: if the state depends on the split, or a layer averages over the steps itself.
    """
    half = len(jax.tree.leaves(rows)[0]) // 2
    params, old = jax.device_put(
        jax.tree.map(lambda x: _one(x, state.replicas), (state.params, state.model_state)), device
    )
    swapped = jax.tree.map(lambda x: np.roll(x, half, axis=0), rows)
    objective = Objective(loss_fn, stateful=True)

    @jax.jit
    def run(params: Tree, old: Tree, rows: Tree, ctl: jax.Array) -> Tree:
        rows, mask_b = valid_rows(rows, ctl)
        return objective(unfrozen(params), old, rows, example_keys(ctl, len(mask_b)), mask_b)[1]

    def sums_of(old: Tree, rows: Tree, count: int, position: int) -> Tree:
        sums = run(params, old, rows, control(count, seed=0, epoch=0, position=position))
        return jax.tree.map(lambda x: np.asarray(x, np.float64), sums)

    with expected(), SyncAxis(None).allowed() as axis:
        whole = sums_of(old, rows, 2 * half, 0)
        halves = sums_of(old, rows, half, 0), sums_of(old, swapped, half, half)
        if not axis.used:  # exact statistics of all workers never add up from parts
            _check_split(whole, *halves, 2 * half)
        if getattr(advance, "momentum", 0) != 0:  # a running average: its sums are (like the state, count)
            _check_averages(lambda old: sums_of(old, rows, 2 * half, 0), whole, halves, old)


def _check_split(whole: Tree, first: Tree, second: Tree, rows: int) -> None:
    small = 1e-2 * rows  # after a normalization means are zero up to rounding, 1e-7 of values of order one
    parts = zip(_names(whole), *map(jax.tree.leaves, (whole, first, second)), strict=True)
    for name, of_whole, of_first, of_second in parts:
        if _apart(of_whole, of_first + of_second, np.abs(of_first) + np.abs(of_second) + small):
            raise ValueError(
                f"The model state {name} depends on how a batch is split among the workers: its sums over a batch are "
                f"not those over its two halves together. {_REMEDY}"
            )


def _check_averages(sums_of: Callable[[Tree], Tree], whole: Tree, halves: tuple[Tree, Tree], old: Tree) -> None:
    """Change the whole old state, then each suspicious variable alone, as it may depend on others' old values."""
    leaves, tree = jax.tree.flatten(jax.tree.map(np.asarray, old))
    moved = [_moved(leaf, np.random.default_rng(i)) for i, leaf in enumerate(leaves)]

    def means(state_sums: Tree) -> list[np.ndarray]:
        sums, count = state_sums
        return [total / max(count, 1) for total in jax.tree.leaves(sums)]

    means_of = lambda leaves: means(sums_of(jax.tree.unflatten(tree, leaves)))
    before, after, one, other = means(whole), means_of(moved), means(halves[0]), means(halves[1])
    for i, name in enumerate(_names(old)):
        step = np.abs(np.asarray(moved[i] - leaves[i], np.float64))
        frozen = not _apart(before[i], leaves[i]) and not _apart(after[i], moved[i])  # passed through unchanged
        if frozen or not _apart(before[i], after[i], step):
            continue
        alone = means_of([moved[k] if k == i else leaf for k, leaf in enumerate(leaves)])
        if _apart(before[i], alone[i], step):
            advice = (
                ""
                if _apart(one[i], other[i])
                else (
                    " Its value does not depend on the samples, so it can also be used as the layer computes it: pass "
                    "advance=hetjax.running_average(0.0)."
                )
            )
            raise ValueError(
                f"The model state {name} would be averaged twice: its new value depends on the old one, so the layer "
                f"keeps its own running average, and hetjax averages over the steps again. {_REMEDY}{advice}"
            )


def _apart(a: Any, b: Any, scale: Any = None) -> bool:
    """Return whether two arrays differ by more than rounding. NaN counts as equal: the first step reports it."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    scale = np.maximum(np.abs(a), np.abs(b)) if scale is None else scale
    return bool(np.max(np.abs(a - b), initial=0) > _APART * np.max(scale, initial=0))


def _moved(x: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return another value of a variable: larger, so that a variance stays valid, and in another direction."""
    if jnp.issubdtype(x.dtype, jnp.floating):
        return (x + 0.1 * (1 + np.abs(x)) * rng.uniform(0.5, 1, x.shape)).astype(x.dtype)
    return x + 1 if jnp.issubdtype(x.dtype, jnp.integer) else x


def _names(tree: Tree) -> list[str]:
    """Return the paths of the leaves of a state, or of its state sums: a pair of a tree like the state and a count."""
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    if isinstance(tree, tuple | StateSums):
        paths = [path[1:] for path in paths]
    names = [jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value") for path in paths]
    return [name or "count" for name in names]


def _one(x: Any, replicas: int) -> Any:
    """Return this process's copy of an array, or the first of several parameter sets in it."""
    x = x.addressable_data(0) if hasattr(x, "addressable_data") else x
    return x[0] if replicas else x
