"""Sources: all ways of fetching give the same rows, and broken samples are rejected by index."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetjax.data import MemorySource, RowSource, Source, fetch, load

SPECS = ["digits", "synthetic", "text"]


class OneByOne:
    """A source without `rows`, as a user would write it."""

    def __init__(self, source: RowSource):
        self.source = source

    def __len__(self):
        return len(self.source)

    def __getitem__(self, index):
        return self.source[index]


def assert_equal(one, other):
    assert one.keys() == other.keys()
    for key in one:
        assert one[key].dtype == other[key].dtype
        np.testing.assert_array_equal(one[key], other[key])


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("split", ["train", "test"])
def test_rows_and_single_samples_agree(spec, split):
    source = load(spec, split)
    assert isinstance(source, Source)
    indices = np.array([3, 0, len(source) - 1, 3])
    assert_equal(fetch(source, indices), fetch(OneByOne(source), indices))
    assert_equal(fetch(source, indices), source[indices])
    assert source[0].keys() == fetch(source, indices).keys()
    first = next(iter(source[0].values()))
    assert first.shape == source.description.input_shape


@pytest.mark.parametrize("spec", SPECS)
def test_loading_twice_gives_the_same_samples(spec):
    assert_equal(fetch(load(spec), np.arange(9)), fetch(load(spec), np.arange(9)))


@pytest.mark.parametrize("spec", ["digits", "synthetic"])
def test_images_are_floats_between_0_and_1_and_labels_are_classes(spec):
    source = load(spec)
    batch = fetch(source, np.arange(len(source)))
    assert batch["image"].dtype == np.float32
    assert batch["label"].dtype == np.int32
    assert batch["image"].ndim == 4
    assert 0 <= batch["image"].min() < 0.1
    assert 0.9 < batch["image"].max() <= 1
    assert set(batch["label"]) == set(range(source.description.classes))


def test_digits_split_is_stratified_and_complete():
    train, test = (load("digits", split) for split in ("train", "test"))
    assert len(train) + len(test) == 1797
    total = np.bincount(np.concatenate([train.arrays["label"], test.arrays["label"]]))
    share = np.bincount(test.arrays["label"]) / total
    assert np.all(np.abs(share - 0.2) < 0.01)


@pytest.mark.parametrize("index", [-1, 1797])
def test_an_index_out_of_range_is_rejected(index):
    with pytest.raises(IndexError, match=f"Index {index} is outside digits"):
        fetch(load("digits"), np.array([0, index]))


@given(st.lists(st.integers(0, 19), min_size=1, max_size=30))
@settings(max_examples=30, deadline=None)
def test_memory_rows_are_the_rows_of_the_arrays(indices):
    arrays = {"a": np.arange(40).reshape(20, 2), "b": np.arange(20.0)}
    batch = fetch(MemorySource(arrays), np.array(indices))
    np.testing.assert_array_equal(batch["a"], arrays["a"][indices])
    np.testing.assert_array_equal(batch["b"], arrays["b"][indices])


@pytest.mark.parametrize("name", ["image", "img"])
def test_bytes_of_a_user_are_scaled_only_on_request(name):
    arrays = {name: np.arange(12, dtype=np.uint8).reshape(4, 3)}
    batch = fetch(MemorySource(arrays), np.arange(4))
    assert batch[name].dtype == np.uint8
    np.testing.assert_array_equal(batch[name], arrays[name])
    scaled = fetch(MemorySource(arrays, scale={name: 1 / 255}), np.arange(4))
    assert scaled[name].dtype == np.float32
    np.testing.assert_array_equal(scaled[name], arrays[name] * np.float32(1 / 255))
    with pytest.raises(ValueError, match="scale names"):
        MemorySource(arrays, scale={"other": 0.5})


def test_arrays_of_different_length_are_rejected():
    with pytest.raises(ValueError, match=r"'a': 3, 'b': 4"):
        MemorySource({"a": np.zeros(3), "b": np.zeros(4)})


def test_nested_and_tuple_samples_are_stacked():
    source = [({"x": np.full(2, i)}, i) for i in range(4)]
    inputs, labels = fetch(source, np.array([1, 3]))
    np.testing.assert_array_equal(inputs["x"], [[1, 1], [3, 3]])
    np.testing.assert_array_equal(labels, [1, 3])


@pytest.mark.parametrize(
    ("odd", "message"),
    [
        (
            {"x": np.zeros(3)},
            r"sample 2\['x'\] is float64 of shape \(3,\) while sample 0\['x'\] is float64 of shape",
        ),
        ({"x": np.zeros(2, np.float32)}, r"sample 2\['x'\] is float32"),
        ({"y": np.zeros(2)}, r"sample 2 is a dict of \['y'\] while sample 0 is a dict of \['x'\]"),
        (np.zeros(2), "sample 2 is a ndarray"),
    ],
)
def test_mismatched_samples_are_named_by_index(odd, message):
    source = [{"x": np.zeros(2)}, {"x": np.zeros(2)}, odd]
    with pytest.raises(ValueError, match=message):
        fetch(source, np.arange(3))


def test_strings_are_rejected():
    with pytest.raises(TypeError, match=r"Sample 0\['x'\]"):
        fetch([{"x": "hello"}], np.array([0]))


@pytest.mark.parametrize("spec", ["mnist", "idx:", "npz", "digits:7", ""])
def test_an_unknown_spec_lists_the_known_ones(spec):
    with pytest.raises(ValueError, match="Expected digits"):
        load(spec)


def test_an_unknown_split_is_rejected():
    for spec in SPECS:
        with pytest.raises(ValueError, match="no split 'valid'"):
            load(spec, "valid")
