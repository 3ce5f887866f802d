"""Blocks: quotas in proportion to the rates, random baselines, and files."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetjax.sampling.blocks import Blocks, class_balanced_blocks, quotas, random_blocks


def test_quotas_by_hand():
    assert quotas(np.array([16, 8]), np.array([4, 2, 1, 1])).tolist() == [[8, 4, 2, 2], [4, 2, 1, 1]]
    # 10 x .5, .25, .125, .125 = 5, 2.5, 1.25, 1.25: the missing sample goes to the largest fraction.
    assert quotas(np.array([10]), np.array([4, 2, 1, 1])).tolist() == [[5, 3, 1, 1]]
    assert quotas(np.array([3, 3]), np.array([4, 2, 1, 1]), carry=False).tolist() == [[2, 1, 0, 0], [2, 1, 0, 0]]
    # Ideal 1.5, .75, .375, .375 twice: after 2, 1, 0, 0 workers 0 and 1 get less of the second class.
    assert quotas(np.array([3, 3]), np.array([4, 2, 1, 1])).tolist() == [[2, 1, 0, 0], [1, 0, 1, 1]]


@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=30),
    rates=st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any),
)
def test_quotas_sum_to_class_sizes_and_follow_the_rates(sizes, rates):
    share_W = np.array(rates) / sum(rates)
    each = quotas(np.array(sizes), np.array(rates), carry=False)
    assert each.sum(axis=1).tolist() == sizes
    assert (abs(each - np.outer(sizes, share_W)) < 1).all()
    carried = quotas(np.array(sizes), np.array(rates))
    assert (carried >= 0).all()
    assert carried.sum(axis=1).tolist() == sizes
    assert (carried[:, np.array(rates) == 0] == 0).all()
    assert (abs(carried.sum(axis=0) - sum(sizes) * share_W) < 2).all()


@pytest.mark.parametrize("make", [random_blocks, class_balanced_blocks])
def test_random_blocks_follow_rates_and_seed(make):
    classes = np.repeat([0, 1, 7], [80, 40, 40])
    blocks = make(classes, [4, 2, 1, 1], seed=3)
    assert blocks.sizes_W.tolist() == [80, 40, 20, 20]
    assert np.array_equal(np.sort(np.concatenate(blocks.indices)), np.arange(160))
    assert all(np.array_equal(blocks.owner_D[i], np.full(len(i), j)) for j, i in enumerate(blocks.indices))
    assert np.array_equal(blocks.owner_D, make(classes, [4, 2, 1, 1], seed=3).owner_D)
    assert not np.array_equal(blocks.owner_D, make(classes, [4, 2, 1, 1], seed=4).owner_D)


def test_class_balanced_blocks_divide_every_class_by_the_rates():
    classes = np.repeat([0, 1, 7], [80, 40, 40])
    owner = class_balanced_blocks(classes, [4, 2, 1, 1]).owner_D
    assert [np.bincount(owner[classes == c]).tolist() for c in (0, 1, 7)] == [
        [40, 20, 10, 10],
        [20, 10, 5, 5],
        [20, 10, 5, 5],
    ]


def test_blocks_may_be_empty():
    assert [len(i) for i in Blocks(np.array([0, 2, 2]), np.zeros(3), [1, 0, 2]).indices] == [1, 0, 2]


def test_save_and_load_round_trip(tmp_path):
    blocks = random_blocks(np.arange(50) % 3, [3, 1]).with_settings(bandwidths=[0.1, 2.0], name="é")
    blocks.save(tmp_path / "blocks.npz")
    again = Blocks.load(tmp_path / "blocks.npz")
    assert np.array_equal(again.owner_D, blocks.owner_D)
    assert np.array_equal(again.classes_D, blocks.classes_D)
    assert again.rates_W.tolist() == [3.0, 1.0]
    assert again.settings == {"name": "é", "seed": 0, "bandwidths": [0.1, 2.0]}


def test_loading_other_files_is_rejected(tmp_path):
    with pytest.raises(FileNotFoundError, match="hetjax partition"):
        Blocks.load(tmp_path / "none.npz")
    (tmp_path / "text.npz").write_text("hello")
    np.savez(tmp_path / "other.npz", x=np.zeros(3))
    np.savez(tmp_path / "pickled.npz", **{key: [{}] for key in ("format", "owner", "classes", "rates", "settings")})
    for name in ("text", "other", "pickled"):
        with pytest.raises(ValueError, match="does not hold blocks"):
            Blocks.load(tmp_path / f"{name}.npz")


@pytest.mark.parametrize("owner", [[], [0, 2], [-1, 0]])
def test_invalid_owners_are_rejected(owner):
    with pytest.raises(ValueError, match="owner from 0 to 1"):
        Blocks(np.array(owner), np.zeros(len(owner)), [1, 1])
