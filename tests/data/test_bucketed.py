"""Samples of unequal length: padded to their bucket, with the values and the mask that were asked for."""

from collections import namedtuple

import numpy as np
import pytest

from hetjax import Bucketed

SIZES = [3, 8, 1, 5, 8, 2]


def sample(size):
    return {"tokens": np.arange(1, size + 1, dtype=np.int32), "label": np.int32(size)}


class Sequences:
    def __len__(self):
        return len(SIZES)

    def __getitem__(self, index):
        return sample(SIZES[index])


def test_samples_are_padded_to_the_shortest_bucket_that_holds_them():
    source = Bucketed(Sequences(), (2, 4, 8, 16), pad={"tokens": -1}, mask="weights")
    assert source.lengths == [8, 4, 2]  # those that have samples, longest first
    assert source.bucket_N.tolist() == [1, 0, 2, 0, 0, 2]
    assert source.fill == sum(SIZES) / (4 + 8 + 2 + 8 + 8 + 2)
    batch = source.rows(np.array([2, 5]))
    np.testing.assert_array_equal(batch["tokens"], [[1, -1], [1, 2]])
    np.testing.assert_array_equal(batch["weights"], [[1, 0], [1, 1]])
    np.testing.assert_array_equal(batch["label"], [1, 2])
    assert [len(rows["tokens"][0]) for rows in source.samples(lambda size: np.zeros(1, int))] == [8, 4, 2]
    np.testing.assert_array_equal(source[0]["tokens"], [1, 2, 3, -1])


def test_padded_arrays_are_cut_to_their_bucket():
    tokens = np.zeros((6, 8), np.int32)
    for row, size in enumerate(SIZES):
        tokens[row, :size] = sample(size)["tokens"]
    given = {"tokens": tokens, "label": np.array(SIZES)}
    cut = Bucketed(given, (2, 4, 8), sizes=SIZES)
    ragged = Bucketed(Sequences(), (2, 4, 8))
    for indices in ([0], [2, 5], [1, 3, 4]):
        for name in ("tokens", "label"):
            np.testing.assert_array_equal(cut.rows(np.array(indices))[name], ragged.rows(np.array(indices))[name])


def test_tuples_and_arrays_with_further_axes():
    rows = [(np.ones((size, 2)), np.ones(3)) for size in SIZES]
    source = Bucketed(rows, (4, 8), pad={0: 0.5})
    features, fixed = source.rows(np.array([2]))
    assert features.shape == (1, 4, 2)
    assert (features[0, 1:] == 0.5).all()
    assert fixed.shape == (1, 3)


def test_lists_of_numbers_and_named_tuples():
    kind = namedtuple("kind", "tokens label")
    source = Bucketed([kind([7] * size, size) for size in SIZES], (4, 8), pad={"tokens": 0})
    batch = source.rows(np.array([0, 2]))
    assert isinstance(batch, kind)
    np.testing.assert_array_equal(batch.tokens, [[7, 7, 7, 0], [7, 0, 0, 0]])
    np.testing.assert_array_equal(batch.label, [3, 1])


def test_a_number_of_tokens_limits_the_samples_of_a_step():
    assert Bucketed(Sequences(), (2, 4, 8)).sampler(5).batch_K == [5, 5, 5]
    assert Bucketed(Sequences(), (2, 4, 8), tokens=16).sampler(5).batch_K == [2, 4, 5]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lengths": (2, 4)}, "Sample 1 has 8 tokens, but the longest bucket has 4"),
        ({"lengths": ()}, "distinct numbers"),
        ({"lengths": (8, 8)}, "distinct numbers"),
        ({"lengths": (8, 0)}, "length"),
        ({"sizes": [1, 2]}, "6 whole numbers"),
        ({"sizes": [1.5] * 6}, "6 whole numbers"),
        ({"pad": {"token": 0}}, r"pad names \['token'\]"),
        ({"pad": {}}, "no array to pad"),
        ({"tokens": 4}, "tokens"),
    ],
)
def test_mistakes_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        Bucketed(Sequences(), **{"lengths": (8,), **options})


def test_a_mask_needs_names():
    with pytest.raises(TypeError, match="have to be dicts"):
        Bucketed([(np.ones(2),)], (2,), mask="weights")
