"""Mixing matrices and their rounds, rejected matrices, matchings, and MATCHA's probabilities against a fine grid."""

import itertools
import json
from dataclasses import replace

import numpy as np
import pytest
from mixing_matrix import mixing_matrix

from hetjax.sync.topology import (
    Mixing,
    activation,
    complete,
    contraction,
    exchange_rounds,
    expected_contraction,
    laplacian,
    matcha,
    matchings,
    mixing_weight,
    neighbors,
    ring,
    topology,
)


def random_graph(seed, workers, share):
    """A connected graph: a random tree and further links."""
    rng = np.random.default_rng(seed)
    order = rng.permutation(workers)
    tree = {tuple(sorted((int(order[k]), int(order[rng.integers(k)])))) for k in range(1, workers)}
    return sorted(tree | {(a, b) for a in range(workers) for b in range(a + 1, workers) if rng.random() < share})


def metropolis(pairs, workers):
    """A doubly stochastic W over these links (Metropolis weights)."""
    degree = np.bincount(np.ravel(pairs), minlength=workers)
    matrix = np.zeros((workers, workers))
    for a, b in pairs:
        matrix[a, b] = matrix[b, a] = 1 / (1 + max(degree[a], degree[b]))
    return matrix + np.diag(1 - matrix.sum(axis=1))


def test_ring_and_complete():
    third, none = 1 / 3, 0
    expected = [
        [third, third, none, third],
        [third, third, third, none],
        [none, third, third, third],
        [third, none, third, third],
    ]
    np.testing.assert_allclose(ring(4), expected)
    np.testing.assert_allclose(ring(2), np.full((2, 2), 1 / 2))
    np.testing.assert_allclose(ring(1), [[1]])
    mixing = Mixing.of(ring(5))
    assert mixing.rounds == (((0, 1), (1, 2), (2, 3), (3, 4), (4, 0)), ((0, 4), (1, 0), (2, 1), (3, 2), (4, 3)))
    assert Mixing.of(complete(5)).uniform
    assert not mixing.uniform


@pytest.mark.parametrize("seed", range(12))
def test_rounds_reproduce_w_and_are_minimal(seed):
    rng = np.random.default_rng(seed)
    workers = int(rng.integers(4, 12))
    if seed % 2:
        matrix = metropolis(random_graph(seed, workers, 0.2), workers)
    else:  # not symmetric: a mean of permutations
        shuffles = [np.eye(workers)[rng.permutation(workers)] for _ in range(3)]
        matrix = (np.eye(workers) + sum(shuffles)) / 4
    mixing = Mixing.of(matrix)
    np.testing.assert_allclose(mixing_matrix(mixing), matrix, atol=1e-12)
    off = (matrix > 0) & ~np.eye(workers, dtype=bool)
    assert len(mixing.rounds) == max(off.sum(axis=0).max(), off.sum(axis=1).max())
    for pairs in mixing.rounds:
        senders, receivers = zip(*pairs, strict=True)
        assert len(set(senders)) == len(senders)
        assert len(set(receivers)) == len(receivers)


def test_without_links_there_are_no_rounds():
    assert exchange_rounds([], 3) == ()
    assert neighbors(np.eye(3)) == []


@pytest.mark.parametrize("kind", ["json", "npy"])
def test_a_matrix_from_a_file(tmp_path, kind):
    matrix, path = metropolis([(0, 1), (1, 2), (2, 3)], 4), tmp_path / f"chain.{kind}"
    path.write_text(json.dumps(matrix.tolist())) if kind == "json" else np.save(path, matrix.astype(np.float32))
    read, name = topology(str(path), 4)
    np.testing.assert_allclose(read, matrix, atol=1e-7)
    assert name == "chain"


