"""Which samples a step really computed, encoded in its metrics, not which were planned or fetched.

Every sample carries its number. Sample s adds 2**(s % 20) to metric s // 20, so the sum over a step encodes the set of
its samples on all workers and processes; float32 adds these numbers exactly.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from hetjax.adapters.contract import Example

_BITS = 20
_PREFIX = "samples_"


class Numbered:
    """A source of dicts, with the number of each sample added."""

    def __init__(self, source: Any):
        self.source = source

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: Any) -> dict[str, Any]:
        return {**self.source[index], "number": np.int32(index)}


def numbered(data: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Arrays in memory, with the number of each sample added."""
    rows = len(next(iter(data.values())))
    return {**data, "number": np.arange(rows, dtype=np.int32)}


def log_samples(loss_fn: Any, samples: int) -> Any:
    """A loss function (without model state) whose metrics encode the samples it saw."""

    def encoding(params: Any, batch: dict[str, Any], keys: Any) -> Example:
        number_b = batch["number"]
        found = loss_fn(params, {name: value for name, value in batch.items() if name != "number"}, keys)
        found = found if isinstance(found, Example) else Example(found)
        bit_b = (2 ** (number_b % _BITS)).astype(jnp.float32)
        groups = range(-(-samples // _BITS))
        seen = {f"{_PREFIX}{group}": jnp.where(number_b // _BITS == group, bit_b, 0.0) for group in groups}
        return replace(found, metrics={**found.metrics, **seen})

    return encoding


def samples_of(metrics: dict[str, float], batch: int) -> list[int]:
    """The samples of a step from its metrics. Fails if one was in it twice, as its bit would carry over."""
    found = []
    for name, mean in metrics.items():
        if name.startswith(_PREFIX):
            total = round(mean * batch)
            assert abs(mean * batch - total) < 0.1, (name, mean, batch)
            found += [int(name.removeprefix(_PREFIX)) * _BITS + bit for bit in range(_BITS + 4) if total >> bit & 1]
    assert len(found) == batch, f"{batch} samples were counted and {len(found)} different ones seen"
    return found


def check_epochs(steps: list[tuple[dict[str, float], int]], samples: int) -> int:
    """Check that every whole epoch of the steps (metrics, batch) has every sample once; return the number of epochs."""
    return check_samples([samples_of(metrics, batch) for metrics, batch in steps], samples)


def check_samples(steps: list[list[int]], samples: int) -> int:
    """`check_epochs` for lists of samples."""
    epochs, seen = 0, list[int]()
    for step in steps:
        seen += step
        if len(seen) >= samples:
            assert sorted(seen) == list(range(samples)), f"epoch {epochs} is not every sample once"
            epochs, seen = epochs + 1, []
    assert len(set(seen)) == len(seen), f"a sample came twice in epoch {epochs}"
    return epochs
