"""Datasets by name: the words that --dataset understands."""

from __future__ import annotations

from typing import Any

from hetjax.data.digits import digits_source
from hetjax.data.idx import idx_source
from hetjax.data.npz import npz_source
from hetjax.data.source import RowSource
from hetjax.data.synthetic import synthetic_source
from hetjax.data.text import text_source

SPECS = "digits | synthetic | idx:DIR | npz:FILE | text | text:FILE | tfds:NAME"


def load(spec: str, split: str = "train", **options: Any) -> RowSource:
    """The source that a short text names; `options` go to its function. Its `.description` says what a model must fit.

    digits      scikit-learn's 8x8 digits            idx:DIR    folder of IDX files (MNIST, Fashion-MNIST)
    synthetic   made-up 28x28 images                 npz:FILE   arrays x and y
    text        Python's own reference, bytes        text:FILE  any file, bytes
                                                     tfds:NAME  a prepared TensorFlow dataset
    """
    kind, colon, place = spec.partition(":")
    if bool(colon) != bool(place):
        raise ValueError(f"The dataset {spec!r} ends in a colon without a path or name. Expected {SPECS}.")
    match kind, place:
        case "digits", "":
            return digits_source(split, **options)
        case "synthetic", "":
            return synthetic_source(split, **options)
        case "text", _:
            return text_source(place or None, split, **options)
        case "idx", _ if place:
            return idx_source(place, split, **options)
        case "npz", _ if place:
            return npz_source(place, split, **options)
        case "tfds", _ if place:
            from hetjax.data.tfds import tfds_source  # a heavy package, wanted by few

            return tfds_source(place, split, **options)
    raise ValueError(f"There is no dataset {spec!r}. Expected {SPECS}.")
