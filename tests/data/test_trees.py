"""Which sources are arrays with a row per sample and which are samples, and that structures are kept."""

from collections import OrderedDict, UserDict
from typing import NamedTuple

import numpy as np
import pytest

from hetjax.data import MemorySource, fetch
from hetjax.data.batches import as_batch
from hetjax.data.memory import as_source
from hetjax.data.prefetch import Feed, Rows
from hetjax.data.trees import holds_columns, map_leaves, named_leaves
from hetjax.sampling.order import Sampler

X, Y = np.arange(12.0).reshape(6, 2), np.arange(6)


class Pair(NamedTuple):
    x: object
    y: object


class Counted(NamedTuple):
    rows: object
    index: object


class Tensor:
    """As much of a tensor of PyTorch as `np.asarray` needs; its dtype is not one of NumPy."""

    def __init__(self, values):
        self.values, self.shape, self.dtype = values, values.shape, f"other.{values.dtype}"

    def __len__(self):
        return len(self.values)

    def __getitem__(self, index):
        return Tensor(np.asarray(self.values[index]))

    def __array__(self, dtype=None, copy=None):
        return np.asarray(self.values, dtype)


def shown(tree):
    """A tree with the lists of its arrays, to compare structure, type and values at once."""
    return repr(map_leaves(lambda x: np.asarray(x).tolist(), tree))


COLUMNS = [
    {"x": X, "y": Y},
    {"in": {"x": X, "more": (X, Y)}, "y": Y},
    (X, Y),
    (X, X),  # like arrays in a tuple are arrays with a row per sample
    (X,),
    ({"x": X}, Y),
    Pair(X, Y),
    Pair({"x": X}, (Y, Y)),
    Counted(X, Y),
    [X, Y],  # samples cannot differ in shape
    [X, X.astype(np.float32)],
    [{"x": X}, {"y": Y}],
    (Tensor(X), Tensor(Y)),
    {"x": X.tolist(), "y": Y.tolist()},
    {"x": list(X), "y": list(Y)},
    UserDict({"x": X, "y": Y}),
    X,
]


@pytest.mark.parametrize("columns", COLUMNS, ids=lambda columns: type(columns).__name__)
def test_a_tree_of_arrays_is_a_source_of_its_rows_and_keeps_its_structure(columns):
    source = as_source(columns)
    assert len(source) == 6
    arrays = {name: np.asarray(values) for name, values in named_leaves(MemorySource(columns).arrays)}
    index = np.array([4, 1, 1])
    batch = fetch(source, index)
    for name, values in named_leaves(batch):
        np.testing.assert_array_equal(values, arrays[name][index])
        assert values.dtype == arrays[name].dtype
    assert shown(source[3]) == shown(map_leaves(lambda x: x[0], fetch(source, np.array([3]))))
    samples = [source[i] for i in range(6)]
    assert shown(fetch(samples, index)) == shown(batch)  # one by one
    assert type(batch) is (dict if isinstance(columns, UserDict) else type(columns))


@pytest.mark.parametrize(
    "samples",
    [
        [{"x": np.zeros(5), "y": np.zeros(5)}] * 3,  # sequences of one length: rows are not tokens
        [(np.zeros(5), np.zeros(5))] * 3,
        [np.zeros(5)] * 3,
        [X, X],
        [([1.0, 2.0], 3)] * 3,
        ((X, 1), (X, 2)),  # numbers have no rows
        ({"x": X[:2], "y": 1}, {"x": X[:2], "y": 2}),
        [],
        (),
    ],
)
def test_like_elements_are_samples(samples):
    assert not holds_columns(samples)
    assert as_source(samples) is samples


def test_a_tuple_that_could_be_either_is_refused():
    with pytest.raises(ValueError, match="tuple of 2 dicts of like arrays with 6 rows could be samples, or arrays"):
        as_source(({"x": X}, {"x": X}))


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ((X, Y[:5]), r"same number of rows, one per sample, but they have \{'0': 6, '1': 5\}"),
        (Pair(X, Y[:5]), r"\{'x': 6, 'y': 5\}"),
        ({"in": {"x": X}, "y": Y[:5]}, r"\{'in/x': 6, 'y': 5\}"),
        ({"x": X, "y": 3}, r"\{'x': 6, 'y': None\}"),
        ({}, "same number of rows"),
        ({"x": [X, X[:3]]}, r"sample 1 is float64 of shape \(3, 2\)"),
    ],
)
def test_arrays_that_do_not_go_together_are_refused(columns, words):
    with pytest.raises(ValueError, match=words):
        as_source(columns)


