"""Sources in memory: trees of arrays, such as `{"x": x, "y": y}` or `(x, y)`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from hetjax.data.source import NUMBERS, Batch, Description, RowSource, Source, stack
from hetjax.data.trees import branches, holds_columns, map_leaves, named_leaves, rebuilt

_MAX_LABEL = 2**31 - 2  # labels and the number of classes are 32-bit integers


class MemorySource(RowSource):
    """A tree of arrays with the same number of rows; sample i is row i of each.

    Dicts, tuples, named tuples and lists can be nested and are kept. Arrays are not copied, so a memory-mapped one
    (`np.load(file, mmap_mode="r")`) stays on disk, and only the rows of a batch are read.

    Args:
        arrays: The arrays, usually a dict. A list of like elements, or of numbers, is an array of them.
        description: What a model needs to know about the samples.
        scale: Factors by name, for a dict. Such an array keeps its dtype in memory, and its rows are fetched as float32
            times the factor. Arrays without a factor are fetched unchanged.

    Raises:
        TypeError: If an array does not hold numbers.
        ValueError: If the arrays differ in their number of rows, or if `scale` names others.
    """

    def __init__(
        self, arrays: Any, description: Description | None = None, *, scale: Mapping[str, float] | None = None
    ):
        self.scale = dict(scale or {})
        self.arrays = _columns(arrays)
        leaves = {name or "source": values for name, values in named_leaves(self.arrays)}
        lengths = {name: len(values) if values.ndim else None for name, values in leaves.items()}
        if len(set(lengths.values())) != 1 or None in lengths.values():
            raise ValueError(f"All arrays need the same number of rows, one per sample, but they have {lengths}.")
        if unknown := sorted(self.scale.keys() - (self.arrays.keys() if isinstance(self.arrays, dict) else set())):
            raise ValueError(f"scale names {unknown}, but the arrays are {sorted(leaves)}.")
        for name, values in leaves.items():
            if values.dtype.kind not in NUMBERS:
                raise TypeError(f"The array {name!r} is {values.dtype}, not numbers.")
        first = next(iter(leaves.values()))
        self._length = len(first)
        self.description = description or Description("arrays in memory", first.shape[1:])

    def __len__(self) -> int:
        return self._length

    def rows(self, indices: np.ndarray) -> Batch:
        indices = self.checked_indices(indices)
        batch = map_leaves(lambda values: values[indices], self.arrays)
        for name, factor in self.scale.items():
            batch[name] = batch[name] * np.float32(factor)
        return batch


def as_source(source: Any) -> Source:
    """Turn a tree of arrays into a source (see `holds_columns`); check that anything else has a length and an index."""
    plain = isinstance(source, np.ndarray | jax.Array) and source.ndim > 0 and source.dtype != object
    if plain or holds_columns(source):
        return MemorySource(source)
    if not (hasattr(source, "__len__") and hasattr(source, "__getitem__")):
        raise TypeError(
            "A source needs __len__ and __getitem__, or has to be a tree of arrays such as a dict or (x, y); got "
            f"{type(source).__name__}."
        )
    return source


def _columns(tree: Any) -> Any:
    """Turn every leaf into an array of NumPy, without a copy if it has the memory of one; stack lists of samples."""
    inside = branches(tree)
    if inside is None:
        return np.asarray(tree)
    if isinstance(tree, list) and not holds_columns(tree):
        return stack(tree, range(len(tree)))
    return rebuilt(tree, [_columns(child) for _, child in inside])


def labeled_images(
    image: np.ndarray, label: np.ndarray, classes: int, *, name: str, origin: str = "the arrays"
) -> MemorySource:
    """A source of checked inputs and labels; errors name `origin`.

    Images without a channel axis get one. uint8 is kept in memory and fetched as float32 in [0, 1]; other types are
    converted to float32 without scaling.
    """
    image, label = np.asarray(image), np.asarray(label)
    if image.ndim < 2 or label.ndim != 1 or len(image) != len(label):
        raise ValueError(
            f"{origin}: inputs of shape {image.shape} and labels of shape {label.shape} do not go together. "
            "Expected inputs [n, height, width], [n, height, width, channels] or [n, features] and n labels."
        )
    if len(label) == 0:
        raise ValueError(f"{origin}: there are no samples.")
    if image.size == 0:
        raise ValueError(f"{origin}: the inputs have the shape {image.shape}: they are empty.")
    check_labels(label, classes, origin)
    if image.dtype != np.uint8:
        if image.dtype.kind not in "iufb":
            raise TypeError(f"{origin}: inputs are {image.dtype}; expected uint8 or floating-point numbers.")
        image = image.astype(np.float32)
        if not np.isfinite(image).all():
            row = int(np.argmin(np.isfinite(image).reshape(len(image), -1).all(axis=1)))
            raise ValueError(f"{origin}: the input of sample {row} holds NaN or infinity. Remove or fix that row.")
    if image.ndim == 3:
        image = image[..., None]
    arrays = {"image": image, "label": label.astype(np.int32)}
    scale = {"image": 1 / 255} if image.dtype == np.uint8 else {}
    return MemorySource(arrays, Description(name, image.shape[1:], classes=classes), scale=scale)


def check_labels(label: np.ndarray, classes: int, origin: str) -> None:
    """Raise unless labels are integers in 0 to classes - 1; the error names the file and the first bad row."""
    if not np.issubdtype(label.dtype, np.integer):
        raise TypeError(f"{origin}: labels are {label.dtype}; expected integers from 0 to {classes - 1}.")
    if label.size and label.max() > _MAX_LABEL:
        raise ValueError(
            f"{origin}: the label of sample {np.argmax(label)} is {label.max()}, above {_MAX_LABEL:,}. Renumber the "
            "labels from 0."
        )
    wrong = np.flatnonzero((label < 0) | (label >= classes))
    if wrong.size:
        raise ValueError(
            f"{origin}: the label of sample {wrong[0]} is {label[wrong[0]]}, outside 0 to {classes - 1}. Renumber the "
            "labels from 0, or give the number of classes (classes=)."
        )