@pytest.mark.parametrize(
    ("matrix", "sentence"),
    [
        (np.full((3, 3), 1 / 3), "4 workers"),
        ([[1.0, 0], [0]], "not a matrix of numbers"),
        (np.eye(4) * 2 - np.full((4, 4), 1 / 4), "negative"),
        (np.eye(4) * np.nan, "negative or not finite"),
        (np.tile([0.4, 0.2, 0.2, 0.2], (4, 1)), "column 0 sums to 1.6"),
        (np.tile([0.4, 0.2, 0.2, 0.2], (4, 1)).T, "row 0 sums to 1.6"),
        (np.kron(np.eye(2), np.full((2, 2), 0.5)), "never brings all workers together"),
        (np.roll(np.eye(4), 1, axis=0), "only swap"),
    ],
)
def test_an_invalid_matrix_is_rejected(matrix, sentence):
    with pytest.raises(ValueError, match=sentence):
        topology(np.array(matrix, dtype=object) if isinstance(matrix, list) else matrix, 4)


def test_an_invalid_file_is_rejected(tmp_path):
    with pytest.raises(ValueError, match="expected 'ring', 'complete'"):
        topology("star", 4)
    with pytest.raises(FileNotFoundError, match="There is no file"):
        topology(str(tmp_path / "missing.json"), 4)
    np.save(tmp_path / "pickled.npy", np.array([{"a": 1}], dtype=object))
    with pytest.raises(ValueError, match="holds no mixing matrix"):
        topology(tmp_path / "pickled.npy", 4)
    (tmp_path / "broken.json").write_text("[[1, 0")
    with pytest.raises(ValueError, match="holds no mixing matrix"):
        topology(tmp_path / "broken.json", 4)


@pytest.mark.parametrize("seed", range(30))
def test_matchings_hold_every_link_once_and_are_at_most_one_above_the_degree(seed):
    workers = 3 + seed % 9
    pairs = random_graph(seed, workers, [0.1, 0.4, 1.0][seed % 3])
    found = matchings(pairs, workers)
    assert sorted(itertools.chain(*found)) == pairs
    for matching in found:
        ends = list(itertools.chain(*matching))
        assert len(set(ends)) == len(ends)
    assert len(found) <= np.bincount(np.ravel(pairs)).max() + 1


def test_matchings_of_a_bipartite_graph_are_minimal():
    assert len(matchings([(0, 1), (0, 3), (1, 2), (2, 3)], 4)) == 2  # a ring of four
    assert len(matchings([(0, 2), (1, 2), (2, 3), (2, 4)], 5)) == 4  # a star
    assert len(matchings([(a, a ^ bit) for a in range(8) for bit in (1, 2, 4) if a < a ^ bit], 8)) == 3  # a cube


def laplacians(pairs, workers):
    return np.array([laplacian(matching, workers) for matching in matchings(pairs, workers)])


@pytest.mark.parametrize("budget", [0.3, 0.5, 0.8])
@pytest.mark.parametrize(
    "pairs", [[(0, 1), (0, 2), (0, 3), (2, 3), (3, 4)], [(0, 1), (1, 2), (2, 3), (3, 4), (0, 4), (0, 2)]]
)
def test_activation_is_as_good_as_a_fine_grid(pairs, budget):
    laplacian_MxWxW = laplacians(pairs, 5)
    connectivity = lambda p_xM: np.linalg.eigvalsh(np.tensordot(p_xM, laplacian_MxWxW, 1))[..., 1]
    probability_M, number = activation(laplacian_MxWxW, budget), len(laplacian_MxWxW)
    assert probability_M.mean() <= budget + 1e-9
    assert ((probability_M >= 0) & (probability_M <= 1)).all()
    axes = np.meshgrid(*[np.linspace(0, 1, 41)] * (number - 1))
    grid_GxM = np.stack([*axes, budget * number - sum(axes)], axis=-1).reshape(-1, number)
    grid_GxM = grid_GxM[(grid_GxM[:, -1] >= 0) & (grid_GxM[:, -1] <= 1)]
    assert connectivity(probability_M) >= 0.99 * connectivity(grid_GxM).max()


def test_the_bridge_of_a_graph_is_used_most():
    """Two triangles and a bridge, as in MATCHA's figure: the bridge's matching gets the largest probability."""
    pairs = [(0, 1), (0, 2), (1, 2), (2, 3), (3, 4), (3, 5), (4, 5)]
    found = matchings(pairs, 6)
    probability_M = activation(laplacians(pairs, 6), 0.5)
    assert [(2, 3) in matching for matching in found][int(np.argmax(probability_M))]


