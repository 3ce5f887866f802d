"""Blocks of a source: reads its features and classes, and cuts it into one block per worker."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import jax
import numpy as np

from hetjax.data.memory import MemorySource
from hetjax.data.source import Batch, Source, fetch
from hetjax.fleet.agree import digest, gather
from hetjax.sampling.blocks import Blocks, class_balanced_blocks, random_blocks
from hetjax.sampling.submodular import flat_features, principal_components, submodular_blocks
from hetjax.sampling.submodular.features import k_means

Embedding = Callable[[Batch], Any]  # a batch of the source -> one row of numbers per sample
KINDS = ("submodular", "random", "class-balanced")
COMPONENTS = 50
_ROWS = 1024


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
    """One block per worker, sized by its rate; give them to `Trainer(partition=...)`.

    kind            'submodular', or 'random' and 'class-balanced' to compare with (then no features are read)
    features        'raw', 'pca' (50 components), 'pca:N', or a function of a batch, for instance a trained layer
    pseudo_classes  so many by k-means: of targets that are no whole numbers, else of the features in place of labels
    options         of `hetjax.sampling.submodular.submodular_blocks`: objective, rule, bandwidth, progress, ...

    Over several processes one of them is enough: see `shared_blocks`.
    """
    source = MemorySource(source) if isinstance(source, Mapping) else source
    if kind not in KINDS:
        raise ValueError(f"There are no {kind!r} blocks. Choose one of {', '.join(KINDS)}.")
    rates_W = np.asarray(rates, np.float64)
    if kind != "submodular":
        if options:
            raise TypeError(f"{', '.join(options)}: options of submodular blocks, and {kind!r} ones were asked for.")
        classes_D = read_classes(source, None, pseudo_classes, seed)
        return (random_blocks if kind == "random" else class_balanced_blocks)(classes_D, rates_W, seed)
    features_DxF = read_features(source, features)
    classes_D = read_classes(source, features_DxF, pseudo_classes, seed)
    told = features if isinstance(features, str) else _name(features)
    return submodular_blocks(features_DxF, classes_D, rates_W, **options).with_settings(features=told)


def shared_blocks(make: Callable[[], Blocks | None]) -> Blocks | None:
    """What `make` gives in the first process, in all of them: machines may round unlike, and a cut can take minutes.

    All processes have to call this; only the first calls `make`.
    """
    gather(None)  # they meet first: connected ones wait for `wait_limit`, but to connect only half a minute
    told = None
    if jax.process_index() == 0 and (made := make()) is not None:
        arrays = (made.owner_D, made.classes_D, made.rates_W)
        told = [*(array.tolist() for array in arrays), dict(made.settings)]
    first = gather(told)[0]
    return None if first is None else Blocks(*first)


def fingerprint(source: Source) -> str:
    """Of all samples in their order: tells a data set from others, wherever its files lie."""
    return digest([digest(fetch(source, indices)) for indices in _parts(source)])


def check_same_data(blocks: Blocks, data: str, path: str | Path) -> None:
    """Refuse blocks from a file that were cut from samples of another fingerprint, where the file says so."""
    if blocks.settings.get("data", data) != data:
        raise ValueError(
            f"The blocks in {path} were cut from other samples ({blocks.settings.get('dataset', 'unnamed')}). Give the "
            "data set that they are of, unchanged, or cut anew."
        )


def read_features(source: Source, features: str | Embedding = "pca") -> np.ndarray:
    """One row of numbers per sample: its input flat, or principal components of it, or what a function makes of it."""
    if callable(features):
        return flat_features(_read(source, features), "The embedding")
    kind, _, count = str(features).partition(":")
    if kind not in ("raw", "pca") or (count and (kind == "raw" or not count.isdigit())):
        raise ValueError(f"There are no features {features!r}. Choose raw, pca, pca:COMPONENTS or MODULE:FUNCTION.")
    raw_DxF = flat_features(_read(source, _inputs), "The inputs")
    return raw_DxF if kind == "raw" else principal_components(raw_DxF, int(count) if count else COMPONENTS)


def read_classes(
    source: Source, features_DxF: np.ndarray | None, pseudo_classes: int | None = None, seed: int = 0
) -> np.ndarray:
    """The label of every sample; pseudo-classes of the targets where those are no whole numbers, else of the features.

    `pseudo_classes` asks for so many, in place of labels too; ten unless told, or fewer where samples are few.
    """
    count = min(10, len(source)) if pseudo_classes is None else pseudo_classes
    label_D = _labels(source)
    if label_D is not None and not np.issubdtype(label_D.dtype, np.integer):
        return k_means(label_D, count, seed)
    if label_D is not None and pseudo_classes is None:
        return label_D
    return k_means(read_features(source) if features_DxF is None else features_DxF, count, seed)


def parse_features(text: str) -> str | Embedding:
    """What --features means: a name of `read_features`, or the function that MODULE:FUNCTION imports."""
    module, colon, name = text.partition(":")
    if not colon or module == "pca":
        return text
    try:
        found = getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"The features {text!r} cannot be imported ({error}). Expected MODULE:FUNCTION.") from error
    if not callable(found):
        raise ValueError(f"{text} is no function of a batch but {type(found).__name__}.")
    return found


def _read(source: Source, of_batch: Embedding) -> np.ndarray:
    parts = []
    for indices in _parts(source):
        part = np.asarray(of_batch(fetch(source, indices)))
        if part.ndim == 0 or len(part) != len(indices):
            raise ValueError(f"Features of shape {part.shape} for a batch of {len(indices)}: expected one row each.")
        parts.append(part.reshape(len(part), -1).astype(np.float32, copy=False))
    return np.concatenate(parts)


def _inputs(batch: Batch) -> np.ndarray:
    if isinstance(batch, Mapping) and "image" in batch:
        return batch["image"]
    told = f"the arrays {sorted(batch)}" if isinstance(batch, Mapping) else f"a {type(batch).__name__}"
    raise ValueError(
        f"The samples are {told} without 'image', so it is not known what to compare them by. Give a function of a "
        "batch (features=..., or --features MODULE:FUNCTION) that returns one row of numbers per sample."
    )


def _labels(source: Source) -> np.ndarray | None:
    """Labels or targets [D] or [D, ...] of a source that has them under 'label'."""
    first = fetch(source, np.zeros(1, np.int64))
    if not isinstance(first, Mapping) or "label" not in first:
        return None
    if isinstance(source, MemorySource):
        return source.arrays["label"]
    return np.concatenate([fetch(source, indices)["label"] for indices in _parts(source)])


def _parts(source: Source) -> Iterator[np.ndarray]:
    """All indices, in pieces that fit into memory."""
    return (np.arange(lo, min(lo + _ROWS, len(source))) for lo in range(0, len(source), _ROWS))


def _name(embedding: Embedding) -> str:
    """As MODULE:FUNCTION, which `parse_features` finds again unless it is inside another function."""
    return f"{embedding.__module__}:{getattr(embedding, '__qualname__', type(embedding).__name__)}"
