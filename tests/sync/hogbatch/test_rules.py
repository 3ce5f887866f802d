"""The published rules of the Hogbatch family, on numbers worked out by hand."""

import numpy as np
import pytest

from hetjax.sync.hogbatch.rules import BatchBounds, adapted_batch, gradient_scale, merge_weights, moved_batches

BOUNDS = BatchBounds(np.array([8, 16]), np.array([64, 256]))


def batches_for(requests, batch, updates, **options):
    """The batches for a sequence of requests by workers, each of which counts as an update afterwards."""
    batch_W, updates_W = np.array(batch), np.array(updates)
    given = []
    for worker in requests:
        batch_W[worker] = adapted_batch(worker, batch_W, updates_W, BOUNDS, **options)
        given.append(int(batch_W[worker]))
        updates_W[worker] += 1
    return given


def test_without_a_dead_zone_a_worker_behind_halves_and_one_ahead_doubles():
    # u before each request: 0,0 | 1,0 | 2,0 | 3,0 | 3,1 | 3,2 | 3,3 | 4,3
    requests = [0, 0, 0, 1, 1, 1, 0, 0]
    assert batches_for(requests, [8, 256], [0, 0], dead_zone=0) == [8, 16, 32, 128, 64, 32, 32, 64]


def test_batches_are_kept_within_the_dead_zone():
    # 0 is ahead by 0, 1, ..., 4 (held), 5 and 6 (doubled); then 1 is behind by 7, 6, 5 (halved) and 4 (held)
    requests = [0] * 7 + [1] * 4
    assert batches_for(requests, [8, 256], [0, 0]) == [8, 8, 8, 8, 8, 16, 32, 128, 64, 32, 32]


def test_batches_stay_within_the_workers_bounds():
    assert batches_for([0] * 6, [32, 256], [10, 0]) == [64] * 6
    assert batches_for([1] * 6, [8, 32], [99, 0]) == [16] * 6


def test_a_dead_zone_keeps_the_slow_workers_batch_from_flipping():
    """Worker 1 is three times slower per sample, and its batch has to settle between 16 and 32."""
    bounds = BatchBounds(np.array([64, 8]), np.array([64, 64]))

    def changes(dead_zone):
        batch_W, updates_W, seen = np.array([64, 8]), np.zeros(2, int), []
        clock_W = np.zeros(2)
        for _ in range(300):
            worker = int(np.argmin(clock_W))
            batch_W[worker] = adapted_batch(worker, batch_W, updates_W, bounds, dead_zone=dead_zone)
            updates_W[worker] += 1
            clock_W[worker] += batch_W[worker] * (1 if worker == 0 else 3)
            if worker == 1:
                seen.append(int(batch_W[1]))
        return np.mean(np.diff(seen[5:]) != 0)

    assert changes(0) > 0.3
    assert changes(4) < changes(0) / 2


def test_a_single_worker_keeps_its_batch_and_inactive_workers_do_not_count():
    alone = BatchBounds(np.array([8]), np.array([64]))
    assert adapted_batch(0, np.array([32]), np.array([50]), alone) == 32
    batch_W, updates_W = np.array([32, 64]), np.array([9, 0])
    assert adapted_batch(0, batch_W, updates_W, BOUNDS) == 64
    assert adapted_batch(0, batch_W, updates_W, BOUNDS, active_W=np.array([True, False])) == 32


def test_bounds_follow_the_capacity_in_multiples_of_the_quantum():
    bounds = BatchBounds.of(np.array([256, 100]), quantum=8)
    assert (bounds.lower_W.tolist(), bounds.upper_W.tolist()) == ([16, 8], [256, 96])
    assert [bounds.clip(1, n) for n in (1, 11, 12, 90, 500)] == [8, 8, 16, 88, 96]
    assert bounds.by_kind(np.array([True, False])).tolist() == [256, 8]
    assert bounds.by_speed(np.array([3, 1]), 160).tolist() == [128, 40]  # 120 is not a multiple of 16
    assert bounds.rungs() == [8, 16, 24, 32, 48, 64, 96, 128, 256]
    assert bounds.rungs(np.array([64, 96])) == [8, 16, 24, 32, 48, 64, 96]
    with pytest.raises(ValueError, match="smallest batch of 300"):
        BatchBounds.of(np.array([256]), lower_W=np.array([300]))


def test_merge_weights_follow_updates_or_batches_if_updates_are_equal():
    assert merge_weights(np.array([1, 3]), np.array([64, 8])).tolist() == [0.25, 0.75]
    assert merge_weights(np.array([2, 2]), np.array([96, 32])).tolist() == [0.75, 0.25]
    assert merge_weights(np.array([0, 5, 0]), np.array([9, 9, 9])).tolist() == [0, 1, 0]
    with pytest.raises(ValueError, match="nothing to merge"):
        merge_weights(np.zeros(2), np.ones(2))


def test_batches_move_by_the_distance_from_the_mean_of_updates():
    # beta 4 and 8; mean of 2 and 6 is 4: 40 + 4 x -2, 40 + 8 x 2
    assert moved_batches(np.array([40, 40]), np.array([2, 6]), BOUNDS).tolist() == [32, 56]
    assert moved_batches(np.array([10, 250]), np.array([0, 9]), BOUNDS).tolist() == [8, 256]
    # 20 + .25 x .5 and 20 - .25 x .5: fractions are kept
    assert moved_batches(np.array([20, 20]), np.array([1, 0]), BOUNDS, np.array([0.25, 0.25])).tolist() == [
        20.125, 19.875,
    ]  # fmt: skip
    three = BatchBounds(np.full(3, 8), np.full(3, 64))  # worker 2 is inactive: the mean is that of 2 and 6
    active_W = np.array([True, True, False])
    assert moved_batches(np.array([40, 40, 40]), np.array([2, 6, 0]), three, None, active_W).tolist() == [32, 48, 40]


def test_the_gradient_scale_follows_the_batch_up_to_a_cap():
    assert [gradient_scale(b, 32) for b in (1, 16, 32, 64, 128, 512)] == [1 / 32, 0.5, 1, 2, 4, 4]
    assert gradient_scale(512, 32, cap=None) == 16
    with pytest.raises(ValueError, match="above 0"):
        gradient_scale(0, 32)


def test_linear_scaling_diverges_without_the_cap():
    """A quadratic of curvature 1, batches of 16 times the reference, lr 0.2: x <- x (1 - 0.2 s)."""
    after = lambda cap: (1 - 0.2 * gradient_scale(512, 32, cap)) ** 31
    assert abs(after(None)) > 1e10
    assert abs(after(4.0)) < 1e-20


def test_a_small_alpha_moves_batches_by_the_smallest_batch():
    bounds = BatchBounds(np.array([16, 16]), np.array([64, 64]))
    up, down = np.array([50, 0]), np.array([0, 50])
    assert [adapted_batch(0, np.array([b, 16]), up, bounds, alpha=1.2) for b in (16, 32, 48, 64)] == [32, 48, 64, 64]
    assert [adapted_batch(0, np.array([b, 16]), down, bounds, alpha=1.2) for b in (64, 48, 32, 16)] == [48, 32, 16, 16]
