"""Made-up labelled images of any size: one prototype per class plus noise, so a model can learn them."""

from __future__ import annotations

import numpy as np

from hetjax.data.memory import MemorySource, labelled_images
from hetjax.data.split import check_split


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
    return labelled_images(image, label, classes, name="synthetic")
