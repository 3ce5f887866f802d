"""A fixed split into training and test samples for data that comes without one."""

from __future__ import annotations

from typing import Literal

import numpy as np

Split = Literal["train", "test"]


def check_split(split: str) -> None:
    if split not in ("train", "test"):
        raise ValueError(f"There is no split {split!r}: ask for 'train' or 'test'.")


def stratified(labels: np.ndarray, split: str, *, test_share: float = 0.2, seed: int = 0) -> np.ndarray:
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
