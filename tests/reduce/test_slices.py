"""Slices of the model: everything is owned once, by its share, and within the memory of its owner."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetjax.reduce import slices
from hetjax.reduce.slices import MEMBERS, assign, cut, shares

LINE = slices._ALIGNED  # elements: a cut may be off by one half of this
MODEL = [(0, 0, 4_194_304), (1, 0, 803_840), (2, 0, 10), (2, 10, 8_928)]  # about five million parameters


def owned(pieces, share_P, limit_P=None):
    """The share of the model that each process owns."""
    owners = assign([piece.size for piece in pieces], share_P, limit_P)
    assert owners is not None
    assert owners == sorted(owners)
    sizes = [piece.size for piece in pieces]
    return np.bincount(owners, sizes, minlength=len(share_P)) / sum(sizes)


def covered(pieces, places):
    """The elements of every leaf, and of every part, in the order of the pieces."""
    ranges = [r for piece in pieces for r in piece.ranges]
    runs = [r for piece in pieces for r in piece.runs]
    for leaf, (*_, size) in enumerate(places):
        mine = [(start, stop) for i, start, stop in ranges if i == leaf]
        assert [0, *(stop for _, stop in mine)] == [*(start for start, _ in mine), size] or (not mine and not size)
    assert sum(stop - start for _, start, stop in runs) == sum(size for *_, size in places)
    assert len({(part, start) for part, start, _ in runs}) == len(runs)
    for piece in pieces:
        assert piece.size == sum(stop - start for _, start, stop in piece.runs)


@pytest.mark.parametrize("processes", [1, 2, 3, 4, 5, 7, 8, 32])
def test_equal_processes_own_equal_shares(processes):
    pieces = cut(MODEL, "elements", np.ones(processes))
    covered(pieces, MODEL)
    share_P = shares(np.ones(processes))
    np.testing.assert_allclose(owned(pieces, share_P), share_P, rtol=0.01)


@pytest.mark.parametrize("members", [1, 2, 3, 4, 6, 12])
def test_members_of_an_elastic_fleet_own_equal_shares_of_the_same_pieces(members):
    pieces = cut(MODEL, "elements", np.ones(MEMBERS))
    np.testing.assert_allclose(owned(pieces, np.ones(members)), 1 / members, rtol=0.01)


def test_more_processes_do_not_cost_more_messages():
    """As many pieces as one process would have, or as there are owners."""
    for rates in ([1], [1, 1, 1, 1], [8, 4, 2, 2], [1] * 32):
        share_P = shares(np.array(rates, float))
        assert len(cut(MODEL, "elements", share_P)) <= max(9, len(rates))


@pytest.mark.parametrize("rates", [[2, 1, 2], [2.1, 1, 2], [1, 1, 3]])
def test_a_single_piece_goes_to_the_largest_share(rates):
    places = [(0, 0, 600_000)]
    share_P = shares(np.array(rates, float))
    for granularity in ("elements", "whole"):
        pieces = cut(places, granularity, share_P)
        assert [piece.size for piece in pieces] == [600_000]
        assert rates[int(np.argmax(owned(pieces, share_P)))] == max(rates)


def test_a_piece_that_no_process_has_memory_for_is_refused_or_cut():
    rate_P, limit_P = np.array([2.0, 1.0, 2.0]), np.array([0.5, 0.4, 0.3])
    share_P = shares(rate_P, limit_P)
    assert assign([1000], share_P, limit_P) is None
    pieces = cut([(0, 0, 60_000)], "elements", share_P, limit_P)
    assert np.all(owned(pieces, share_P, limit_P) <= limit_P + 1e-3)


def test_without_parameters_there_are_no_pieces():
    assert cut([(0, 0, 0)], "elements", np.ones(2)) == ()
    assert assign([], np.ones(2)) == []


def test_leaves_stay_whole():
    places = [(k, 0, size) for k, size in enumerate([700_000, 1_200_000, 300_000, 2_000_000, 800_000])]
    pieces = cut(places, "leaves", np.ones(3))
    covered(pieces, places)
    assert all(start == 0 and stop == places[leaf][2] for piece in pieces for leaf, start, stop in piece.ranges)


rates = st.lists(st.integers(1, 100), min_size=1, max_size=12).map(lambda rates: np.array(rates, float))
leaves = st.lists(st.integers(0, 3_000_000), min_size=1, max_size=12).filter(lambda sizes: sum(sizes) >= 2**21)


@settings(deadline=None, max_examples=200, print_blob=True, derandomize=True)
@given(rates, leaves, st.data())
def test_any_model_of_millions_is_divided_by_shares_within_the_limits(rate_P, sizes, data):
    limits = st.lists(st.integers(1, 10), min_size=len(rate_P), max_size=len(rate_P))
    limit_P = np.clip(np.array(data.draw(limits)) / 10, 1.0 / len(rate_P) + 1e-6, 1.0)
    share_P = shares(rate_P, limit_P)
    places = [(k, 0, size) for k, size in enumerate(sizes)]
    total = sum(sizes)
    pieces = cut(places, "elements", share_P, limit_P)
    covered(pieces, places)
    found_P = owned(pieces, share_P, limit_P)
    assert np.all(found_P <= limit_P + LINE / total)
    np.testing.assert_allclose(found_P, share_P, rtol=0.05, atol=LINE / total)


@settings(deadline=None, max_examples=200, print_blob=True, derandomize=True)
@given(rates, rates, leaves)
def test_later_shares_are_met_to_the_nearest_piece(before_P, after_P, sizes):
    pieces = cut([(k, 0, size) for k, size in enumerate(sizes)], "elements", shares(before_P))
    share_P = shares(after_P)
    ends = np.cumsum([piece.size for piece in pieces]) / sum(sizes)
    best = lambda owners: float(np.sum(np.square(np.bincount(owners, np.diff(ends, prepend=0), len(share_P)))[
        share_P > 0] / share_P[share_P > 0]))  # fmt: skip
    found = assign([piece.size for piece in pieces], share_P)
    by_middles = np.minimum(np.searchsorted(np.cumsum(share_P), ends - np.diff(ends, prepend=0) / 2), len(share_P) - 1)
    assert np.all(share_P[found] > 0)
    if np.all(share_P[by_middles] > 0):
        assert best(found) <= best(by_middles) * (1 + 1e-9)


@settings(deadline=None, max_examples=100, print_blob=True, derandomize=True)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=7), st.lists(st.integers(1, 9), min_size=1, max_size=3))
def test_no_division_within_the_limits_is_missed(sizes, tenths):
    """Against all divisions in which neighbors stay together."""
    limit_P = np.array(tenths) / 10
    share_P = np.ones(len(limit_P))
    total, slack = sum(sizes), LINE
    possible = any(
        all(
            sum(sizes[a:b]) <= limit * total + slack
            for limit, (a, b) in zip(limit_P, itertools.pairwise(bounds), strict=True)
        )
        for inner in itertools.combinations_with_replacement(range(len(sizes) + 1), len(limit_P) - 1)
        for bounds in [(0, *inner, len(sizes))]
    )
    assert (assign(sizes, share_P, limit_P) is not None) == possible
