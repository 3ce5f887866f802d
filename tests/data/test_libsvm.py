"""The LIBSVM reader on hand-written files."""

import gzip

import numpy as np
import pytest

from hetjax.data import load
from hetjax.data.libsvm import libsvm_source

LINES = "".join(f"{'+1' if k % 2 else '-1'} 1:{k} 3:0.5\n" for k in range(10))


def written(path, text=LINES):
    path.write_text(text)
    return path


def test_rows_are_dense_and_labels_are_classes(tmp_path):
    source = load(f"libsvm:{written(tmp_path / 'toy')}", "train")
    assert (source.description.input_shape, source.description.classes, len(source)) == ((3,), 2, 8)
    batch = source.rows(np.arange(len(source)))
    assert batch["image"].dtype == np.float32
    np.testing.assert_array_equal(batch["image"][:, 1:], np.tile([0, 0.5], (8, 1)))
    np.testing.assert_array_equal(batch["image"][:, 0] % 2, batch["label"])  # odd rows have the label +1
    np.testing.assert_array_equal(source[3]["image"], batch["image"][3])
    rest = load(f"libsvm:{tmp_path / 'toy'}", "test").rows(np.arange(2))["image"][:, 0]
    assert sorted([*batch["image"][:, 0], *rest]) == list(range(10))


def test_a_test_file_beside_it_is_the_test_split(tmp_path):
    path = written(tmp_path / "toy")
    written(tmp_path / "toy.t", "+1 2:7\n")
    assert len(libsvm_source(path)) == 10
    batch = libsvm_source(path, "test").rows(np.array([0]))
    np.testing.assert_array_equal(batch["image"], [[0, 7, 0]])
    assert batch["label"].tolist() == [1]
    written(tmp_path / "toy.t", "3 2:7\n")
    with pytest.raises(ValueError, match="has the label 3, which"):
        libsvm_source(path, "test")


def test_gzip_and_a_given_number_of_features(tmp_path):
    path = tmp_path / "toy.gz"
    path.write_bytes(gzip.compress(LINES.encode()))
    assert libsvm_source(path, features=5).rows(np.array([0]))["image"].shape == (1, 5)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("+1 0:1\n", "indices from 1"),
        ("not a number\n", "not in the LIBSVM format"),
        ("", "holds no samples"),
        ("+1 1:nan\n-1 1:2\n", "not finite"),
        ("0.5 1:1\n1 1:2\n", "expected classes"),
    ],
)
def test_what_is_not_in_this_format_is_refused(tmp_path, text, message):
    with pytest.raises(ValueError, match=message):
        libsvm_source(written(tmp_path / "toy", text))
    with pytest.raises(FileNotFoundError, match="There is no file"):
        libsvm_source(tmp_path / "missing")
