"""The Source protocol, fetching rows from any source, and a fixed split for data without one."""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

NUMBERS = "biufcV"  # dtype kinds that can be fed to a model; V is that of bfloat16 and other extension types
Batch = Any  # a tree (dict, possibly nested, or tuple) of arrays whose leading axis is the rows


@runtime_checkable
class Source(Protocol):
    """Anything with a length and an index: `source[i]` is one sample, a dict (or tuple) of arrays.

    Optional fast path, used by `fetch`: a method `rows(indices) -> batch` that returns many samples stacked along a
    leading axis. All sources of hetjax have it.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


@dataclass(frozen=True)
class Description:
    """What a model needs to know about the samples of a source."""

    name: str
    input_shape: tuple[int, ...]  # (height, width, channels), (features,) or, for text, (tokens,)
    classes: int | None = None  # number of classes, for sources with "image" and "label"
    vocab: int | None = None  # number of distinct tokens, for sources with "tokens", "targets" and "weights"


class RowSource(ABC):
    """Base of hetjax's sources: subclasses implement `rows`; an index gives a sample, an index array a batch."""

    description: Description

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def rows(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """The samples at these indices, stacked along a leading axis."""

    def __getitem__(self, index: int | np.ndarray, /) -> dict[str, np.ndarray]:
        if isinstance(index, np.ndarray) and index.ndim == 1:
            return self.rows(index)
        batch = self.rows(np.array([operator.index(index)]))
        return {name: values[0] for name, values in batch.items()}

    def checked_indices(self, indices: np.ndarray) -> np.ndarray:
        """Return the indices as int64; raise unless they are integers in range (negative ones are not)."""
        indices = np.asarray(indices)
        if indices.size and not np.issubdtype(indices.dtype, np.integer):
            raise TypeError(f"Indices into {self.description.name} must be integers, not {indices.dtype}.")
        wrong = indices[(indices < 0) | (indices >= len(self))] if indices.size else indices
        if wrong.size:
            raise IndexError(
                f"Index {wrong[0]} is outside {self.description.name}, which has {len(self)} samples (0 to "
                f"{len(self) - 1})."
            )
        return indices.astype(np.int64)


def fetch(source: Source, indices: np.ndarray) -> Batch:
    """Return the samples at `indices` as one batch: a tree of arrays with a leading axis of len(indices).

    Uses `source.rows` if there is one. Otherwise stacks single samples, which have to agree in keys, shapes and dtypes.
    """
    indices = np.asarray(indices)
    if hasattr(source, "rows"):
        return source.rows(indices)
    if indices.size == 0:
        raise ValueError(f"fetch from {type(source).__name__} got no indices: a batch needs at least one.")
    rows = [int(index) for index in indices]
    return _stack([source[row] for row in rows], rows, "")


def _stack(samples: list[Any], rows: list[int], path: str) -> Any:
    """Stack trees leaf by leaf; all have to match the first."""
    first = samples[0]
    if isinstance(first, Mapping):
        for sample, row in zip(samples, rows, strict=True):
            if not isinstance(sample, Mapping) or sample.keys() != first.keys():
                raise _mismatch(row, rows[0], path, _keys(sample), _keys(first))
        return {key: _stack([s[key] for s in samples], rows, f"{path}[{key!r}]") for key in first}
    if isinstance(first, tuple):
        for sample, row in zip(samples, rows, strict=True):
            if not isinstance(sample, tuple) or len(sample) != len(first):
                raise _mismatch(row, rows[0], path, _keys(sample), _keys(first))
        return tuple(_stack([s[i] for s in samples], rows, f"{path}[{i}]") for i in range(len(first)))
    leaves = [np.asarray(sample) for sample in samples]
    for leaf, row in zip(leaves, rows, strict=True):
        if leaf.dtype.kind not in NUMBERS:
            raise TypeError(f"Sample {row}{path} is {leaf.dtype}, not numbers.")
        if leaf.shape != leaves[0].shape or leaf.dtype != leaves[0].dtype:
            raise _mismatch(row, rows[0], path, _shape(leaf), _shape(leaves[0]))
    return np.stack(leaves)


def _mismatch(row: int, first: int, path: str, given: str, expected: str) -> ValueError:
    return ValueError(
        f"All samples of a batch need the same structure, but sample {row}{path} is {given} while sample "
        f"{first}{path} is {expected}. Pad, resize or cast in the source's __getitem__."
    )


def _keys(sample: Any) -> str:
    if isinstance(sample, Mapping):
        return f"a dict of {sorted(map(str, sample))}"
    return f"a {type(sample).__name__}" + (f" of {len(sample)}" if isinstance(sample, tuple) else "")


def _shape(leaf: np.ndarray) -> str:
    return f"{leaf.dtype} of shape {leaf.shape}"


def check_split(split: str) -> None:
    """Raise ValueError unless the split is "train" or "test"."""
    if split not in ("train", "test"):
        raise ValueError(f"There is no split {split!r}: choose 'train' or 'test'.")


def stratified_split(labels: np.ndarray, split: str, *, test_share: float = 0.2, seed: int = 0) -> np.ndarray:
    """Sorted indices of one split, where every label has the same share of test samples.

    Depends only on the labels, the share and the seed. A label with a single sample is in the training split.
    """
    check_split(split)
    rng = np.random.default_rng(seed)
    test = np.zeros(len(labels), bool)
    for label in np.unique(labels):
        members = rng.permutation(np.flatnonzero(labels == label))
        test[members[: int(len(members) * test_share + 0.5) if len(members) > 1 else 0]] = True
    return np.flatnonzero(test if split == "test" else ~test)