@pytest.mark.parametrize("workers", [4, 5, 8])
@pytest.mark.parametrize("budget", [0.2, 0.5, 1.0])
def test_the_mixing_weight_is_optimal_and_contracts(workers, budget):
    mixing = matcha(ring(workers), budget)
    laplacian_MxWxW = np.array([laplacian([p for p in pairs if p[0] < p[1]], workers) for pairs in mixing.rounds])
    alpha = mixing_weight(laplacian_MxWxW, mixing.probability_R)
    reached = expected_contraction(laplacian_MxWxW, mixing.probability_R, alpha)
    assert reached < 1
    for other in np.linspace(0.01, 1, 100):
        assert reached <= expected_contraction(laplacian_MxWxW, mixing.probability_R, other) + 1e-9
    # the closed form of E[W^T W] against the mean over all draws
    mean = np.zeros((workers, workers))
    for draw in itertools.product([0, 1], repeat=len(mixing.rounds)):
        drawn = np.array(draw, bool)
        weight = np.prod(np.where(drawn, mixing.probability_R, 1 - mixing.probability_R))
        mean += weight * mixing_matrix(mixing, drawn).T @ mixing_matrix(mixing, drawn)
    assert np.linalg.norm(mean - 1 / workers, 2) == pytest.approx(reached, abs=1e-9)


def test_a_budget_of_one_uses_all_links_with_the_optimal_weight():
    """I - alpha L with alpha = 2 / (second smallest + largest eigenvalue): 4 workers on a ring have 2 and 4."""
    mixing = matcha(ring(4), 1.0)
    assert mixing.probability_R.tolist() == [1, 1]
    np.testing.assert_allclose(mixing.weight_RxW, 1 / 3, rtol=1e-6)
    assert contraction(mixing_matrix(mixing)) == pytest.approx(1 / 3, rel=1e-6)


def test_draws_depend_on_seed_and_step_alone_and_keep_the_budget():
    mixing = matcha(ring(8), 0.5)
    draws = np.array([mixing.active(3, step) for step in range(2000)])
    assert np.abs(draws.mean(axis=0) - mixing.probability_R).max() < 0.05
    np.testing.assert_array_equal(draws[17], mixing.active(3, 17))
    assert (draws != [mixing.active(4, step) for step in range(2000)]).any()
    for draw in ([True, False], [False, False]):
        np.testing.assert_allclose(mixing_matrix(mixing, np.array(draw)).sum(axis=0), 1)


def test_matcha_rejects_invalid_budgets_and_graphs():
    with pytest.raises(ValueError, match="expected a share"):
        matcha(ring(4), 0.0)
    one_way = (np.eye(4) + np.roll(np.eye(4), 1, axis=0)) / 2
    with pytest.raises(ValueError, match="symmetric"):
        matcha(one_way, 0.5)


@pytest.mark.parametrize("name", ["ring", "matcha"])
def test_weighted_mixing_keeps_the_shares_and_is_w_itself_for_equal_ones(name):
    mixing = Mixing.of(ring(5)) if name == "ring" else matcha(ring(5), 0.5)
    counts_W = np.array([8, 4, 2, 1, 0])
    share_W = mixing.shares(counts_W)
    np.testing.assert_allclose(share_W * (1 + 1 / 40), np.array([8, 4, 2, 1, 15 / 40]) / 15)  # the floor is 1 / (8 N)
    # A round of MATCHA is a matching and keeps them by itself.
    for active_R in (None, *([np.arange(len(mixing.rounds)) == 0] if name == "matcha" else [])):
        weighted = mixing_matrix(replace(mixing, weight_RxW=mixing.weighted(share_W)), active_R)
        np.testing.assert_allclose(share_W @ weighted, share_W)
        np.testing.assert_allclose(weighted.sum(axis=1), 1)
    np.testing.assert_array_equal(mixing.weighted(np.full(5, 0.2)), mixing.weight_RxW)


def test_a_matrix_that_is_not_symmetric_keeps_equal_shares():
    swapped = np.array([[0.5, 0.3, 0.2], [0.2, 0.5, 0.3], [0.3, 0.2, 0.5]])
    np.testing.assert_allclose(Mixing.of(swapped).shares(np.array([4, 2, 1])), 1 / 3)
