"""A least-squares problem for asynchronous runs, and a plain NumPy account of what such a run must have computed."""

from __future__ import annotations

import jax
import numpy as np
import optax

from hetjax import Chunked, Trainer
from hetjax.sampling.order import Sampler
from hetjax.sync.hogbatch.rules import merge_weights

RATE = 0.1


def data(samples: int = 96, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(samples, 3))
    return {"x": x, "y": x @ np.array([1.0, -2.0, 0.5]) + 0.3 + 0.1 * rng.normal(size=samples)}


def loss_fn(params, batch, keys):
    return 0.5 * (batch["x"] @ params["w"] + params["b"] - batch["y"]) ** 2


def first() -> dict[str, np.ndarray]:
    return {"w": np.zeros(3), "b": np.zeros(())}


def best(rows: dict[str, np.ndarray]) -> np.ndarray:
    """The least-squares answer, w and b in one vector."""
    wide = np.column_stack([rows["x"], np.ones(len(rows["y"]))])
    return np.linalg.lstsq(wide, rows["y"], rcond=None)[0]


def flat(params) -> np.ndarray:
    return np.append(np.asarray(params["w"], np.float64), float(params["b"]))


def trainer_for(sync, workers: int = 2, batch: int = 16, **options) -> Trainer:
    options = {"engine": Chunked(rungs=[4, 16]), "devices": jax.devices()[:workers], **options}
    return Trainer(loss_fn, options.pop("optimizer", optax.sgd(RATE)), batch_size=batch, sync=sync, **options)


def gradient(at: np.ndarray, rows: dict[str, np.ndarray], index: np.ndarray) -> np.ndarray:
    wide = np.column_stack([rows["x"][index], np.ones(len(index))])
    return wide.T @ (wide @ at - rows["y"][index]) / len(index)


def indices(rows: dict[str, np.ndarray], span, seed: int = 0) -> np.ndarray:
    return Sampler(len(rows["y"]), 1, seed).indices(span.epoch, span.start, span.stop)


def shared_account(log, rows: dict[str, np.ndarray], heavy: float = 0.0) -> np.ndarray:
    """Hogbatch from its log: update v takes the gradient at version v - 1 - staleness and moves version v - 1.

    `heavy`: momentum of the optimizer, which sees gradients scaled by their batch.
    """
    versions, trace = [np.zeros(4)], np.zeros(4)
    for done in log:
        assert done.version == len(versions)
        read = versions[done.version - 1 - done.staleness]
        trace = heavy * trace + done.scale * gradient(read, rows, indices(rows, done.span))
        versions.append(versions[-1] - RATE * trace)
    return versions[-1]


def merged_account(
    log, rows: dict[str, np.ndarray], workers: int, momentum: float, batches, heavy: float = 0.0
) -> np.ndarray:
    """Adaptive SGD from its log: replicas of their own between merges, which the version counts.

    `heavy`: momentum of the optimizer, which sees gradients scaled by their batch.
    """
    now, velocity, trace = np.zeros(4), np.zeros(4), np.zeros(4)
    for merge in range(max(done.version for done in log) + 1):
        replicas, updates = np.tile(now, (workers, 1)), np.zeros(workers, int)
        traces = np.tile(trace, (workers, 1))
        for done in (d for d in log if d.version == merge):
            step = gradient(replicas[done.worker], rows, indices(rows, done.span))
            traces[done.worker] = heavy * traces[done.worker] + done.scale * step
            replicas[done.worker] -= RATE * traces[done.worker]
            updates[done.worker] += 1
        weights = merge_weights(updates, batches(merge))
        velocity, trace = weights @ replicas - now + momentum * velocity, weights @ traces
        now = now + velocity
    return now


class Versions:
    """Stands in for a shared model: only its version matters."""

    core = (None,) * 4

    def __init__(self):
        self.version = 0

    @property
    def snapshot(self):
        return self

    def receive(self, parts):
        return parts

    def apply(self, parts, scale, rate):
        self.version += 1
        return self.version, None


def covered(log, size: int) -> list[int]:
    """Every sample that the updates learned from, as its place since the start of training."""
    return sorted(n for d in log for n in range(d.span.epoch * size + d.span.start, d.span.epoch * size + d.span.stop))
