"""Shares to counts: whole samples that sum to the batch, keep the limits, and stay as close to the shares as can be."""

from __future__ import annotations

import numpy as np

from hetjax.planning.allocation import solve
from hetjax.planning.limits import Limits


def largest_remainder(share_W: np.ndarray, limits: Limits, batch: int, least: int = 0) -> np.ndarray:
    """floor(q_i) with q_i = batch p_i, the missing samples to the largest fractional parts, lower index first.

    Limits that bind are met first and the others share what is left. The unit is the quantum; the last worker with
    samples takes the remainder of the batch. Every worker gets `least` units if the batch is enough for that.
    """
    q, share_W = limits.quantum, np.asarray(share_W, np.float64)
    units, remainder = divmod(int(batch), q)
    low_W, cap_W = -(-limits.minimum_W // q), limits.capacity_W // q
    floor_W = np.maximum(low_W, np.minimum(least, cap_W))
    units_W = _within(share_W, floor_W if int(floor_W.sum()) <= units else low_W, cap_W, units)
    if units_W is not None:
        counts_W = units_W * q
        used = np.flatnonzero(counts_W)
        last = int(used[-1]) if len(used) else int(np.argmax(share_W))
        counts_W[last] += remainder
        if counts_W[last] <= limits.capacity_W[last]:
            return counts_W
    # Only tight limits come here: the smallest largest n_i / p_i is found exactly instead.
    tiny = 1e-9 * float(np.max(share_W)) if np.max(share_W) > 0 else 1.0
    plain = Limits(limits.capacity_W, limits.minimum_W, q, np.zeros_like(limits.kind_W), (_ruler(limits),))
    return solve(np.zeros(limits.workers), 1.0 / np.maximum(share_W, tiny), plain, batch).counts_W


def allowed(counts_W: np.ndarray, limits: Limits, batch: int) -> bool:
    """Whether these counts are a plan for the batch under the limits."""
    if len(counts_W) != limits.workers or int(counts_W.sum()) != batch:
        return False
    if np.any(counts_W < limits.minimum_W) or np.any(counts_W > limits.capacity_W):
        return False
    odd = np.flatnonzero(counts_W % limits.quantum)
    return len(odd) == 0 or (len(odd) == 1 and not np.any(counts_W[odd[0] + 1 :]))


def _within(share_W: np.ndarray, low_W: np.ndarray, cap_W: np.ndarray, units: int) -> np.ndarray | None:
    if np.any(low_W > cap_W) or not low_W.sum() <= units <= cap_W.sum():
        return None
    total = float(share_W.sum())
    share_W = share_W / total if total > 0 else np.full(len(share_W), 1.0 / len(share_W))
    ideal_W = units * share_W
    # Hold those beyond a limit at it, let the rest share what is left, until nobody is beyond.
    held_W = np.zeros(len(share_W), bool)
    while True:
        beyond_W = ~held_W & ((ideal_W < low_W) | (ideal_W > cap_W))
        if not beyond_W.any():
            break
        over = float((np.clip(ideal_W, low_W, cap_W) - ideal_W).sum())  # > 0: minimums weigh more than capacities
        now_W = beyond_W & ((ideal_W < low_W) if over >= 0 else (ideal_W > cap_W))
        ideal_W = np.where(now_W, np.where(ideal_W < low_W, low_W, cap_W), ideal_W)
        held_W |= now_W
        left = units - float(ideal_W[held_W].sum())
        free = float(share_W[~held_W].sum())
        if free <= 0:
            break
        ideal_W = np.where(held_W, ideal_W, np.maximum(left, 0.0) * share_W / free)
    units_W = np.clip(np.floor(ideal_W + 1e-9).astype(np.int64), low_W, cap_W)
    while (missing := units - int(units_W.sum())) != 0:
        step = 1 if missing > 0 else -1
        movable_W = (units_W < cap_W) if missing > 0 else (units_W > low_W)
        order_W = np.argsort(np.where(movable_W, step * (units_W - ideal_W), np.inf), kind="stable")
        units_W[order_W[: min(abs(missing), int(movable_W.sum()))]] += step
    return units_W


def _ruler(limits: Limits) -> np.ndarray:
    return np.arange(int(np.max(limits.capacity_W)) + 1, dtype=np.float64)
