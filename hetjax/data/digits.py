"""The 1,797 handwritten digits of 8x8 pixels that scikit-learn carries: real data without a download."""

from __future__ import annotations

import numpy as np

from hetjax.data.memory import MemorySource, labelled_images
from hetjax.data.split import stratified


def digits_source(split: str = "train") -> MemorySource:
    """1,438 training or 359 test samples, every digit in the same proportion in both."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    image = np.round(bunch.images * (255 / 16)).astype(np.uint8)  # the files hold 0 to 16
    keep = stratified(bunch.target, split)
    return labelled_images(image[keep], bunch.target[keep], 10, name="digits")
