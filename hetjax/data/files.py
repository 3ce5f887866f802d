"""Datasets from files: IDX, plain or gzipped (MNIST, Fashion-MNIST), and NPZ. Pickled objects are never loaded."""

from __future__ import annotations

import gzip
import math
import zipfile
import zlib
from pathlib import Path

import numpy as np

from hetjax.data.memory import MemorySource, check_labels, labeled_images
from hetjax.data.source import Description, check_split, stratified_split

_DTYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
_PREFIX = {"train": "train", "test": "t10k"}


def read_idx(path: str | Path) -> np.ndarray:
    """Read one IDX file: two zero bytes, type, number of axes, big-endian sizes, then the values."""
    path = Path(path)
    content = _content(path)
    magic = content[:4]
    if len(magic) < 4 or magic[:2] != b"\0\0" or magic[2] not in _DTYPES:
        raise ValueError(
            f"{path} is not an IDX file: it starts with {magic.hex(' ') or 'nothing'}, where two zero bytes and a type "
            "(08 to 0e) are expected. Check that the download is the file itself, not a web page."
        )
    axes = magic[3]
    head = 4 + 4 * axes
    sizes = tuple(int(size) for size in np.frombuffer(content[4:head], ">u4")) if len(content) >= head else ()
    dtype = np.dtype(_DTYPES[magic[2]])
    expected = head + math.prod(sizes) * dtype.itemsize
    if len(sizes) != axes or len(content) != expected:
        promise = f"its header promises {expected:,}" if len(sizes) == axes else f"its header alone takes {head}"
        raise ValueError(
            f"{path} has {len(content):,} bytes, but {promise}: it is truncated or damaged. Download it again."
        )
    return np.frombuffer(content, dtype, offset=head).reshape(sizes).astype(dtype.newbyteorder("="))


def idx_source(folder: str | Path, split: str = "train", *, classes: int | None = None) -> MemorySource:
    """Labeled images from a folder with train-images..., train-labels..., t10k-images... and t10k-labels... files.

    `classes` defaults to the largest training label plus one.
    """
    check_split(split)
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(
            f"There is no folder {folder} with IDX files. On Debian and Ubuntu, 'apt install dataset-fashion-mnist' "
            "puts Fashion-MNIST into /usr/share/datasets/fashion-mnist."
        )
    image_file, label_file = _find(folder, split, "images"), _find(folder, split, "labels")
    image, label = read_idx(image_file), read_idx(label_file)
    if image.ndim < 2 or label.ndim != 1:
        raise ValueError(
            f"{image_file} has {image.ndim} axes and {label_file} has {label.ndim}: expected 3 (samples, rows, "
            "columns) and 1. Are the two files swapped?"
        )
    if len(image) != len(label):
        raise ValueError(
            f"{image_file} holds {len(image):,} images but {label_file} holds {len(label):,} labels. The files belong "
            "to different datasets, or one is incomplete."
        )
    if classes is None:
        train_label = label if split == "train" else read_idx(_find(folder, "train", "labels"))
        classes = int(train_label.max(initial=0)) + 1
    check_labels(label, classes, str(label_file))
    return labeled_images(image, label, classes, name=folder.resolve().name, origin=str(image_file))


def _content(path: Path) -> bytes:
    content = path.read_bytes()
    if content[:2] != b"\x1f\x8b":
        return content
    try:
        return gzip.decompress(content)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path} is truncated or damaged ({error}). Download it again.") from error


def _find(folder: Path, split: str, what: str) -> Path:
    """The only file of this kind; a plain file is preferred to its gzipped copy."""
    stem = f"{_PREFIX[split]}-{what}"
    found = {path.name.removesuffix(".gz"): path for path in sorted(folder.glob(f"*{stem}*"), reverse=True)}
    if len(found) == 1:
        return next(iter(found.values()))
    if found:
        names = ", ".join(sorted(found))
        raise ValueError(f"{folder} holds several {stem} files ({names}): keep one dataset per folder.")
    raise FileNotFoundError(
        f"{folder} holds no {stem} file (such as {stem}-idx{3 if what == 'images' else 1}-ubyte.gz), which the "
        f"{split} split needs."
    )


