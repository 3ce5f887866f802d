"""IDX files, plain or gzipped: MNIST, and Fashion-MNIST as Debian's dataset-fashion-mnist installs it."""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path

import numpy as np

from hetjax.data.memory import MemorySource, check_labels, labelled_images
from hetjax.data.split import check_split

_DTYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
_PREFIX = {"train": "train", "test": "t10k"}


def read_idx(path: str | Path) -> np.ndarray:
    """The array in one IDX file: two zero bytes, type, number of axes, big-endian sizes, then the values."""
    path = Path(path)
    content = _content(path)
    magic = content[:4]
    if len(magic) < 4 or magic[:2] != b"\0\0" or magic[2] not in _DTYPES:
        raise ValueError(
            f"{path} is not an IDX file: it starts with {magic.hex(' ') or 'nothing'}, where two zero bytes and a type "
            "(08 to 0e) are expected. Check that the download is the file itself and not a web page."
        )
    axes = magic[3]
    head = 4 + 4 * axes
    sizes = tuple(int(size) for size in np.frombuffer(content[4:head], ">u4")) if len(content) >= head else ()
    dtype = np.dtype(_DTYPES[magic[2]])
    expected = head + math.prod(sizes) * dtype.itemsize
    if len(sizes) != axes or len(content) != expected:
        promise = f"its header promises {expected:,}" if len(sizes) == axes else f"its header alone takes {head}"
        raise ValueError(
            f"{path} has {len(content):,} bytes, but {promise}: it is truncated or damaged. Fetch it again."
        )
    return np.frombuffer(content, dtype, offset=head).reshape(sizes).astype(dtype.newbyteorder("="))


def idx_source(folder: str | Path, split: str = "train", *, classes: int | None = None) -> MemorySource:
    """Labelled images from a folder with train-images..., train-labels..., t10k-images... and t10k-labels... files.

    The number of classes is the largest training label plus one unless it is given.
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
            "to different datasets, or one of them is incomplete."
        )
    if classes is None:
        train_label = label if split == "train" else read_idx(_find(folder, "train", "labels"))
        classes = int(train_label.max(initial=0)) + 1
    check_labels(label, classes, str(label_file))
    return labelled_images(image, label, classes, name=folder.resolve().name, origin=str(image_file))


def _content(path: Path) -> bytes:
    content = path.read_bytes()
    if content[:2] != b"\x1f\x8b":
        return content
    try:
        return gzip.decompress(content)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path} is truncated or damaged ({error}). Fetch it again.") from error


def _find(folder: Path, split: str, what: str) -> Path:
    """The one file of this kind; a plain file wins over its gzipped copy."""
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
