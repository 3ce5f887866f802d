"""Samples of unequal length, padded to the lengths of a few buckets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from hetjax.arguments import MOST_SAMPLES, whole
from hetjax.data.memory import as_source
from hetjax.data.source import Batch, fetch
from hetjax.data.trees import branches, map_leaves, rebuilt
from hetjax.sampling.buckets import BucketSampler

Tree = Any
Names = int | str
Fit = Callable[[Any, float], np.ndarray]  # (array, pad value) -> the array at the length of a bucket


class Bucketed:
    """A source of sequences of unequal length, each padded to the length of its bucket: the shortest that holds it.

    `Trainer.fit` and `evaluate` take it like any source. A step consists of samples of one bucket, programs for all
    buckets are compiled before the first step, and the work of a step is that of its bucket. Which samples form a step
    follows from seed and epoch alone, so neither the result nor the random keys depend on how a step is split.

    Examples:
        >>> source = hetjax.Bucketed(sequences, (64, 128, 256, 512), mask="weights")
        >>> state, history = trainer.fit(trainer.init(params), source, epochs=10)

    Padding has to have no effect on the loss: multiply it by weights that are padded with zero, and return their sum,
    `hetjax.Example(loss_b, weight_b)`, to divide by tokens instead of sequences.

    Args:
        source: samples whose arrays have a leading axis of tokens; or a dict of arrays that are padded to one length,
            together with `sizes`.
        lengths: the lengths of the buckets, in tokens.
        pad: value that arrays are padded with. Or values by name (by index, for tuples): other arrays are not padded.
        sizes: number of tokens of each sample. Default: every sample is read once to find out.
        mask: name of an array to add to each sample, 1 for its tokens and 0 for the padding. Default: none.
        tokens: maximum tokens of a step, padding included; steps of long samples then have fewer samples than
            `batch_size`. Default: all steps have `batch_size` samples.

    Raises:
        TypeError: if an argument is of the wrong type.
        ValueError: if lengths are not positive and distinct, or a sample is longer than all of them.
    """

    def __init__(
        self,
        source: Any,
        lengths: Sequence[int],
        *,
        pad: float | Mapping[Names, float] = 0,
        sizes: Sequence[int] | np.ndarray | None = None,
        mask: str | None = None,
        tokens: int | None = None,
    ):
        self.source, self.pad, self.mask = as_source(source), pad, mask
        given = sorted({whole("a length", length, 1, MOST_SAMPLES) for length in lengths})
        if not given or len(given) != len(lengths):
            raise ValueError(f"lengths are {list(lengths)}: expected distinct numbers of tokens such as (64, 256).")
        self.tokens = None if tokens is None else whole("tokens", tokens, given[-1])
        if mask is not None and not isinstance(self.source[0], Mapping):
            raise TypeError(f"mask {mask!r} names an array, so samples have to be dicts, not {type(self.source[0])}.")
        self.size_N = self._sizes() if sizes is None else np.asarray(sizes)
        if self.size_N.shape != (len(self.source),) or not np.issubdtype(self.size_N.dtype, np.integer):
            raise ValueError(
                f"sizes is {self.size_N.dtype} of shape {self.size_N.shape}: expected {len(self.source)} whole "
                "numbers, the tokens of each sample."
            )
        wrong = np.flatnonzero((self.size_N < 0) | (self.size_N > given[-1]))
        if len(wrong):
            raise ValueError(
                f"Sample {wrong[0]} has {self.size_N[wrong[0]]} tokens, but the longest bucket has {given[-1]}. "
                "Add a longer bucket, or cut samples in the source."
            )
        lengths_N = np.asarray(given)[np.searchsorted(given, self.size_N)]
        self.lengths: list[int] = np.unique(lengths_N)[::-1].tolist()  # of buckets that have samples, longest first
        self.bucket_N = np.searchsorted(-np.asarray(self.lengths), -lengths_N)

    @property
    def fill(self) -> float:
        """Tokens of all samples / the same with padding: what bucketing leaves of the throughput in tokens."""
        return float(self.size_N.sum() / np.asarray(self.lengths)[self.bucket_N].sum())

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int, /) -> Tree:
        return jax.tree.map(lambda x: x[0], self.rows(np.array([index])))

    def rows(self, indices: np.ndarray) -> Batch:
        """Return the samples at these indices, padded to the bucket of the longest.

        Args:
            indices: whole numbers; those of one step are all of one bucket.

        Returns:
            The samples, stacked along a leading axis.
        """
        indices = np.asarray(indices)
        length = self.lengths[int(self.bucket_N[indices].min())]
        if hasattr(self.source, "rows"):
            batch = self._padded(fetch(self.source, indices), lambda x, value: _fit(x, length, 1, value), 2)
        else:
            batch = fetch(_Samples(self, length), indices)
        if self.mask is not None:
            batch = {**batch, self.mask: (np.arange(length) < self.size_N[indices, None]).astype(np.float32)}
        return batch

    def sampler(self, batch_size: int, seed: int = 0, shuffle: bool = True) -> BucketSampler:
        """Return the order of the samples, in steps of one bucket each.

        Args:
            batch_size: maximum samples of a step.
            seed: the order derives from it.
            shuffle: whether it is random.

        Returns:
            The sampler.
        """
        batch_K = [batch_size if self.tokens is None else min(batch_size, self.tokens // x) for x in self.lengths]
        return BucketSampler(self.bucket_N, batch_K, seed, shuffle)

    def samples(self, choose: Callable[[int], np.ndarray]) -> list[Tree]:
        """Return rows of each bucket, to compile for.

        Args:
            choose: number of samples of a bucket -> which of them to return.

        Returns:
            The rows, by bucket.
        """
        members_K = [np.flatnonzero(self.bucket_N == bucket) for bucket in range(len(self.lengths))]
        return [self.rows(members[choose(len(members))]) for members in members_K]

    def _padded(self, tree: Tree, fit: Fit, least: int) -> Tree:
        """Fit the arrays with at least `least` axes that are to be padded."""
        fitted = lambda tree, value: map_leaves(lambda x: fit(x, value) if np.ndim(x) >= least else x, tree)
        if not isinstance(self.pad, Mapping):
            return fitted(tree, self.pad)
        parts = dict(branches(tree) or [])
        if unknown := [name for name in self.pad if name not in parts]:
            raise ValueError(f"pad names {unknown}, but the arrays of a sample are {list(parts)}.")
        pad = self.pad
        return rebuilt(tree, [fitted(part, pad[name]) if name in pad else part for name, part in parts.items()])

    def _sizes(self) -> np.ndarray:
        found: list[int] = []

        def note(x: Any, _: float) -> Any:
            found.append(len(x))
            return x

        size_N = np.zeros(len(self.source), np.int64)
        for index in range(len(self.source)):
            found.clear()
            self._padded(self.source[index], note, 1)
            if not found:
                raise ValueError(f"Sample {index} has no array to pad: expected arrays with a leading axis of tokens.")
            size_N[index] = max(found)
        return size_N


class _Samples:
    """The samples of a `Bucketed` source at one length."""

    def __init__(self, bucketed: Bucketed, length: int):
        self.bucketed, self.length = bucketed, length

    def __len__(self) -> int:
        return len(self.bucketed)

    def __getitem__(self, index: int, /) -> Tree:
        fit = lambda x, value: _fit(x, self.length, 0, value)
        return self.bucketed._padded(self.bucketed.source[index], fit, 1)


def _fit(x: Any, length: int, axis: int, value: float) -> np.ndarray:
    """Pad or cut one axis to a length; what is cut is padding, as no sample of a bucket is longer."""
    x = np.asarray(x)
    if x.shape[axis] >= length:
        return x[(slice(None),) * axis + (slice(length),)]
    return np.pad(x, [(0, length - x.shape[axis] if i == axis else 0) for i in range(x.ndim)], constant_values=value)
