"""The greedy partition equals, turn by turn, a plain one that computes f from its definition."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetjax.sampling.blocks import quotas
from hetjax.sampling.submodular import OBJECTIVES, submodular_blocks
from hetjax.sampling.submodular.greedy import TURNS, fill_blocks, part_quotas, parts_per_worker
from hetjax.sampling.submodular.objectives import GRID, gaussian_kernel, median_bandwidth, value


def f(objective, sim, block):
    """Both definitions as Python loops over float64."""
    everyone = range(len(sim))
    if objective == "facility-location":
        return sum(max((float(sim[u, a]) for a in block), default=0.0) for u in everyone)
    return sum(float(sim[u, a]) for u in everyone if u not in block for a in block)


def plain_greedy(objective, rule, sim, quota, rates):
    """The published algorithm, everything computed from scratch at every turn."""
    blocks = [set() for _ in quota]
    choosing, left, turns = list(range(len(quota))), set(range(len(sim))), []
    key = {
        "min-block": lambda j: f(objective, sim, blocks[j]),
        "per-rate": lambda j: f(objective, sim, blocks[j]) / rates[j] if rates[j] else np.inf,
        "fill": lambda j: len(blocks[j]) / quota[j] if quota[j] else np.inf,
    }[rule]
    while left and choosing:
        j = min(choosing, key=key)  # min and max return the first of equals
        if len(blocks[j]) < quota[j]:
            now = f(objective, sim, blocks[j])
            v = max(sorted(left), key=lambda v: f(objective, sim, blocks[j] | {v}) - now)
            blocks[j].add(v)
            left.discard(v)
            turns.append((j, v))
        else:
            choosing.remove(j)
    return turns, [f(objective, sim, block) for block in blocks]


def similarities(rng, size, kind):
    if kind == "ties":  # few distinct values: nearly every choice is a tie
        sim = rng.choice([0.0, 0.5, 1.0], (size, size))
        sim = np.maximum(sim, sim.T)
    elif kind == "duplicates":
        return gaussian_kernel(np.repeat(rng.normal(size=(-(-size // 2), 3)), 2, axis=0)[:size], 1.0)
    else:
        return gaussian_kernel(rng.normal(size=(size, 3)), 1.0)
    np.fill_diagonal(sim, 1.0)
    return sim.astype(np.float32)


@pytest.mark.parametrize("kind", ["points", "duplicates", "ties"])
@pytest.mark.parametrize("rule", sorted(TURNS))
@pytest.mark.parametrize("objective", sorted(OBJECTIVES))
@given(
    size=st.integers(1, 14),
    rates=st.lists(st.integers(0, 5), min_size=1, max_size=4).filter(any),
    seed=st.integers(0, 999),
)
@settings(max_examples=12, deadline=None)
def test_every_turn_equals_the_plain_greedy(objective, rule, kind, size, rates, seed):
    sim = similarities(np.random.default_rng(seed), size, kind)
    rates = np.array(rates, np.float64)
    quota = quotas(np.array([size]), rates)[0]
    expected, values = plain_greedy(objective, rule, sim, quota.tolist(), rates.tolist())
    owner, state = np.full(size, -1), OBJECTIVES[objective](sim, len(rates))
    assert list(fill_blocks(state, owner, quota, rates, rule)) == expected
    assert state.value_W.tolist() == values  # bit-exact, thanks to the grid of the kernel
    assert [value(objective, sim, np.flatnonzero(owner == j)) for j in range(len(rates))] == values
    assert np.bincount(owner, minlength=len(rates)).tolist() == quota.tolist()


@pytest.mark.parametrize("objective", sorted(OBJECTIVES))
def test_gains_do_not_drift_over_hundreds_of_turns(objective):
    rng = np.random.default_rng(5)
    sim = gaussian_kernel(rng.normal(size=(700, 5)), 1.5)
    rates = np.array([4.0, 2.0, 1.0, 1.0])
    owner, state = np.full(700, -1), OBJECTIVES[objective](sim, 4)
    for turn, (worker, _) in enumerate(fill_blocks(state, owner, quotas(np.array([700]), rates)[0], rates, "fill")):
        if turn % 97 == 0:
            block, free = np.flatnonzero(owner == worker), np.flatnonzero(owner < 0)
            now = value(objective, sim, block)
            assert state.value_W[worker] == now
            for v in free[:: max(len(free) // 5, 1)]:
                assert state.gain_WxV[worker, v] == value(objective, sim, np.append(block, v)) - now
    assert (owner >= 0).all()


def test_facility_location_by_hand():
    sim = np.array([[1.0, 0.5, 0.25], [0.5, 1.0, 0.5], [0.25, 0.5, 1.0]], np.float32)
    owner, state = np.full(3, -1), OBJECTIVES["facility-location"](sim, 2)
    # Sample 1 covers most (2.0). Block 1 is empty, so it is next: 0 and 2 both give it 1.75, and 0 comes first.
    # Its value stays below 2.0 but it is full (quota 1), so block 0 takes the last.
    turns = list(fill_blocks(state, owner, np.array([2, 1]), np.array([2.0, 1.0]), "min-block"))
    assert turns == [(0, 1), (1, 0), (0, 2)]
    assert state.value_W.tolist() == [2.5, 1.75]


def test_graph_cut_by_hand():
    sim = np.array([[1.0, 0.5, 0.25], [0.5, 1.0, 0.5], [0.25, 0.5, 1.0]], np.float32)
    owner, state = np.full(3, -1), OBJECTIVES["graph-cut"](sim, 2)
    # Gains 0.75, 1.0, 0.75: sample 1 to block 0; then 0 to block 1; block 0 with sample 2: 0.5 + 0.25 = 0.75.
    turns = list(fill_blocks(state, owner, np.array([2, 1]), np.array([2.0, 1.0]), "min-block"))
    assert turns == [(0, 1), (1, 0), (0, 2)]
    assert state.value_W.tolist() == [0.75, 0.75]


def test_kernel_is_gaussian_on_a_grid():
    x = np.random.default_rng(1).normal(size=(600, 7)) + 100.0
    sim = gaussian_kernel(x, 2.0)
    expected = np.exp(-((x[:, None] - x) ** 2).sum(-1) / 8.0)
    np.testing.assert_allclose(sim, expected, atol=0.51 / GRID)
    assert sim.dtype == np.float32
    assert np.array_equal(sim, sim.T)
    assert np.all(np.diagonal(sim) == 1.0)
    assert np.array_equal(sim.astype(np.float64) * GRID, np.rint(sim.astype(np.float64) * GRID))


def test_median_bandwidth():
    x = np.random.default_rng(2).normal(size=(90, 4))
    distance = np.sqrt(((x[:, None] - x) ** 2).sum(-1))[np.triu_indices(90, 1)]
    assert median_bandwidth(x) == pytest.approx(np.median(distance))
    assert median_bandwidth(np.ones((9, 3))) == 1.0
    assert median_bandwidth(np.array([[0.0], [0], [0], [0], [0], [3]])) == pytest.approx(3.0)
    many = np.random.default_rng(3).normal(size=(5000, 2))
    assert median_bandwidth(many) == pytest.approx(np.sqrt(2 * 2 * np.log(2)), rel=0.05)  # of normal samples in 2-D
    assert median_bandwidth(many) == median_bandwidth(many)


def test_every_class_is_divided_by_the_rates():
    rng = np.random.default_rng(4)
    classes = rng.choice([3, 5, 9], 200, p=[0.6, 0.3, 0.1])
    reported = []
    blocks = submodular_blocks(rng.normal(size=(200, 4)), classes, [4, 2, 1, 1], progress=reported.append)
    assert sum(reported) == 200
    sizes = np.array([(classes == c).sum() for c in (3, 5, 9)])
    counted = [[(blocks.owner_D[classes == c] == j).sum() for j in range(4)] for c in (3, 5, 9)]
    assert np.array_equal(counted, quotas(sizes, np.array([4, 2, 1, 1])))
    assert blocks.settings["rule"] == "parts"
    assert submodular_blocks(rng.normal(size=(9, 2)), np.zeros(9), [1, 1, 0]).settings["rule"] == "min-block"


def test_parts_are_few_and_of_similar_size():
    assert parts_per_worker(np.array([4.0, 2, 1, 1])).tolist() == [4, 2, 1, 1]
    assert parts_per_worker(np.array([1.0, 1, 0, 1])).tolist() == [1, 1, 0, 1]
    spread = lambda size_W: size_W.max() / size_W.min()
    rates = np.array([1, 0.97, 0.51, 0.24])
    parts = parts_per_worker(rates)
    assert parts.sum() < 32
    assert spread(rates / parts) <= 1.2
    extreme = np.array([100.0, 1])  # equal parts would take 101 of them
    parts = parts_per_worker(extreme)
    assert parts.sum() <= 33
    assert spread(extreme / parts) < spread(extreme) / 20


def test_quotas_are_spread_evenly_over_parts():
    quota_P, worker_P = part_quotas(np.array([9, 4, 1]), np.array([4, 2, 0]))
    assert quota_P.tolist() == [3, 2, 2, 2, 2, 2, 1]
    assert worker_P.tolist() == [0, 0, 0, 0, 1, 1, 2]


@pytest.mark.parametrize("objective", sorted(OBJECTIVES))
def test_rule_parts_joins_greedy_blocks_of_equal_size(objective):
    x = np.random.default_rng(8).normal(size=(160, 3))
    joined = submodular_blocks(x, np.zeros(160), [4, 2, 1, 1], objective=objective, rule="parts", bandwidth=1.0)
    apart = submodular_blocks(x, np.zeros(160), [1] * 8, objective=objective, rule="fill", bandwidth=1.0)
    assert np.array_equal(joined.owner_D, np.array([0, 0, 0, 0, 1, 1, 2, 3])[apart.owner_D])


def test_large_classes_are_split_first():
    x = np.concatenate([np.random.default_rng(6).normal(c, 0.1, (40, 2)) for c in (0.0, 9.0)])
    blocks = submodular_blocks(x, np.zeros(80), [1, 1], largest=40)
    assert [np.unique(blocks.classes_D[half]).size for half in (slice(0, 40), slice(40, 80))] == [1, 1]
    assert np.bincount(blocks.owner_D[:40]).tolist() == [20, 20]
    same = submodular_blocks(np.ones((50, 2)), np.zeros(50), [1, 1], largest=7)
    assert np.bincount(same.classes_D).max() <= 7


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"objective": "cut"}, "There is no objective 'cut'"),
        ({"rule": "best"}, "There is no rule 'best'"),
        ({"bandwidth": -1.0}, "bandwidth is -1.0"),
        ({"bandwidth": "mean"}, "or 'median'"),
        ({"rates_W": [0, 0]}, "not all zero"),
        ({"classes_D": np.zeros(5)}, "6 rows of features but 5 classes"),
        ({"features_DxF": np.array([[0.0], [np.nan], [0], [0], [0], [0]])}, "sample 1 hold NaN"),
    ],
)
def test_invalid_arguments_are_rejected(change, message):
    arguments = {"features_DxF": np.arange(6.0)[:, None], "classes_D": np.zeros(6), "rates_W": [1, 1]} | change
    with pytest.raises(ValueError, match=message):
        submodular_blocks(**arguments)
