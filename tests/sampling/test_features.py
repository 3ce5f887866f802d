"""Features and pseudo-classes: principal components against the SVD, k-means against its definition."""

from __future__ import annotations

import numpy as np
import pytest

from hetjax.sampling.submodular.features import flat_features, k_means, moments, principal_components, split_large


def test_principal_components_are_those_of_the_svd():
    x = np.random.default_rng(0).normal(size=(300, 8)) * [9, 7, 5, 3, 1, 1, 1, 1] + 50
    mine = principal_components(flat_features(x), 3)
    left, scale, _ = np.linalg.svd(x - x.mean(0), full_matrices=False)
    expected = left[:, :3] * scale[:3]
    np.testing.assert_allclose(np.abs(mine), np.abs(expected), rtol=1e-3, atol=1e-3)
    assert principal_components(flat_features(x), 99).shape == (300, 8)


def test_moments_match_numpy_across_chunks():
    x = np.random.default_rng(1).normal(size=(9000, 3)).astype(np.float32)
    mean, covariance = moments(x)
    np.testing.assert_allclose(mean, x.astype(np.float64).mean(0), atol=1e-12)
    np.testing.assert_allclose(covariance, np.cov(x.astype(np.float64).T, bias=True), atol=1e-9)


def test_features_are_flattened_and_checked():
    assert flat_features(np.zeros((4, 2, 3), np.uint8)).shape == (4, 6)
    assert flat_features(np.arange(4)).shape == (4, 1)
    with pytest.raises(TypeError, match="expected numbers"):
        flat_features(np.array(["a"]))
    with pytest.raises(ValueError, match="embedding function"):
        principal_components(np.zeros((2, 5000), np.float32), 2)
    with pytest.raises(ValueError, match="at least 1"):
        principal_components(np.zeros((2, 5), np.float32), 0)


def test_k_means_finds_separated_clusters():
    rng = np.random.default_rng(2)
    x = np.concatenate([rng.normal(c, 0.2, (30, 2)) for c in (0.0, 5.0, 10.0)])
    found = k_means(x, 3)
    assert sorted({tuple(found[30 * c : 30 * c + 30].tolist()) for c in range(3)}) == [(k,) * 30 for k in range(3)]
    assert np.array_equal(found, k_means(x, 3))


@pytest.mark.parametrize("seed", range(5))
def test_k_means_assigns_every_sample_to_its_nearest_mean(seed):
    x = np.random.default_rng(seed).normal(size=(120, 2))
    found = k_means(x, 5, seed)
    mean = np.array([x[found == k].mean(0) for k in range(5)])
    assert np.array_equal(found, np.argmin(((x[:, None] - mean) ** 2).sum(-1), axis=1))


def test_k_means_of_scalars_and_of_duplicates():
    assert np.bincount(k_means(np.array([1.0, 1.1, 7.0, 7.1]), 2)).tolist() == [2, 2]
    assert len(k_means(np.ones((6, 2)), 3)) == 6
    with pytest.raises(ValueError, match="1 to 2"):
        k_means(np.ones((2, 2)), 3)


def test_splitting_respects_the_classes():
    classes = np.repeat([4, 8], [100, 10])
    parts = split_large(classes, np.random.default_rng(3).normal(size=(110, 2)), 30)
    assert np.bincount(parts).max() <= 30
    assert set(parts[:100]).isdisjoint(parts[100:])
    assert np.unique(parts[100:]).size == 1
