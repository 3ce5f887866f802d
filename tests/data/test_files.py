"""IDX and NPZ files: round trips, and errors that name the broken file."""

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest

from hetjax.data import fetch, load
from hetjax.data.files import read_idx

FASHION = Path("/usr/share/datasets/fashion-mnist")


def write_idx(path: Path, array: np.ndarray) -> None:
    code = {"u1": 8, "i1": 9, "i2": 0x0B, "i4": 0x0C, "f4": 0x0D, "f8": 0x0E}[array.dtype.str[1:]]
    head = bytes([0, 0, code, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    content = head + array.astype(array.dtype.newbyteorder(">")).tobytes()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


@pytest.fixture
def folder(tmp_path):
    rng = np.random.default_rng(0)
    for prefix, samples in (("train", 30), ("t10k", 12)):
        write_idx(tmp_path / f"{prefix}-images-idx3-ubyte.gz", rng.integers(0, 256, (samples, 6, 5)).astype(np.uint8))
        write_idx(tmp_path / f"{prefix}-labels-idx1-ubyte", np.arange(samples, dtype=np.uint8) % 4)
    return tmp_path


@pytest.mark.parametrize("dtype", ["u1", "i1", "i2", "i4", "f4", "f8"])
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_idx_round_trip_of_every_type(tmp_path, dtype, suffix):
    array = (np.arange(24).reshape(2, 3, 4) * 5 - (0 if dtype == "u1" else 60)).astype(dtype)
    write_idx(tmp_path / f"a{suffix}", array)
    read = read_idx(tmp_path / f"a{suffix}")
    assert read.dtype == array.dtype
    np.testing.assert_array_equal(read, array)


def test_idx_folder(folder):
    train, test = load(f"idx:{folder}"), load(f"idx:{folder}", "test")
    assert (len(train), len(test)) == (30, 12)
    assert train.description.input_shape == (6, 5, 1)
    assert train.description.classes == test.description.classes == 4
    batch = fetch(test, np.array([5, 2]))
    np.testing.assert_array_equal(batch["label"], [1, 2])
    raw = read_idx(folder / "t10k-images-idx3-ubyte.gz")
    np.testing.assert_allclose(batch["image"][..., 0], raw[[5, 2]] / 255, rtol=1e-6)


def test_a_plain_file_is_preferred_to_its_gzipped_copy(folder):
    write_idx(folder / "train-images-idx3-ubyte", np.full((30, 6, 5), 255, np.uint8))
    assert fetch(load(f"idx:{folder}"), np.array([0]))["image"].min() == 1


def test_two_idx_datasets_in_one_folder_are_rejected(folder):
    write_idx(folder / "letters-train-images-idx3-ubyte", np.zeros((30, 6, 5), np.uint8))
    with pytest.raises(ValueError, match="several train-images files"):
        load(f"idx:{folder}")


@pytest.mark.parametrize("keep", [0, 3, 7, 15, 500, -1])
@pytest.mark.parametrize("packed", [False, True])
def test_a_truncated_idx_file_is_named(folder, keep, packed):
    file = folder / "train-images-idx3-ubyte.gz"
    content = file.read_bytes() if packed else gzip.decompress(file.read_bytes())
    file.write_bytes(content[:keep])
    with pytest.raises(ValueError, match=r"train-images-idx3-ubyte\.gz"):
        load(f"idx:{folder}")


@pytest.mark.parametrize("content", [b"<html>not found</html>", b"\0\0\x07\x01\0\0\0\0", b"\0\0\x08\x01\0\0\0\1ab"])
def test_a_wrong_magic_or_size_is_named(folder, content):
    (folder / "train-labels-idx1-ubyte").write_bytes(content)
    with pytest.raises(ValueError, match="train-labels-idx1-ubyte"):
        load(f"idx:{folder}")


def test_damaged_gzip_is_named(folder):
    file = folder / "train-images-idx3-ubyte.gz"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 0xFF
    file.write_bytes(bytes(content))
    with pytest.raises(ValueError, match=r"train-images-idx3-ubyte\.gz is truncated or damaged"):
        load(f"idx:{folder}")


def test_mismatched_idx_files_are_rejected(folder):
    write_idx(folder / "train-labels-idx1-ubyte", np.zeros(29, np.uint8))
    with pytest.raises(ValueError, match=r"holds 30 images but .*train-labels-idx1-ubyte holds 29 labels"):
        load(f"idx:{folder}")


def test_idx_images_without_pixels_are_named(folder):
    write_idx(folder / "train-images-idx3-ubyte", np.zeros((30, 0, 8), np.uint8))
    with pytest.raises(ValueError, match=r"train-images-idx3-ubyte: the inputs have the shape \(30, 0, 8\)"):
        load(f"idx:{folder}")


def test_idx_labels_out_of_range_are_rejected(folder):
    write_idx(folder / "t10k-labels-idx1-ubyte", np.full(12, 9, np.uint8))
    with pytest.raises(ValueError, match=r"t10k-labels-idx1-ubyte: the label of sample 0 is 9, outside 0 to 3"):
        load(f"idx:{folder}", "test")
    assert load(f"idx:{folder}", "test", classes=10).description.classes == 10


def test_missing_idx_folder_and_file_are_named(tmp_path, folder):
    with pytest.raises(FileNotFoundError, match=r"nowhere.*dataset-fashion-mnist"):
        load(f"idx:{tmp_path / 'nowhere'}")
    (folder / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(FileNotFoundError, match="no t10k-labels file"):
        load(f"idx:{folder}", "test")


@pytest.mark.skipif(not FASHION.is_dir(), reason="needs Debian's package dataset-fashion-mnist")
def test_fashion_mnist_as_debian_installs_it():
    source = load(f"idx:{FASHION}", "test")
    assert len(source) == 10_000
    assert source.description.input_shape == (28, 28, 1)
    assert source.description.classes == 10
    np.testing.assert_array_equal(np.bincount(source.arrays["label"]), np.full(10, 1000))


IMAGES = np.arange(20 * 4 * 4, dtype=np.uint8).reshape(20, 4, 4)
LABELS = np.arange(20) % 2


def test_npz_with_its_own_split(tmp_path):
    file = tmp_path / "d.npz"
    np.savez(file, x_train=IMAGES, y_train=LABELS, x_test=IMAGES[:6] / 255, y_test=LABELS[:6])
    train, test = load(f"npz:{file}"), load(f"npz:{file}", "test")
    assert (len(train), len(test)) == (20, 6)
    np.testing.assert_allclose(train[2]["image"], test[2]["image"], rtol=1e-6)
    assert train[2]["image"].dtype == test[2]["image"].dtype == np.float32


@pytest.mark.parametrize("names", [("x", "y"), ("image", "label"), ("images", "labels")])
def test_npz_without_a_split_is_split(tmp_path, names):
    file = tmp_path / "d.npz"
    np.savez_compressed(file, **dict(zip(names, (IMAGES, LABELS), strict=True)))
    train, test = load(f"npz:{file}"), load(f"npz:{file}", "test")
    rows = [tuple(row.ravel()) for source in (train, test) for row in source.arrays["image"]]
    assert len(test) == 4
    assert sorted(rows) == sorted(tuple(row.ravel()) for row in IMAGES)


def test_npz_of_vectors(tmp_path):
    file = tmp_path / "d.npz"
    np.savez(file, x=np.random.default_rng(0).normal(size=(20, 7)), y=LABELS)
    assert load(f"npz:{file}").description.input_shape == (7,)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": np.array([[1], [1, 2]], object), "y": LABELS[:2]}, "'x' holds Python objects"),
        ({"x": IMAGES, "y": LABELS - 1}, "label of sample 0 is -1"),
        ({"x": IMAGES, "y": LABELS * 3_000_000_000}, "label of sample 1 is 3000000000, above 2,147,483,646"),
        ({"x": IMAGES, "y": LABELS.astype(np.uint64) * np.uint64(2**64 - 1)}, "above 2,147,483,646"),
        ({"x": IMAGES[:, :0], "y": LABELS}, r"shape \(16, 0, 4\): they are empty"),
        ({"x": IMAGES, "y": LABELS / 1}, "labels are float64"),
        ({"x": IMAGES, "y": LABELS[:5]}, "do not go together"),
        ({"x": IMAGES, "y": LABELS[:, None]}, "do not go together"),
        ({"x": np.full((20, 3), np.nan), "y": LABELS}, "input of sample 0 holds NaN"),
        ({"x": np.full((20, 3), "a"), "y": LABELS}, "expected uint8"),
        ({"x": IMAGES[:0], "y": LABELS[:0]}, "no samples"),
        ({"a": IMAGES}, r"holds the arrays \['a'\]"),
        ({"x_train": IMAGES, "y_train": LABELS}, "not x_test and y_test"),
    ],
)
def test_unusable_npz_arrays_are_named(tmp_path, arrays, message):
    file = tmp_path / "data.npz"
    np.savez(file, **arrays)
    with pytest.raises((ValueError, TypeError), match=rf"data\.npz.*{message}"):
        load(f"npz:{file}")


def test_a_file_too_small_for_a_test_split_says_so(tmp_path):
    file = tmp_path / "data.npz"
    np.savez(file, x=IMAGES[:8], y=np.arange(8) // 2)
    assert len(load(f"npz:{file}")) == 8
    words = "no label occurs often enough among the 8 samples .* Add samples, or give .* x_test and y_test"
    with pytest.raises(ValueError, match=rf"data\.npz: {words}"):
        load(f"npz:{file}", "test")


@pytest.mark.parametrize("content", [b"", b"not a zip", b"PK\x03\x04 broken"])
def test_a_broken_npz_is_named(tmp_path, content):
    file = tmp_path / "data.npz"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=r"data\.npz is not a readable NPZ"):
        load(f"npz:{file}")


def test_a_truncated_npz_is_named(tmp_path):
    file = tmp_path / "data.npz"
    np.savez(file, x=IMAGES, y=LABELS)
    file.write_bytes(file.read_bytes()[:-200])
    with pytest.raises(ValueError, match=r"data\.npz is not a readable NPZ"):
        load(f"npz:{file}")


def test_npy_and_missing_files_are_named(tmp_path):
    np.save(tmp_path / "one.npy", IMAGES)
    with pytest.raises(ValueError, match=r"one\.npy.*single array"):
        load(f"npz:{tmp_path / 'one.npy'}")
    with pytest.raises(FileNotFoundError, match=r"no\.npz"):
        load(f"npz:{tmp_path / 'no.npz'}")
