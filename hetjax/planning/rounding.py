"""Shares to counts: whole numbers that sum to a total, stay close to the shares and within the limits."""

from __future__ import annotations

import numpy as np

from hetjax.planning.allocation import solve
from hetjax.planning.limits import Limits


def round_to_total(ideal_N: np.ndarray, total: int) -> np.ndarray:
    """floor(q_i), the missing ones to the largest fractional parts, lower index first; sum_i q_i = total."""
    rounded_N = np.floor(ideal_N).astype(np.int64)
    missing = total - int(rounded_N.sum())
    rounded_N[np.argsort(-(ideal_N - rounded_N), kind="stable")[:missing]] += 1
    return rounded_N


def round_half_up(ideal_W: np.ndarray) -> np.ndarray:
    """DBS's published rounding: floor, then the missing samples to the largest fractions that are one half or more.

    Falls short of the batch when fewer fractions than missing samples reach one half.
    """
    counts_W = np.floor(ideal_W).astype(np.int64)
    fraction_W = ideal_W - counts_W
    missing = int(np.floor(ideal_W.sum() + 0.5)) - int(counts_W.sum())
    order_W = np.argsort(-fraction_W, kind="stable")[: max(missing, 0)]
    counts_W[order_W[fraction_W[order_W] >= 0.5]] += 1
    return counts_W


def largest_remainder(share_W: np.ndarray, limits: Limits, batch: int, least: int = 0) -> np.ndarray:
    """`round_to_total` of q_i = batch p_i under limits: those that bind are met first, the others share what is left.

    Args:
        share_W: p_i, zero or more; normalized to sum to 1.
        limits: The unit of rounding is their quantum; the last worker with samples takes the remainder of the batch.
        batch: The sum of the counts.
        least: Units that every worker gets if the batch is large enough.
    """
    q, share_W = limits.quantum, np.asarray(share_W, np.float64)
    units, remainder = divmod(int(batch), q)
    low_W, cap_W = -(-limits.minimum_W // q), limits.capacity_W // q
    floor_W = np.maximum(low_W, np.minimum(least, cap_W))
    units_W = _round_within(share_W, floor_W if int(floor_W.sum()) <= units else low_W, cap_W, units)
    if units_W is not None:
        counts_W = units_W * q
        used = np.flatnonzero(counts_W)
        last = int(used[-1]) if len(used) else int(np.argmax(share_W))
        counts_W[last] += remainder
        if counts_W[last] <= limits.capacity_W[last]:
            return counts_W
    # Only where limits are tight: minimize the largest n_i / p_i, which is exact.
    tiny = 1e-9 * float(np.max(share_W)) if np.max(share_W) > 0 else 1.0
    ruler = np.arange(int(np.max(limits.capacity_W)) + 1, dtype=np.float64)
    plain = Limits(limits.capacity_W, limits.minimum_W, q, np.zeros_like(limits.kind_W), (ruler,))
    return solve(np.zeros(limits.workers), 1.0 / np.maximum(share_W, tiny), plain, batch).counts_W


def allowed(counts_W: np.ndarray, limits: Limits, batch: int) -> bool:
    """Whether these counts sum to the batch and satisfy the limits."""
    if len(counts_W) != limits.workers or int(counts_W.sum()) != batch:
        return False
    if np.any(counts_W < limits.minimum_W) or np.any(counts_W > limits.capacity_W):
        return False
    odd = np.flatnonzero(counts_W % limits.quantum)
    return len(odd) == 0 or (len(odd) == 1 and not np.any(counts_W[odd[0] + 1 :]))


def _round_within(share_W: np.ndarray, low_W: np.ndarray, cap_W: np.ndarray, units: int) -> np.ndarray | None:
    """Whole units in proportion to the shares with low_i <= units_i <= cap_i; None if there are none."""
    if np.any(low_W > cap_W) or not low_W.sum() <= units <= cap_W.sum():
        return None
    total = float(share_W.sum())
    share_W = share_W / total if total > 0 else np.full(len(share_W), 1.0 / len(share_W))
    ideal_W = units * share_W
    # Clamp workers beyond a limit, share the rest among the others, until no worker is beyond one.
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
