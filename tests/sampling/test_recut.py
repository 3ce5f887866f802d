"""Re-cutting: sizes follow the new rates, the fewest samples move, and the loss of f is reported."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetjax.sampling.blocks import class_balanced_blocks, encode_classes, quotas, random_blocks
from hetjax.sampling.quality import quality
from hetjax.sampling.submodular import recut, submodular_blocks
from hetjax.sampling.submodular.objectives import gaussian_kernel, value

RATES = st.lists(st.integers(0, 6), min_size=1, max_size=4).filter(any)


def samples(seed, size=60):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(size, 3)), rng.integers(0, 3, size)


@given(before=RATES, after=RATES, joined=st.lists(st.integers(1, 6), max_size=2), seed=st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_the_fewest_samples_move(before, after, joined, seed):
    after = (after + [0] * len(before))[: len(before)]
    after = [*(after if any(after) else before), *joined]
    x, classes = samples(seed)
    old = submodular_blocks(x, classes, before)
    new = recut(old, x, after)
    numbers, sizes = encode_classes(classes)
    quota = quotas(sizes, np.array(after))
    counted = lambda blocks: np.array(
        [np.bincount(blocks.owner_D[numbers == c], minlength=9) for c in range(len(sizes))]
    )
    assert np.array_equal(counted(new.blocks)[:, : len(after)], quota)
    fewest = np.maximum(counted(old)[:, : len(after)] - quota, 0).sum()
    assert new.moved == fewest == (new.blocks.owner_D != old.owner_D).sum()
    assert new.fresh_moved >= fewest
    assert new.blocks.rates_W.tolist() == after


def test_proportional_rates_move_nothing():
    x, classes = samples(1)
    old = submodular_blocks(x, classes, [3, 2, 1])
    same = recut(old, x, [6, 4, 2])
    assert same.moved == 0
    assert same.value_after == same.value_before == same.value_fresh
    assert same.lost == 0


@pytest.mark.parametrize("objective", ["facility-location", "graph-cut"])
def test_reported_f_matches_its_definition(objective):
    x, _ = samples(2)
    old = submodular_blocks(x, np.zeros(60), [1, 1, 1], objective=objective, bandwidth=1.5)
    new = recut(old, x, [4, 1, 1])
    sim = gaussian_kernel(x.astype(np.float32), 1.5)
    f = lambda blocks: sum(value(objective, sim, own) for own in blocks.indices)
    assert (new.value_before, new.value_after, new.value_fresh) == (f(old), f(new.blocks), f(new.fresh))
    assert new.lost == pytest.approx(1 - f(new.blocks) / f(new.fresh))
    assert np.isnan(recut(old, x, [4, 1, 1], against_fresh=False).lost)


def test_recut_blocks_are_closer_to_the_dataset_than_random_ones():
    rng = np.random.default_rng(3)
    x, classes = rng.normal(size=(900, 4)), np.zeros(900)
    new = recut(submodular_blocks(x, classes, [1, 1, 1, 1]), x, [4, 2, 1, 1])
    partitions = {str(seed): class_balanced_blocks(classes, [4, 2, 1, 1], seed) for seed in range(6)}
    found = quality(x, {"ours": new.blocks, **partitions}, objectives=())
    for what in ("mean_distance_W", "covariance_distance_W"):
        baseline = np.mean([getattr(found[name], what).mean() for name in partitions])
        assert getattr(found["ours"], what).mean() < 0.85 * baseline


def test_a_recut_can_be_cut_again():
    x, classes = samples(4)
    there = recut(submodular_blocks(x, classes, [1, 1]), x, [3, 1]).blocks
    assert recut(there, x, [1, 1]).blocks.sizes_W.tolist() == [30, 30]


@pytest.mark.parametrize(
    ("change", "message"),
    [({"rates_W": [1]}, "0 for a worker that has left"), ({"features_DxF": np.zeros((5, 3))}, "60 samples, but")],
)
def test_mismatched_arguments_are_rejected(change, message):
    x, classes = samples(5)
    arguments = {"blocks": submodular_blocks(x, classes, [1, 1]), "features_DxF": x, "rates_W": [2, 1]} | change
    with pytest.raises(ValueError, match=message):
        recut(**arguments)
    with pytest.raises(ValueError, match="no objective"):
        recut(random_blocks(classes, [1, 1]), x, [2, 1])
