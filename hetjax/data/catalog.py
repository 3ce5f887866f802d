"""Datasets by name, as in --dataset, and those that need no file."""

from __future__ import annotations

from typing import Any

import numpy as np

from hetjax.data.files import idx_source, npz_source
from hetjax.data.libsvm import libsvm_source
from hetjax.data.memory import MemorySource, labeled_images
from hetjax.data.source import RowSource, check_split, stratified_split
from hetjax.data.text import text_source


def digits_source(split: str = "train") -> MemorySource:
    """The 1,797 handwritten digits of 8x8 pixels that come with scikit-learn: real data without a download.

    A stratified split gives 1,438 training and 359 test samples.

    Args:
        split: "train" or "test".

    Returns:
        The source.
    """
    from sklearn.datasets import load_digits

    bunch = load_digits()
    image = np.round(bunch.images * (255 / 16)).astype(np.uint8)  # stored as 0 to 16
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
    """Synthetic labeled images: one random prototype per class, plus Gaussian noise.

    Training and test split share the prototypes only.

    Args:
        split: "train" or "test".
        samples: Number of images (default: 4,096 for train, 1,024 for test).
        shape: Height, width and channels.
        classes: Number of classes.
        noise: Standard deviation of the noise, where pixels are in [0, 1].
        seed: Of prototypes, labels and noise.
    """
    check_split(split)
    if samples is None:
        samples = 4096 if split == "train" else 1024
    prototypes = np.random.default_rng(seed).random((classes, *shape), np.float32)
    rng = np.random.default_rng([seed, ("train", "test").index(split) + 1])
    label = rng.integers(classes, size=samples)
    image = np.empty((samples, *shape), np.uint8)
    for start in range(0, samples, 1024):  # in chunks: the noise of all samples may not fit into memory
        part = slice(start, start + 1024)
        noisy = prototypes[label[part]] + noise * rng.standard_normal((len(label[part]), *shape), np.float32)
        image[part] = np.clip(noisy * 255, 0, 255)
    return labeled_images(image, label, classes, name="synthetic")


SPECS = "digits | synthetic | idx:DIR | npz:FILE | libsvm:FILE | text | text:FILE | tfds:NAME"


def load(spec: str, split: str = "train", **options: Any) -> RowSource:
    """Load a dataset by name.

    digits      scikit-learn's 8x8 digits            idx:DIR    folder of IDX files (MNIST, Fashion-MNIST)
    synthetic   synthetic 28x28 images               npz:FILE   arrays x and y
    text        Python's language reference, bytes   text:FILE  any file, bytes
    libsvm:FILE sparse features, one row per line    tfds:NAME  a prepared TensorFlow dataset

    Args:
        spec: One of these names.
        split: "train" or "test".
        **options: Arguments of the function that makes the source.

    Returns:
        The source.

    Raises:
        ValueError: If there is no such dataset.
    """
    kind, colon, path = spec.partition(":")
    if bool(colon) != bool(path):
        raise ValueError(f"The dataset {spec!r} ends in a colon without a path or name. Expected {SPECS}.")
    match kind, path:
        case "digits", "":
            return digits_source(split, **options)
        case "synthetic", "":
            return synthetic_source(split, **options)
        case "text", _:
            return text_source(path or None, split, **options)
        case "idx", _ if path:
            return idx_source(path, split, **options)
        case "npz", _ if path:
            return npz_source(path, split, **options)
        case "libsvm", _ if path:
            return libsvm_source(path, split, **options)
        case "tfds", _ if path:
            from hetjax.data.tfds import tfds_source  # a heavy optional package

            return tfds_source(path, split, **options)
    raise ValueError(f"There is no dataset {spec!r}. Expected {SPECS}.")
