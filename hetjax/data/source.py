"""What a source of samples is, how rows are fetched from any source, and a fixed split for data without one."""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np

NUMBERS = "biufcV"  # kinds of dtype that a model can be fed with; V: bfloat16 and its like
Batch = Any  # a tree (dict, possibly nested, or tuple) of arrays with one leading axis, the rows


@runtime_checkable
class Source(Protocol):
    """Anything with a length and an index: `source[i]` is one sample, a dict (or tuple) of arrays.

    Optional fast path: a method `rows(indices) -> batch` that returns many samples at once, stacked along a leading
    axis. Every source of hetjax has it, and `fetch` uses it where it is there.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


@dataclass(frozen=True)
class Description:
    """What a model has to know about the samples of a source."""

    name: str
    input_shape: tuple[int, ...]  # (height, width, channels) or (features,) of an input; (tokens,) of a text window
    classes: int | None = None  # number of labels, for sources with "image" and "label"
    vocab: int | None = None  # number of different tokens, for sources with "tokens", "targets" and "weights"


class RowSource(ABC):
    """Base of hetjax's own sources: `rows` does the work, an index or an index array gives a row or a batch."""

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
        """The indices, after making sure that each is one of this source's (negative ones do not count backwards)."""
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
    """The samples of `source` at `indices` as one batch: a tree of arrays with a leading axis of len(indices).

    Uses `source.rows` where there is one; otherwise asks for one sample at a time and stacks them, which needs every
    sample to have the same keys, shapes and dtypes.
    """
    indices = np.asarray(indices)
    if hasattr(source, "rows"):
        return source.rows(indices)
    if indices.size == 0:
        raise ValueError(f"No samples were asked of {type(source).__name__}: a batch needs at least one index.")
    places = [int(index) for index in indices]
    return _stack([source[place] for place in places], places, "")


def _stack(samples: list[Any], places: list[int], path: str) -> Any:
    """Stack equal trees leaf by leaf; the first sample says what the others have to look like."""
    first = samples[0]
    if isinstance(first, Mapping):
        for sample, place in zip(samples, places, strict=True):
            if not isinstance(sample, Mapping) or sample.keys() != first.keys():
                raise _differ(place, places[0], path, _keys(sample), _keys(first))
        return {key: _stack([s[key] for s in samples], places, f"{path}[{key!r}]") for key in first}
    if isinstance(first, tuple):
        for sample, place in zip(samples, places, strict=True):
            if not isinstance(sample, tuple) or len(sample) != len(first):
                raise _differ(place, places[0], path, _keys(sample), _keys(first))
        return tuple(_stack([s[i] for s in samples], places, f"{path}[{i}]") for i in range(len(first)))
    leaves = [np.asarray(sample) for sample in samples]
    for leaf, place in zip(leaves, places, strict=True):
        if leaf.dtype.kind not in NUMBERS:
            raise TypeError(f"Sample {place}{path} is {leaf.dtype}, not numbers: a model cannot be fed with it.")
        if leaf.shape != leaves[0].shape or leaf.dtype != leaves[0].dtype:
            raise _differ(place, places[0], path, _form(leaf), _form(leaves[0]))
    return np.stack(leaves)


def _differ(place: int, first: int, path: str, given: str, expected: str) -> ValueError:
    return ValueError(
        f"Samples of one batch must be alike, but sample {place}{path} is {given} while sample {first}{path} is "
        f"{expected}. Pad, resize or cast in the source's __getitem__."
    )


def _keys(sample: Any) -> str:
    if isinstance(sample, Mapping):
        return f"a dict of {sorted(map(str, sample))}"
    return f"a {type(sample).__name__}" + (f" of {len(sample)}" if isinstance(sample, tuple) else "")


def _form(leaf: np.ndarray) -> str:
    return f"{leaf.dtype} of shape {leaf.shape}"


Split = Literal["train", "test"]


def check_split(split: str) -> None:
    if split not in ("train", "test"):
        raise ValueError(f"There is no split {split!r}: ask for 'train' or 'test'.")


def stratified_split(labels: np.ndarray, split: str, *, test_share: float = 0.2, seed: int = 0) -> np.ndarray:
    """Sorted indices of one side of a split that gives every label the same share of test samples.

    Depends on nothing but the labels, the share and the seed. A label with one sample trains.
    """
    check_split(split)
    rng = np.random.default_rng(seed)
    test = np.zeros(len(labels), bool)
    for label in np.unique(labels):
        members = rng.permutation(np.flatnonzero(labels == label))
        test[members[: int(len(members) * test_share + 0.5) if len(members) > 1 else 0]] = True
    return np.flatnonzero(test if split == "test" else ~test)
