"""Two small problems for bench_async.py: the digits, and synthetic sparse features."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import optax

from hetjax.data import digits_source


@dataclass(frozen=True)
class Problem:
    """Data, the layer widths of an MLP, the learning rate, and the target loss."""

    rows: dict[str, np.ndarray]
    widths: tuple[int, ...]
    rate: float
    target: float

    def params(self, seed: int) -> list[dict[str, jax.Array]]:
        """Initial parameters."""
        keys = jax.random.split(jax.random.key(seed), len(self.widths) - 1)
        layers = zip(keys, pairwise(self.widths), strict=True)
        return [{"w": jax.random.normal(k, (a, b)) * (2 / a) ** 0.5, "b": jnp.zeros(b)} for k, (a, b) in layers]


def loss_fn(params: list[dict[str, jax.Array]], batch: dict[str, jax.Array], keys: jax.Array) -> jax.Array:
    """Cross entropy of each example."""
    x = batch["x"]
    for layer in params[:-1]:
        x = jax.nn.relu(x @ layer["w"] + layer["b"])
    return optax.softmax_cross_entropy_with_integer_labels(x @ params[-1]["w"] + params[-1]["b"], batch["y"])


def digits() -> Problem:
    """The 8 x 8 digits."""
    source = digits_source("train")
    batch = source.rows(np.arange(len(source)))
    rows = {"x": batch["image"].reshape(len(source), -1), "y": batch["label"]}
    return Problem(rows, (64, 32, 10), rate=0.4, target=0.6)


def sparse(samples: int = 4096, features: int = 512, seed: int = 0) -> Problem:
    """Like text: about 2% of the features are non-zero, with power-law frequencies, and 30% of them matter."""
    rng = np.random.default_rng(seed)
    frequency = np.clip(0.3 / np.arange(1, features + 1) ** 0.7, 0, 0.5)
    x = (rng.random((samples, features)) < frequency) * rng.lognormal(0, 0.3, (samples, features))
    score = x @ (rng.normal(size=features) * (rng.random(features) < 0.3))
    y = (score + 0.1 * rng.normal(size=samples) > 0).astype(np.int32)
    return Problem({"x": x.astype(np.float32), "y": y}, (features, 16, 2), rate=1.0, target=0.6)
