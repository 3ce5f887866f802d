"""Blocks: a fixed partition of a dataset among workers. Random ones are made here, submodular ones in submodular/."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from hetjax.planning.limits import Limits
from hetjax.planning.rounding import largest_remainder

_FORMAT = "hetjax blocks 1"


@dataclass(frozen=True)
class Blocks:
    """A partition of a dataset: every sample is owned by one worker.

    Attributes:
        owner_D: int64, the worker that owns each sample.
        classes_D: int64, the labels or pseudo-classes; each class was divided by the rates.
        rates_W: float64, relative speeds of the workers; block sizes are proportional to them.
        settings: How the blocks were made, as plain JSON values.
    """

    owner_D: np.ndarray
    classes_D: np.ndarray
    rates_W: np.ndarray
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "owner_D", np.asarray(self.owner_D, np.int64))
        object.__setattr__(self, "classes_D", np.asarray(self.classes_D, np.int64))
        object.__setattr__(self, "rates_W", validate_rates(self.rates_W))
        if self.owner_D.ndim != 1 or self.owner_D.shape != self.classes_D.shape:
            raise ValueError(
                f"Blocks got {self.owner_D.shape} owners and {self.classes_D.shape} classes: expected one of each per "
                "sample."
            )
        if len(self.owner_D) == 0 or self.owner_D.min() < 0 or self.owner_D.max() >= self.workers:
            raise ValueError(f"Blocks need at least one sample, and for each an owner from 0 to {self.workers - 1}.")

    @property
    def size(self) -> int:
        return len(self.owner_D)

    @property
    def workers(self) -> int:
        return len(self.rates_W)

    @property
    def sizes_W(self) -> np.ndarray:
        return np.bincount(self.owner_D, minlength=self.workers)

    @property
    def indices(self) -> list[np.ndarray]:
        """The samples of each worker, in ascending order."""
        by_owner_D = np.argsort(self.owner_D, kind="stable")
        return np.split(by_owner_D, np.cumsum(self.sizes_W)[:-1])

    def save(self, path: str | Path) -> None:
        """Write the blocks to an .npz file of plain arrays."""
        with Path(path).open("wb") as file:
            np.savez_compressed(
                file,
                format=np.array(_FORMAT),
                owner=self.owner_D,
                classes=self.classes_D,
                rates=self.rates_W,
                settings=np.array(json.dumps(dict(self.settings))),
            )

    @classmethod
    def load(cls, path: str | Path) -> Blocks:
        """Read blocks written by `save`."""
        try:
            with np.load(path, allow_pickle=False) as file:
                saved = {name: file[name] for name in ("format", "owner", "classes", "rates", "settings")}
            if str(saved["format"]) != _FORMAT:
                raise ValueError(f"its format is {str(saved['format'])!r}, expected {_FORMAT!r}")
            settings = json.loads(str(saved["settings"]))
        except FileNotFoundError:
            raise FileNotFoundError(f"There is no blocks file {path}: make one with 'hetjax partition'.") from None
        except Exception as error:
            raise ValueError(
                f"{path} does not hold blocks ({error}): make it again with 'hetjax partition'."
            ) from error
        return cls(saved["owner"], saved["classes"], saved["rates"], settings)

    def with_settings(self, **settings: Any) -> Blocks:
        """Return the same blocks with these settings added."""
        return replace(self, settings={**self.settings, **settings})


def validate_rates(rates_W: Sequence[float] | np.ndarray) -> np.ndarray:
    """Return the rates as float64; raise ValueError unless they are finite, non-negative and not all zero."""
    rates_W = np.asarray(rates_W, np.float64)
    if rates_W.ndim != 1 or not (np.all(rates_W >= 0) and 0 < rates_W.sum() < np.inf):
        raise ValueError(
            f"The rates are {rates_W.tolist()}; expected one number per worker, zero or more, not all zero."
        )
    return rates_W


def quotas(class_sizes_L: np.ndarray, rates_W: np.ndarray, *, carry: bool = True) -> np.ndarray:
    """C[l, j] = |V_l| r_j / sum(r), rounded by largest remainder so that every class sums to its size.

    With `carry` the rounding error of one class is carried into the next, so that block sizes follow the rates too.
    Without it, as published, classes of 3 samples at rates 4:2:1:1 are all divided 2:1:0:0 and two blocks stay empty.
    """
    share_W = validate_rates(rates_W) / np.sum(rates_W)
    quota_LxW = np.zeros((len(class_sizes_L), len(share_W)), np.int64)
    owed_W = np.zeros(len(share_W))
    for row_W, size in zip(quota_LxW, np.asarray(class_sizes_L).tolist(), strict=True):
        ideal_W = size * share_W + (owed_W if carry else 0.0)
        row_W[:] = largest_remainder(np.maximum(ideal_W, 0.0), Limits.plain(len(share_W), size), size)
        owed_W = ideal_W - row_W
    return quota_LxW


def random_blocks(classes_D: np.ndarray, rates_W: np.ndarray, seed: int = 0) -> Blocks:
    """Assign samples to workers at random, in proportion to their rates."""
    whole_1xW = quotas(np.array([len(classes_D)]), rates_W)
    owner_D = _deal(np.zeros(len(classes_D), np.int64), whole_1xW, seed)
    return Blocks(owner_D, classes_D, validate_rates(rates_W), {"name": "random", "seed": seed})


def class_balanced_blocks(classes_D: np.ndarray, rates_W: np.ndarray, seed: int = 0) -> Blocks:
    """Assign the samples of every class to workers at random, in proportion to their rates."""
    codes_D, sizes_L = encode_classes(classes_D)
    owner_D = _deal(codes_D, quotas(sizes_L, rates_W), seed)
    return Blocks(owner_D, classes_D, validate_rates(rates_W), {"name": "class-balanced", "seed": seed})


def encode_classes(classes_D: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Number the classes 0, 1, 2, ... in sorted order; return each sample's number and the class sizes."""
    _, codes_D, sizes_L = np.unique(classes_D, return_inverse=True, return_counts=True)
    return codes_D, sizes_L


def _deal(codes_D: np.ndarray, quota_LxW: np.ndarray, seed: int) -> np.ndarray:
    """Owners drawn at random: quota_LxW[l, j] samples of class l for worker j."""
    rng = np.random.default_rng(seed)
    owner_D = np.empty(len(codes_D), np.int64)
    for code, quota_W in enumerate(quota_LxW):
        members = rng.permutation(np.flatnonzero(codes_D == code))
        owner_D[members] = np.repeat(np.arange(len(quota_W)), quota_W)
    return owner_D
