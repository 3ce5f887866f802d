"""Quality of a partition: distances by hand, and submodular blocks against random ones."""

from __future__ import annotations

import numpy as np
import pytest

from hetjax.sampling.blocks import Blocks, class_balanced_blocks, random_blocks
from hetjax.sampling.quality import quality
from hetjax.sampling.submodular import submodular_blocks
from hetjax.sampling.submodular.objectives import gaussian_kernel


def test_distances_by_hand():
    x = np.array([[0.0], [2.0], [0.0], [2.0]])
    same = Blocks(np.array([0, 0, 1, 1]), np.zeros(4), [1, 1])
    apart = Blocks(np.array([0, 1, 0, 1]), np.zeros(4), [1, 1])
    found = quality(x, {"same": same, "apart": apart}, bandwidth=1.0)
    assert found["same"].mean_distance_W.tolist() == [0, 0]
    assert found["same"].covariance_distance_W.tolist() == [0, 0]
    assert found["apart"].mean_distance_W.tolist() == [1, 1]  # |0 - 1| and |2 - 1|, the spread is 1
    assert found["apart"].within_distance_W.tolist() == [1, 1]
    assert found["apart"].covariance_distance_W.tolist() == [1, 1]  # 0 against 1
    far = float(gaussian_kernel(x, 1.0)[0, 1])
    assert found["same"].values["facility-location"].tolist() == [4, 4]
    assert found["apart"].values["facility-location"].tolist() == [2 + 2 * far, 2 + 2 * far]
    assert found["same"].values["graph-cut"].tolist() == [2 + 2 * far, 2 + 2 * far]
    assert found["apart"].values["graph-cut"].tolist() == [4 * far, 4 * far]


def test_class_distance_is_the_total_variation():
    classes = np.array([5, 5, 5, 5, 9, 9, 9, 9])
    blocks = Blocks(np.array([0, 0, 0, 1, 0, 1, 1, 1]), classes, [1, 1])
    found = quality(np.arange(8.0)[:, None], {"blocks": blocks})["blocks"]
    assert found.classes_WxL.tolist() == [[3, 1], [1, 3]]
    assert found.class_distance_W.tolist() == [0.25, 0.25]
    assert found.sizes_W.tolist() == [4, 4]


def test_within_class_distance_ignores_class_proportions():
    x = np.array([[0.0], [2.0], [10.0], [12.0]])
    by_class = Blocks(np.array([0, 0, 1, 1]), np.array([0, 0, 1, 1]), [1, 1])
    found = quality(x, {"blocks": by_class}, objectives=())["blocks"]
    assert found.within_distance_W.tolist() == [0, 0]
    assert found.mean_distance_W == pytest.approx(5 / np.sqrt(26))
    assert found.values == {}


def test_distances_of_an_empty_block_are_nan():
    found = quality(np.arange(4.0)[:, None], {"b": Blocks(np.zeros(4), np.zeros(4), [1, 0])})["b"]
    assert np.isnan([found.mean_distance_W[1], found.within_distance_W[1], found.covariance_distance_W[1]]).all()
    assert found.values["facility-location"][1] == 0


@pytest.mark.parametrize("rates", [[1, 1, 1, 1], [4, 2, 1, 1]])
@pytest.mark.parametrize("objective", ["facility-location", "graph-cut"])
def test_submodular_blocks_are_closer_to_the_dataset_than_random_ones(objective, rates):
    rng = np.random.default_rng(0)
    x = np.concatenate([rng.normal(c, 1.0, (320, 5)) for c in (0.0, 3.0)])
    classes = np.repeat([0, 1], 320)
    partitions = {f"random {seed}": class_balanced_blocks(classes, rates, seed) for seed in range(8)}
    partitions["ours"] = submodular_blocks(x, classes, rates, objective=objective)
    found = quality(x, partitions)
    baseline = [found[f"random {seed}"] for seed in range(8)]
    for what in ("mean_distance_W", "within_distance_W", "covariance_distance_W"):
        assert getattr(found["ours"], what).mean() < 0.85 * np.mean([getattr(c, what).mean() for c in baseline])
    if objective == "facility-location":  # the sum of graph cuts hardly differs between partitions
        assert found["ours"].values[objective].sum() > max(c.values[objective].sum() for c in baseline)


def test_partitions_of_other_data_are_rejected():
    with pytest.raises(ValueError, match="3 samples for 2 workers"):
        quality(np.zeros((4, 1)), {"b": random_blocks(np.zeros(3), [1, 1])})
