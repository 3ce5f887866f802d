"""Partitions a source into one block per worker, by its features and classes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, overload

import numpy as np

from hetjax import processes
from hetjax.data.memory import MemorySource, as_source
from hetjax.data.source import Batch, Source, check_finite, fetch
from hetjax.fleet.agree import digest
from hetjax.sampling.blocks import Blocks, class_balanced_blocks, random_blocks
from hetjax.sampling.submodular import flat_features, principal_components, submodular_blocks
from hetjax.sampling.submodular.features import k_means

Embedding = Callable[[Batch], Any]  # batch -> one row of features per sample
KINDS = ("submodular", "random", "class-balanced")
COMPONENTS = 50  # of "pca"
_ROWS = 1024  # per chunk


def make_blocks(
    source: Source | Mapping[str, np.ndarray],
    rates: Sequence[float],
    kind: str = "submodular",
    *,
    features: str | Embedding = "pca",
    pseudo_classes: int | None = None,
    seed: int = 0,
    **options: Any,
) -> Blocks:
    """Partition a dataset into one fixed block per worker, to be passed as `Trainer(partition=...)`.

    Block sizes are proportional to the rates, within every class too (except for "random"). Submodular blocks (RCD-SGD,
    He & Dube, arXiv 2211.00839) are chosen greedily so that each represents the whole dataset. With several processes
    use `hetjax.data.source_blocks.shared_blocks`, which computes them in one process for all.

    Args:
        source: A source with the inputs under "image" and, if there are any, labels or targets under "label", or a dict
            of such arrays. Other samples need a function as `features`.
        rates: Relative speed of each worker; not negative, not all zero.
        kind: "submodular", or the baselines "random" and "class-balanced".
        features: What similarity is measured on: "raw" inputs, "pca" (50 principal components), "pca:N", or a function
            of a batch that returns one row per sample, such as a hidden layer of a trained model.
        pseudo_classes: Number of classes to make by k-means: of the targets if they are not integers, otherwise of the
            features, instead of the labels. By default integer labels are the classes; without them there are 10
            pseudo-classes.
        seed: For k-means and random blocks.
        **options: For submodular blocks, passed to `hetjax.sampling.submodular.submodular_blocks`: objective, rule,
            bandwidth, carry, largest, progress.

    Returns:
        The blocks: `owner_D` is the worker of every sample, `save` writes them to a file.

    Raises:
        ValueError: If `kind`, `features`, `rates` or an option is invalid, or the samples have no "image" and no
            function is given.
        TypeError: If options are given for other than submodular blocks, or the features are not numbers.
    """
    source = as_source(source)
    check_finite(source, "for blocks")
    if kind not in KINDS:
        raise ValueError(f"There are no {kind!r} blocks: choose one of {', '.join(KINDS)}.")
    rates_W = np.asarray(rates, np.float64)
    if kind != "submodular":
        if options:
            raise TypeError(f"{', '.join(options)}: only for submodular blocks, but kind is {kind!r}.")
        classes_D = read_classes(source, None, pseudo_classes, seed)
        return (random_blocks if kind == "random" else class_balanced_blocks)(classes_D, rates_W, seed)
    features_DxF = read_features(source, features)
    classes_D = read_classes(source, features_DxF, pseudo_classes, seed)
    name = features if isinstance(features, str) else _name(features)
    return submodular_blocks(features_DxF, classes_D, rates_W, **options).with_settings(features=name)


@overload
def shared_blocks(make: Callable[[], Blocks]) -> Blocks: ...
@overload
def shared_blocks(make: Callable[[], Blocks | None]) -> Blocks | None: ...
def shared_blocks(make: Callable[[], Blocks | None]) -> Blocks | None:
    """Call `make` in the first process and return its blocks in all processes, which all have to call this.

    Machines may round differently, and a submodular partition can take minutes.
    """
    message = None
    if processes.first() and (made := make()) is not None:
        arrays = (made.owner_D, made.classes_D, made.rates_W)
        message = [*(array.tolist() for array in arrays), dict(made.settings)]
    first = processes.gather(message)[0]
    return None if first is None else Blocks(*first)


def fingerprint(source: Source) -> str:
    """Digest of all samples in order: identifies a dataset, wherever its files are."""
    return digest([digest(fetch(source, indices)) for indices in _parts(source)])


def check_same_data(blocks: Blocks, data: str, path: str | Path) -> None:
    """Raise ValueError if the blocks of a file record another fingerprint than `data`."""
    if blocks.settings.get("data", data) != data:
        raise ValueError(
            f"The blocks in {path} were cut from other samples ({blocks.settings.get('dataset', 'unnamed')}). Give "
            "that dataset, unchanged, or make new blocks."
        )


def read_features(source: Source, features: str | Embedding = "pca") -> np.ndarray:
    """One row of features per sample: "raw" inputs, "pca", "pca:N", or what a function makes of a batch."""
    if callable(features):
        return flat_features(_read(source, features), "The embedding")
    kind, _, count = str(features).partition(":")
    if kind not in ("raw", "pca") or (count and (kind == "raw" or not count.isdigit())):
        raise ValueError(f"There are no features {features!r}: choose raw, pca, pca:COMPONENTS or MODULE:FUNCTION.")
    raw_DxF = flat_features(_read(source, _inputs), "The inputs")
    return raw_DxF if kind == "raw" else principal_components(raw_DxF, int(count) if count else COMPONENTS)


def read_classes(
    source: Source, features_DxF: np.ndarray | None, pseudo_classes: int | None = None, seed: int = 0
) -> np.ndarray:
    """The label of every sample; pseudo-classes of the targets if they are not integers; otherwise of the features.

    With `pseudo_classes` given, integer labels are ignored. Its default is 10, or the number of samples if lower.
    """
    count = min(10, len(source)) if pseudo_classes is None else pseudo_classes
    label_D = _labels(source)
    if label_D is not None and not np.issubdtype(label_D.dtype, np.integer):
        return k_means(label_D, count, seed)
    if label_D is not None and pseudo_classes is None:
        return label_D
    return k_means(read_features(source) if features_DxF is None else features_DxF, count, seed)


def parse_features(text: str) -> str | Embedding:
    """Parse --features: a name that `read_features` knows, or MODULE:FUNCTION, which is imported."""
    module, colon, name = text.partition(":")
    if not colon or module == "pca":
        return text
    try:
        found = getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"The features {text!r} cannot be imported ({error}). Expected MODULE:FUNCTION.") from error
    if not callable(found):
        raise ValueError(f"{text} is not a function of a batch, but {type(found).__name__}.")
    return found


def _read(source: Source, of_batch: Embedding) -> np.ndarray:
    parts = []
    for indices in _parts(source):
        part = np.asarray(of_batch(fetch(source, indices)))
        if part.ndim == 0 or len(part) != len(indices):
            raise ValueError(
                f"Features of a batch of {len(indices)} have shape {part.shape}: expected one row per sample."
            )
        parts.append(part.reshape(len(part), -1).astype(np.float32, copy=False))
    return np.concatenate(parts)


def _inputs(batch: Batch) -> np.ndarray:
    if isinstance(batch, Mapping) and "image" in batch:
        return batch["image"]
    given = f"the arrays {sorted(batch)}" if isinstance(batch, Mapping) else f"a {type(batch).__name__}"
    raise ValueError(
        f"The samples are {given} without 'image', so there are no features to compare them by. Give a function of a "
        "batch (features=..., or --features MODULE:FUNCTION) that returns one row of numbers per sample."
    )


def _labels(source: Source) -> np.ndarray | None:
    """Labels or targets [D, ...] of a source that has them under "label"."""
    first = fetch(source, np.zeros(1, np.int64))
    if not isinstance(first, Mapping) or "label" not in first:
        return None
    if isinstance(source, MemorySource):
        return source.arrays["label"]
    return np.concatenate([fetch(source, indices)["label"] for indices in _parts(source)])


def _parts(source: Source) -> Iterator[np.ndarray]:
    """All indices, in chunks."""
    return (np.arange(lo, min(lo + _ROWS, len(source))) for lo in range(0, len(source), _ROWS))


def _name(embedding: Embedding) -> str:
    """As MODULE:FUNCTION, which `parse_features` can import unless it is a local function."""
    return f"{embedding.__module__}:{getattr(embedding, '__qualname__', type(embedding).__name__)}"
