"""A least-squares problem for asynchronous runs, and what such a run must compute, in plain NumPy from its log."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax

from hetjax import Chunked, Trainer
from hetjax.reduce.layout import Layout, Parts, StepSums
from hetjax.sampling.order import Sampler
from hetjax.sync import AdaptiveHogbatch, AdaptiveSgd, Hogbatch
from hetjax.sync.hogbatch.rules import merge_weights, moved_batches

RATE = 0.1
FAMILY = [Hogbatch, AdaptiveHogbatch, AdaptiveSgd]


def data(samples: int = 96, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(samples, 3))
    return {"x": x, "y": x @ np.array([1.0, -2.0, 0.5]) + 0.3 + 0.1 * rng.normal(size=samples)}


def loss_fn(params, batch, keys):
    return 0.5 * (batch["x"] @ params["w"] + params["b"] - batch["y"]) ** 2


def initial_params() -> dict[str, np.ndarray]:
    return {"w": np.zeros(3), "b": np.zeros(())}


def least_squares(rows: dict[str, np.ndarray]) -> np.ndarray:
    """The solution, w and b in one vector."""
    wide = np.column_stack([rows["x"], np.ones(len(rows["y"]))])
    return np.linalg.lstsq(wide, rows["y"], rcond=None)[0]


def flat(params) -> np.ndarray:
    return np.append(np.asarray(params["w"], np.float64), float(params["b"]))


def trainer_for(sync, workers: int = 2, batch: int = 16, **options) -> Trainer:
    options = {
        "loss": loss_fn,
        "optimizer": optax.sgd(RATE),
        "engine": Chunked(rungs=[4, 16]),
        "devices": jax.devices()[:workers],
        **options,
    }
    return Trainer(options.pop("loss"), options.pop("optimizer"), batch_size=batch, sync=sync, **options)


def gradient(at: np.ndarray, rows: dict[str, np.ndarray], index: np.ndarray) -> np.ndarray:
    wide = np.column_stack([rows["x"][index], np.ones(len(index))])
    return wide.T @ (wide @ at - rows["y"][index]) / len(index)


def indices(rows: dict[str, np.ndarray], span, seed: int = 0) -> np.ndarray:
    return Sampler(len(rows["y"]), 1, seed).indices(span.epoch, span.start, span.stop)


def expected_shared(log, rows: dict[str, np.ndarray], sgd_momentum: float = 0.0) -> np.ndarray:
    """Hogbatch: update v takes the gradient at version v - 1 - staleness and is applied to version v - 1.

    `sgd_momentum`: of the optimizer, which gets gradients scaled by batch size.
    """
    versions, trace = [np.zeros(4)], np.zeros(4)
    for update in log:
        assert update.version == len(versions)
        read = versions[update.version - 1 - update.staleness]
        trace = sgd_momentum * trace + update.scale * gradient(read, rows, indices(rows, update.span))
        versions.append(versions[-1] - RATE * trace)
    return versions[-1]


def expected_merged(
    log, rows: dict[str, np.ndarray], initial_batch_W, bounds, momentum: float, sgd_momentum: float = 0.0
) -> np.ndarray:
    """Adaptive SGD: one replica per worker between merges, which the version counts.

    `momentum`: of the merges; `sgd_momentum`: of the optimizer, which gets gradients scaled by batch size.
    """
    batch_W = np.array(initial_batch_W, float)
    workers = len(batch_W)
    now, velocity, trace = np.zeros(4), np.zeros(4), np.zeros(4)
    for merge in range(max(update.version for update in log) + 1):
        replicas, updates_W = np.tile(now, (workers, 1)), np.zeros(workers, int)
        traces = np.tile(trace, (workers, 1))
        for update in (u for u in log if u.version == merge):
            step = gradient(replicas[update.worker], rows, indices(rows, update.span))
            traces[update.worker] = sgd_momentum * traces[update.worker] + update.scale * step
            replicas[update.worker] -= RATE * traces[update.worker]
            updates_W[update.worker] += 1
        weights = merge_weights(updates_W, batch_W)
        batch_W = moved_batches(batch_W, updates_W, bounds)
        velocity, trace = weights @ replicas - now + momentum * velocity, weights @ traces
        now = now + velocity
    return now


class FakeModel:
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


def packed_sums(layout: Layout, gradient, weight: float = 1.0) -> Parts:
    """A worker's sums with this summed gradient of "w"."""
    one = jnp.ones(())
    sums = StepSums({"w": jnp.asarray(gradient, np.float32)}, (), one, weight * one, one, {})
    return tuple(part[None] for part in layout.pack(sums))


def covered(log, size: int) -> list[int]:
    """Every sample that the updates learned from, numbered from the start of training."""
    return sorted(n for u in log for n in range(u.span.epoch * size + u.span.start, u.span.epoch * size + u.span.stop))