def test_lists_in_samples_are_arrays_if_they_hold_numbers_and_branches_otherwise():
    lists = [{"x": [[1.0, 2], [3, i]], "y": [i]} for i in range(4)]
    batch = fetch(lists, np.array([0, 3]))
    assert batch["x"].shape == (2, 2, 2)
    assert batch["y"].tolist() == [[0], [3]]
    branch = fetch([[np.full(2, i), i] for i in range(4)], np.array([0, 3]))
    assert shown(branch) == "[[[0, 0], [3, 3]], [0, 3]]"
    same = fetch([[np.full(2, i), np.full(2, -i)] for i in range(4)], np.array([1, 2]))
    assert isinstance(same, list)
    assert [part.tolist() for part in same] == [[[1, 1], [2, 2]], [[-1, -1], [-2, -2]]]


def test_named_tuples_of_samples_are_kept():
    batch = fetch([Pair({"a": np.full(2, i)}, [i, i]) for i in range(4)], np.array([0, 3]))
    assert shown(batch) == "Pair(x={'a': [[0, 0], [3, 3]]}, y=[[0, 0], [3, 3]])"
    assert isinstance(fetch([Counted(1, 2)] * 3, np.arange(3)), Counted)


@pytest.mark.parametrize(
    ("samples", "error", "words"),
    [
        ([[1, [2, 3]]], ValueError, "Samples are lists that are no arrays .* give unlike parts as a tuple"),
        ([{"x": [[1, 2], [3]]}], ValueError, r"Samples\['x'\] are lists that are no arrays"),
        ([{"x": None}], TypeError, r"Sample 0\['x'\] is None, not numbers"),
        ([(1, 2), Pair(1, 2)], ValueError, "sample 1 is a Pair of 2 while sample 0 is a tuple of 2"),
        ([[X, Y], [X]], ValueError, "sample 1 is a list of 1 while sample 0 is a list of 2"),
        ([Pair(X, Y), Pair(X, Y[:5])], ValueError, r"sample 1\['y'\] is int64 of shape \(5,\)"),
    ],
)
def test_broken_samples_are_named(samples, error, words):
    with pytest.raises(error, match=words):
        fetch(samples, np.arange(len(samples)))


def test_structure_survives_prefetching_padding_and_slicing():
    source = as_source(Pair({"x": X}, [X[:, 0], Y]))
    feed = Feed(source, Sampler(6, 4, shuffle=False))
    try:
        feed.prepare(0, 1, 3)
        tree, origin = feed.take(0, 0, 4)  # one row before and one after what was prefetched
    finally:
        feed.close()
    assert (origin, type(tree), type(tree.y)) == (0, Pair, list)
    padded = Rows(tree, 0).block(2, 4)
    assert isinstance(padded, Pair)
    assert padded.y[1].tolist() == [2, 3, 3, 3]
    assert padded.x["x"].dtype == np.float32  # as JAX has it


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        ({"x": X.tolist(), "y": Y.tolist()}, {"x": X, "y": Y}),
        ([Tensor(X), Tensor(Y)], [X, Y]),
        (Pair(X, (Y, Y)), Pair(X, (Y, Y))),
        (Counted(X, Y), Counted(X, Y)),
        (UserDict({"x": X, "y": UserDict(a=Y)}), {"x": X, "y": {"a": Y}}),
        (OrderedDict(y=Y, x=X), OrderedDict(y=Y, x=X)),
        (X, X),
        (Y.tolist(), Y),
    ],
    ids=lambda given: type(given).__name__,
)
def test_batches_keep_their_structure(batch, expected):
    made = as_batch(batch, 6)
    assert len(made) == 6
    assert type(made.rows(0, 6)) is type(expected)
    assert shown(made.rows(0, 6)) == shown(expected)
    assert {values.dtype.itemsize for _, values in named_leaves(made.rows(0, 6))} == {4}


def test_a_single_sample_is_no_batch():
    with pytest.raises(ValueError, match=r"got a dict of .*If the stream yields single samples, batch them first"):
        as_batch({"x": X[0], "y": 3}, 6)


def test_a_memory_mapped_array_is_never_copied_whole(tmp_path):
    np.save(tmp_path / "x.npy", X)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    for columns in ((mapped, Y), {"in": {"x": mapped}}, mapped):
        source = as_source(columns)
        held = next(values for _, values in named_leaves(source.arrays))
        assert np.shares_memory(held, mapped)
        (_, rows), *_ = named_leaves(fetch(source, np.array([5, 0])))
        assert not np.shares_memory(rows, mapped)
        np.testing.assert_array_equal(rows, X[[5, 0]])
