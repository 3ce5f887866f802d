"""Datasets by name: the words that --dataset understands, and those that come without a file.

The 1,797 handwritten digits of 8x8 pixels that scikit-learn carries: real data without a download.

Made-up labeled images of any size: one prototype per class plus noise, so a model can learn them.

Datasets by name: the words that --dataset understands.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hetjax.data.files import idx_source, npz_source
from hetjax.data.memory import MemorySource, labeled_images
from hetjax.data.source import RowSource, check_split, stratified_split
from hetjax.data.text import text_source


def digits_source(split: str = "train") -> MemorySource:
    """1,438 training or 359 test samples, every digit in the same proportion in both."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    image = np.round(bunch.images * (255 / 16)).astype(np.uint8)  # the files hold 0 to 16
    keep = stratified_split(bunch.target, split)
    return labeled_images(image[keep], bunch.target[keep], 10, name="digits")


def synthetic_source(
    split: str = "train",
    *,
    samples: int | None = None,
    shape: tuple[int, int, int] = (28, 28, 1),
    classes: int = 10,
    noise: float = 0.25,
    seed: int = 0,
) -> MemorySource:
    """`samples` images (4,096 for train, 1,024 for test unless told) around one random prototype per class.

    Train and test share the prototypes and nothing else.
    """
    check_split(split)
    if samples is None:
        samples = 4096 if split == "train" else 1024
    prototypes = np.random.default_rng(seed).random((classes, *shape), np.float32)
    rng = np.random.default_rng([seed, ("train", "test").index(split) + 1])
    label = rng.integers(classes, size=samples)
    image = np.empty((samples, *shape), np.uint8)
    for start in range(0, samples, 1024):  # noise in slices: floats of all samples at once may not fit
        part = slice(start, start + 1024)
        blurred = prototypes[label[part]] + noise * rng.standard_normal((len(label[part]), *shape), np.float32)
        image[part] = np.clip(blurred * 255, 0, 255)
    return labeled_images(image, label, classes, name="synthetic")


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
