"""Host batches: what a training loop passes to a step, and loaders that stop together in all processes."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np

from hetjax import processes
from hetjax.data.prefetch import Feed, Rows, fetch_positions
from hetjax.data.trees import is_numbers
from hetjax.reduce.layout import MANY
from hetjax.sampling.order import Span

log = logging.getLogger("hetjax")
Tree = Any
_BATCH = "A batch is a tree of arrays (dicts, tuples, nested) whose first axis counts the samples"


@runtime_checkable
class HostBatch(Protocol):
    """The samples of one step. A process only reads the rows that it computes."""

    def __len__(self) -> int:
        """Number of samples in the whole batch, over all processes."""
        ...

    def rows(self, start: int, stop: int) -> Tree | Rows:
        """Samples [start, stop) of the batch, as a tree of arrays."""
        ...


@dataclass(frozen=True)
class ArrayBatch:
    """A batch of arrays in memory."""

    tree: Tree

    def __len__(self) -> int:
        return len(jax.tree.leaves(self.tree)[0])

    def rows(self, start: int, stop: int) -> Tree:
        return jax.tree.map(lambda x: x[start:stop], self.tree)


@dataclass(frozen=True)
class FeedBatch:
    """The samples of a span of an epoch's order, prefetched in the background (see prefetch.py).

    Attributes:
        feed: Fetches the rows.
        span: The step.
        following: The step after it, if known. Its rows are prefetched when those of this one are read, with a margin
            because the next plan may differ.
    """

    feed: Feed
    span: Span
    following: Span | None = None

    def __len__(self) -> int:
        return self.span.batch

    def sample(self) -> Tree:
        """The first row alone, for its shapes; prefetches nothing."""
        return fetch_positions(self.feed.source, self.feed.order, self.span.epoch, self.span.start, self.span.start + 1)

    def rows(self, start: int, stop: int) -> Rows:
        first = self.span.start
        rows = Rows(*self.feed.take(self.span.epoch, first + start, first + stop))
        if self.following is not None:
            margin = 0 if stop - start >= len(self) else max(1, (stop - start) // 8)
            size = self.following.batch
            begin = min(max(0, start - margin), max(0, size - 1))
            end = size if margin == 0 else min(size, stop + margin)
            offset = self.following.start
            self.feed.prepare(self.following.epoch, offset + begin, offset + max(begin + 1, end))
        return rows


class NumberedBatch:
    """The batch of a step, by its number, so that a process that joins a run gets the right one.

    Args:
        batch_of: step -> batch, counted from 0.
        number: the step.
        limit: maximum samples of a batch.
    """

    def __init__(self, batch_of: Callable[[int], Any], number: int, limit: int):
        self._batch_of, self.number, self._limit = batch_of, number, limit
        self._batch: HostBatch | None = None

    def at(self, number: int) -> NumberedBatch:
        """The batch of another step."""
        return self if number == self.number else NumberedBatch(self._batch_of, number, self._limit)

    @property
    def _made(self) -> HostBatch:
        if self._batch is None:
            self._batch = as_batch(self._batch_of(self.number), self._limit)
        return self._batch

    def __len__(self) -> int:
        return len(self._made)

    def rows(self, start: int, stop: int) -> Tree | Rows:
        """Samples [start, stop) of the batch."""
        return self._made.rows(start, stop)


def sample_of(batch: HostBatch, rows: int = 1) -> Tree:
    """The first rows of a batch, to compile for their shapes."""
    return batch.sample() if isinstance(batch, FeedBatch) else batch.rows(0, min(rows, len(batch)))


def is_stream(source: Any) -> bool:
    """Whether this is an iterable of batches rather than a source with random access to samples."""
    indexed = hasattr(source, "__len__") and hasattr(source, "__getitem__")
    return hasattr(source, "__iter__") and not indexed and not isinstance(source, Mapping)


def as_batch(batch: Any, limit: int) -> HostBatch:
    """Turn a tree of arrays, or an object with `rows`, into a HostBatch of 1 to `limit` samples."""
    ready = isinstance(batch, HostBatch) and not isinstance(batch, tuple)  # a named tuple may have a field `rows`
    made = batch if ready else ArrayBatch(_arrays(batch))
    if not 1 <= len(made) <= limit:
        raise ValueError(
            f"The batch has {len(made)} samples; expected 1 to {limit} (batch_size). Split larger batches, or raise "
            "batch_size."
        )
    return made


def _arrays(batch: Any) -> Tree:
    leaves, tree = jax.tree.flatten(_whole(batch))
    arrays = [np.asarray(leaf) for leaf in leaves]
    if not arrays or any(array.ndim == 0 for array in arrays):
        raise ValueError(
            f"{_BATCH}; got {_kind(batch)}. If the stream yields single samples, batch them first, or give a source "
            "with __len__ and __getitem__."
        )
    sizes = {len(array) for array in arrays}
    if len(sizes) > 1:
        raise ValueError(f"All arrays of a batch need the same number of rows, but they have {sorted(sizes)}.")
    if odd := [array.dtype for array in arrays if array.dtype == object]:
        raise ValueError(f"A batch needs arrays of numbers, but one has dtype {odd[0]}: pad ragged samples first.")
    return jax.tree.unflatten(tree, [np.asarray(x, jax.dtypes.canonicalize_dtype(x.dtype)) for x in arrays])


def _whole(batch: Any) -> Tree:
    """Replace what JAX would take apart or not look into: lists of numbers by arrays, unknown mappings by dicts."""
    return jax.tree.map(_known, batch, is_leaf=is_numbers)


def _known(leaf: Any) -> Tree:
    if isinstance(leaf, Mapping):
        return _whole(dict(leaf))
    if not is_numbers(leaf):
        return leaf
    try:
        return np.asarray(leaf)
    except ValueError as error:
        raise ValueError(f"{_BATCH}; got lists of unequal length. Pad ragged samples first.") from error


def _kind(batch: Any) -> str:
    inside = sorted({type(leaf).__name__ for leaf in jax.tree.leaves(batch)} - {type(batch).__name__})
    return f"a {type(batch).__name__}" + (f" of {', '.join(inside)}" if inside else "")


def check_rows(tree: Tree, row: Tree) -> None:
    """Raise ValueError if rows differ in structure, shape or dtype from the row compiled for."""
    if not is_like(tree, row):
        raise ValueError(
            f"A sample of this batch is {_shown(tree, 1)}, but the first batch had {_shown(row, 0)}: every new shape "
            "would recompile. Pad samples to one shape."
        )


def matching(rows: Tree | Rows, row_K: Sequence[Tree]) -> int:
    """The first of several rows compiled for that these rows are like.

    Raises:
        ValueError: if they are like none.
    """
    tree = rows.tree if isinstance(rows, Rows) else rows
    for k, row in enumerate(row_K):
        if is_like(tree, row):
            return k
    raise ValueError(
        f"A sample of this batch is {_shown(tree, 1)}, but what was compiled for is "
        f"{', '.join(str(_shown(row, 0)) for row in row_K)}: every new shape would recompile. Pad samples to one of "
        "these shapes."
    )


def is_like(tree: Tree, row: Tree) -> bool:
    """Whether rows have the structure, shape and dtype of a row compiled for."""
    same_tree: bool = jax.tree.structure(tree) == jax.tree.structure(row)  # type: ignore[operator]
    pairs = zip(jax.tree.leaves(tree), jax.tree.leaves(row), strict=False)
    return same_tree and all(x.shape[1:] == y.shape and x.dtype == y.dtype for x, y in pairs)


def _shown(tree: Tree, cut: int) -> Tree:
    return jax.tree.map(lambda x: f"{x.dtype}{list(x.shape[cut:])}", tree)


def until_shortest(
    loader: Iterable[Any], requests: Any, left_of: Callable[[int], np.ndarray], process_W: Sequence[int], first: int
) -> Iterator[Any]:
    """Yield this process's batches until the shortest loader of all processes ends.

    The number of batches a process has left, capped at MANY = 2, is part of the sums of every step. That of step k is
    known when the batch of step k + 2 is needed, so no process starts a step that another cannot take part in.

    Args:
        loader: Batches of this process.
        requests: Its attribute `left` goes into the sums of the next step.
        left_of: Step -> batches left in the process of each worker.
        process_W: The process of each worker.
        first: Number of the first step.
    """
    source = iter(loader)
    ahead = deque(islice(source, MANY + 1))
    left_P = np.array(processes.gather(min(len(ahead), MANY)))
    steps, short = 0, np.flatnonzero(left_P < MANY)
    while not len(short) or steps < left_P.min():
        if steps >= MANY:
            left_W = left_of(first + steps - MANY)
            short = np.unique([process for process, left in zip(process_W, left_W, strict=True) if left < MANY])
            if len(short):
                break
        requests.left = min(len(ahead) - 1, MANY)
        yield ahead.popleft()
        ahead.extend(islice(source, 1))
        steps += 1
    requests.left = MANY
    log.log(
        logging.WARNING if ahead else logging.INFO,
        "The data of process %s ended after %d steps, so all processes stop%s.",
        ", ".join(map(str, short.tolist())), steps, "; this one has more" if ahead else "",
    )  # fmt: skip
