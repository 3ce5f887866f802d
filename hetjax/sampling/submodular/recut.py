"""Adapts submodular blocks to new rates while moving the fewest samples: only those above a block's new quota.

In every class the samples that leave a block are chosen by the same greedy algorithm, as if they were a block of their
own, so that both those that stay and those that leave represent the old block. They are then divided in the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hetjax.sampling.blocks import Blocks, encode_classes, quotas, validate_rates
from hetjax.sampling.submodular.features import flat_features
from hetjax.sampling.submodular.greedy import ProgressFn, assign_owners, class_kernels, resolve_rule
from hetjax.sampling.submodular.objectives import total_value


@dataclass(frozen=True)
class Recut:
    """New blocks, and how they compare with a partition from scratch."""

    blocks: Blocks
    moved: int  # number of samples that changed owner
    fresh: Blocks | None  # the partition from scratch, with `against_fresh`
    fresh_moved: int
    value_before: float  # f summed over workers and classes
    value_after: float
    value_fresh: float

    @property
    def lost(self) -> float:
        """1 - f / f from scratch: the price of moving few samples; NaN without `against_fresh`."""
        return 1.0 - self.value_after / self.value_fresh if self.value_fresh else float("nan")

    @property
    def summary(self) -> str:
        """A sentence for the console."""
        return (
            f"{self.moved:,} samples moved; a partition from scratch would move {self.fresh_moved:,}. Total f: "
            f"{self.value_before:,.1f} before, {self.value_after:,.1f} now, {self.value_fresh:,.1f} from scratch "
            f"({self.lost:+.3%} lost)."
        )


def recut(
    blocks: Blocks,
    features_DxF: np.ndarray,
    rates_W: Sequence[float] | np.ndarray,
    *,
    rule: str = "auto",
    against_fresh: bool = True,
    progress: ProgressFn | None = None,
) -> Recut:
    """Move samples between submodular blocks so that their sizes follow new rates.

    The objective and the bandwidths are those of the blocks.

    Args:
        blocks: Blocks made by `submodular_blocks` or `recut`.
        features_DxF: The features that they were made with.
        rates_W: New rates: 0 for a worker that has left, new workers after the old ones.
        rule: For the partition from scratch.
        against_fresh: Also partition from scratch, to compare f; takes the full time of that.
        progress: Called with the number of samples assigned since the last call.

    Returns:
        The new blocks, and what moved.
    """
    features_DxF, rates_W = flat_features(features_DxF), validate_rates(rates_W)
    _check(blocks, features_DxF, rates_W)
    objective, widths = blocks.settings["objective"], blocks.settings["bandwidths"]
    rule = resolve_rule(rule, rates_W)
    carry = bool(blocks.settings.get("carry", True))
    quota_LxW = quotas(encode_classes(blocks.classes_D)[1], rates_W, carry=carry)
    owner_D, fresh_D = blocks.owner_D.copy(), blocks.owner_D.copy()
    before = after = fresh = 0.0
    for (members, sim_VxV, _), quota_W in zip(
        class_kernels(features_DxF, blocks.classes_D, widths), quota_LxW, strict=True
    ):
        before += total_value(objective, sim_VxV, owner_D[members])
        owner_D[members] = moved_owners(sim_VxV, owner_D[members], quota_W, objective, progress)
        after += total_value(objective, sim_VxV, owner_D[members])
        if against_fresh:
            fresh_D[members] = assign_owners(sim_VxV, quota_W, rates_W, objective, rule)
            fresh += total_value(objective, sim_VxV, fresh_D[members])
    made = {"rule": f"recut, {rule}", "name": f"{objective}, recut"}
    return Recut(
        blocks=Blocks(owner_D, blocks.classes_D, rates_W, {**blocks.settings, **made}),
        moved=int((owner_D != blocks.owner_D).sum()),
        fresh=Blocks(fresh_D, blocks.classes_D, rates_W, {**blocks.settings, "rule": rule}) if against_fresh else None,
        fresh_moved=int((fresh_D != blocks.owner_D).sum()),
        value_before=before,
        value_after=after,
        value_fresh=fresh,
    )


def moved_owners(
    sim_VxV: np.ndarray, owner_V: np.ndarray, quota_W: np.ndarray, objective: str, progress: ProgressFn | None = None
) -> np.ndarray:
    """New owners of the samples of one class; only sum_j max(|A_j| - C_j, 0) of them change, the minimum."""
    owner_V = owner_V.copy()
    size_W = np.bincount(owner_V, minlength=len(quota_W))
    for worker in np.flatnonzero(size_W > quota_W):
        own = np.flatnonzero(owner_V == worker)
        stay_go = np.array([quota_W[worker], len(own) - quota_W[worker]])
        owner_V[own[_assign(sim_VxV, own, stay_go, objective) == 1]] = -1
    free = np.flatnonzero(owner_V < 0)
    if len(free):
        owner_V[free] = _assign(sim_VxV, free, np.maximum(quota_W - size_W, 0), objective)
    if progress is not None:
        progress(len(owner_V))
    return owner_V


def _assign(sim_VxV: np.ndarray, members: np.ndarray, quota_W: np.ndarray, objective: str) -> np.ndarray:
    return assign_owners(sim_VxV[np.ix_(members, members)], quota_W, quota_W.astype(np.float64), objective, "parts")


def _check(blocks: Blocks, features_DxF: np.ndarray, rates_W: np.ndarray) -> None:
    if "objective" not in blocks.settings:
        raise ValueError(
            f"These blocks ({blocks.settings.get('name', 'of unknown origin')}) have no objective, so they cannot be "
            "adapted. Make new ones for the new rates."
        )
    if len(features_DxF) != blocks.size:
        raise ValueError(f"The blocks hold {blocks.size:,} samples, but features_DxF has {len(features_DxF):,} rows.")
    if len(rates_W) < blocks.workers:
        raise ValueError(
            f"The blocks belong to {blocks.workers} workers, but there are {len(rates_W)} rates. Give one rate each: "
            "0 for a worker that has left, and new workers after the old ones."
        )