_PAIRS = (("x", "y"), ("image", "label"), ("images", "labels"))


def npz_source(file: str | Path, split: str = "train", *, classes: int | None = None) -> MemorySource:
    """Labeled inputs from the arrays x_train, y_train, x_test and y_test, or from x and y (or image and label).

    Without test arrays a fixed fifth of every label is the test split. uint8 inputs are scaled to [0, 1], others are
    left as they are. `classes` defaults to the largest training label plus one.
    """
    check_split(split)
    path = Path(file)
    arrays = _read(path)
    for x, y in _PAIRS:
        if {f"{x}_train", f"{y}_train"} <= arrays.keys():
            if not {f"{x}_test", f"{y}_test"} <= arrays.keys():
                raise ValueError(f"{path} has {x}_train and {y}_train, but not {x}_test and {y}_test: add them.")
            image, label, train_label = arrays[f"{x}_{split}"], arrays[f"{y}_{split}"], arrays[f"{y}_train"]
            keep = None
            break
        if {x, y} <= arrays.keys():
            image, label = arrays[x], arrays[y]
            train_label = label
            keep = stratified_split(label, split) if label.ndim == 1 and len(label) == len(image) else None
            break
    else:
        raise ValueError(
            f"{path} holds the arrays {sorted(arrays)}. Expected x_train, y_train, x_test and y_test, or x and y, or "
            "image and label: save them with np.savez_compressed(file, x=inputs, y=labels)."
        )
    if classes is None:
        classes = int(train_label.max(initial=0)) + 1 if np.issubdtype(train_label.dtype, np.integer) else 1
    if label.ndim == 1:  # before the split, so that errors give the row in the file
        check_labels(label, classes, str(path))
    if keep is not None:
        if len(label) and not len(keep):
            raise ValueError(
                f"{path}: no label occurs often enough among the {len(label)} samples to hold out a fifth for the test "
                f"split. Add samples, or give the test split: {x}_train, {y}_train, {x}_test and {y}_test."
            )
        image, label = image[keep], label[keep]
    return labeled_images(image, label, classes, name=path.stem, origin=str(path))


def npz_samples(file: str | Path) -> MemorySource:
    """Training samples where no labels are needed: targets may be any numbers, or missing.

    Without integer labels there is no stratified split: all rows of x_train, or else of x, are used.
    """
    path = Path(file)
    arrays = _read(path)
    for x, y in ((f"{x}{part}", f"{y}{part}") for part in ("_train", "") for x, y in _PAIRS):
        if x not in arrays:
            continue
        target = arrays.get(y)
        if target is not None and np.issubdtype(target.dtype, np.integer):
            break
        checked = labeled_images(
            arrays[x], np.zeros(arrays[x].shape[:1], np.int32), 1, name=path.stem, origin=str(path)
        )
        samples = {"image": checked.arrays["image"]}
        if target is not None:
            if target.dtype.kind not in "fb" or not np.isfinite(target).all():
                raise ValueError(f"{path}: the targets {y} have to be finite numbers. Remove or fix the others.")
            samples["label"] = target
        return MemorySource(samples, Description(path.stem, checked.description.input_shape), scale=checked.scale)
    return npz_source(path)


def _read(path: Path) -> dict[str, np.ndarray]:
    if not path.is_file():
        raise FileNotFoundError(f"There is no file {path}. Give npz:FILE the path of a file written by np.savez.")
    name = None
    try:
        content = np.load(path, allow_pickle=False)
        if isinstance(content, np.ndarray):
            raise ValueError("it is a single array, an .npy file")
        with content:
            arrays = {}
            for name in content.files:
                arrays[name] = content[name]
            return arrays
    except (ValueError, OSError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        if "allow_pickle" in str(error) and name is not None:
            raise ValueError(
                f"{path}: the array {name!r} holds Python objects, which hetjax never unpickles (they can run code). "
                "Save plain numbers: np.stack the rows into one array before np.savez."
            ) from error
        raise ValueError(f"{path} is not a readable NPZ file ({error}). Write it again with np.savez.") from error
