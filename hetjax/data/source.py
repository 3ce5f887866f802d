"""The Source protocol, fetching rows from any source, and a fixed split for data without one."""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

from hetjax.data.trees import branches, map_leaves, rebuilt

NUMBERS = "biufcV"  # dtype kinds that can be fed to a model; V is that of bfloat16 and other extension types
_ENDLESS = 2**40  # no dataset has as many samples; Grain gives an endless one the length 2**63 - 1
Batch = Any  # a tree (dict, tuple, named tuple or list, possibly nested) of arrays whose leading axis is the rows


@runtime_checkable
class Source(Protocol):
    """Anything with a length and an index: `source[i]` is one sample, a dict, tuple or list of arrays or numbers.

    Optional fast paths, used by `fetch`: a method `rows(indices) -> batch` that returns many samples stacked along a
    leading axis, which all sources of hetjax have; or `__getitems__(indices) -> list of samples`, as in datasets of
    PyTorch and Hugging Face.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


@dataclass(frozen=True)
class Description:
    """What a model needs to know about the samples of a source.

    Attributes:
        name: Name of the dataset.
        input_shape: (height, width, channels), (features,) or, for text, (tokens,).
        classes: Number of classes, for sources with "image" and "label".
        vocab: Number of distinct tokens, for sources with "tokens", "targets" and "weights".
    """

    name: str
    input_shape: tuple[int, ...]
    classes: int | None = None
    vocab: int | None = None


class RowSource(ABC):
    """Base of hetjax's sources: subclasses implement `rows`; an index gives a sample, an index array a batch."""

    description: Description

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def rows(self, indices: np.ndarray) -> Batch:
        """The samples at these indices, stacked along a leading axis."""

    def __getitem__(self, index: int | np.ndarray, /) -> Any:
        if isinstance(index, np.ndarray) and index.ndim == 1:
            return self.rows(index)
        return map_leaves(lambda values: values[0], self.rows(np.array([operator.index(index)])))

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


def is_endless(source: Source) -> bool:
    """Whether a source repeats forever, such as Grain's `MapDataset.repeat()`."""
    return len(source) >= _ENDLESS


def check_finite(source: Source, purpose: str) -> None:
    """Refuse an endless source where every sample is needed."""
    if is_endless(source):
        raise ValueError(f"The source has no end (its length is {len(source):,}): {purpose}, leave out .repeat().")


def fetch(source: Source, indices: np.ndarray) -> Batch:
    """Return the samples at `indices` as one batch: a tree of arrays with a leading axis of len(indices).

    Uses `source.rows` if there is one. Otherwise stacks single samples, which have to agree in keys, shapes and dtypes.

    Args:
        source: The source.
        indices: Indices of the samples, in any order.

    Returns:
        The batch.

    Raises:
        ValueError: If there are no indices, or if the samples do not agree.
    """
    indices = np.asarray(indices)
    if hasattr(source, "rows"):
        return source.rows(indices)
    if indices.size == 0:
        raise ValueError(f"fetch from {type(source).__name__} got no indices: a batch needs at least one.")
    rows = [int(index) for index in indices]
    samples = source.__getitems__(rows) if hasattr(source, "__getitems__") else [source[row] for row in rows]
    return stack(samples, rows)


def stack(samples: Sequence[Any], rows: Sequence[int], path: str = "") -> Batch:
    """Stack samples leaf by leaf; all have to match the first. `rows` are their indices, for errors."""
    first = samples[0]
    if (inside := branches(first)) is not None:
        keys = [key for key, _ in inside]
        if isinstance(first, Mapping):
            like, at = [isinstance(s, Mapping) and s.keys() == first.keys() for s in samples], keys
        else:
            like, at = [type(s) is type(first) and len(s) == len(keys) for s in samples], list(range(len(keys)))
        if not all(like):
            odd = like.index(False)
            raise _mismatch(rows[odd], rows[0], path, _structure(samples[odd]), _structure(first))
        return rebuilt(
            first, [stack([s[i] for s in samples], rows, f"{path}[{k!r}]") for i, k in zip(at, keys, strict=True)]
        )
    try:
        leaves = [np.asarray(sample) for sample in samples]
    except ValueError as error:
        raise ValueError(
            f"Samples{path} are lists that are no arrays ({error}). Pad ragged lists; give unlike parts as a tuple or "
            "dict."
        ) from error
    for leaf, row in zip(leaves, rows, strict=True):
        if leaf.dtype.kind not in NUMBERS:
            raise TypeError(f"Sample {row}{path} is {_other(leaf)}.")
        if leaf.shape != leaves[0].shape or leaf.dtype != leaves[0].dtype:
            raise _mismatch(row, rows[0], path, _shape(leaf), _shape(leaves[0]))
    return np.stack(leaves)


def _other(leaf: np.ndarray) -> str:
    """What a leaf is that does not hold numbers."""
    if leaf.dtype == object and leaf.ndim == 0 and leaf.item() is None:
        return (
            "None, not numbers. A source needs a value for every index: filter before it is made, or train on a "
            "stream of batches"
        )
    return f"{leaf.dtype}, not numbers"


def _mismatch(row: int, first: int, path: str, given: str, expected: str) -> ValueError:
    return ValueError(
        f"All samples of a batch need the same structure, but sample {row}{path} is {given} while sample "
        f"{first}{path} is {expected}. Pad, resize or cast in the source's __getitem__."
    )


def _structure(sample: Any) -> str:
    if isinstance(sample, Mapping):
        return f"a dict of {sorted(map(str, sample))}"
    return f"a {type(sample).__name__}" + (f" of {len(sample)}" if isinstance(sample, tuple | list) else "")


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
