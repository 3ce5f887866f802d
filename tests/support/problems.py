"""Small models with data, and the one-device reference that every split must match."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from hetjax import zoo as models
from hetjax.adapters.contract import Example
from hetjax.adapters.flax_models import from_nnx
from hetjax.planning.controllers.base import Plan
from hetjax.sampling.order import Sampler


@dataclass(frozen=True)
class Problem:
    loss_fn: Callable[..., Any]
    params: Any
    data: dict[str, np.ndarray]


def _image_loss(model, example, rngs):
    score = models.classification(model(example["image"], rngs=rngs), example["label"])
    return Example(score.loss, None, {"accuracy": score.correct})


def _text_loss(model, example, rngs):
    score = models.next_token(model(example["tokens"], rngs=rngs), example["targets"], example["weights"])
    return Example(score.loss, score.weight, {"accuracy": score.correct})


def _linear_loss(params, batch, keys):
    """A linear classifier in plain JAX with noise from the key of each sample: the cheapest to trace and compile."""
    noise_b = 1 + 0.1 * jax.vmap(jax.random.normal)(keys)
    logits = (batch["image"].reshape(len(keys), -1) * noise_b[:, None]) @ params["w"] + params["b"]
    loss_b = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    return Example(loss_b, None, {"accuracy": (logits.argmax(-1) == batch["label"]).astype(loss_b.dtype)})


@functools.cache
def _flax(name: str, seed: int, dtype: Any) -> Any:
    """One function object per model, so that JAX compiles its reference once."""
    rngs = nnx.Rngs(seed)
    if name == "transformer":
        model = models.Transformer(8, 11, width=16, depth=1, heads=2, dropout=0.2, dtype=dtype, rngs=rngs)
        return from_nnx(model, _text_loss)
    options = {"mlp": {"hidden": (24, 16)}, "cnn": {"widths": (4, 6), "hidden": 12}}[name]
    make = {"mlp": models.MLP, "cnn": models.CNN}[name]
    return from_nnx(make((8, 8, 1), 5, dropout=0.2, dtype=dtype, rngs=rngs, **options), _image_loss)


def problem(name: str, samples: int = 64, seed: int = 0, dtype: Any = np.float32) -> Problem:
    """An mlp, cnn or transformer with dropout, or a linear model; the transformer weighs its examples by tokens."""
    rng = np.random.default_rng(seed)
    if name == "linear":
        loss_fn, params = _linear_loss, {"w": 0.1 * rng.normal(size=(64, 5)), "b": np.zeros(5)}
    else:
        loss_fn, params = _flax(name, seed, dtype).loss_fn, _flax(name, seed, dtype).params
    if name == "transformer":
        tokens = rng.integers(0, 11, (samples, 9)).astype(np.int32)
        weights = (rng.random((samples, 8)) < 0.7).astype(dtype)
        data = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "weights": weights}
    else:
        image = rng.normal(size=(samples, 8, 8, 1)).astype(dtype)
        data = {"image": image, "label": rng.integers(0, 5, samples).astype(np.int32)}
    return Problem(loss_fn, jax.tree.map(lambda p: jnp.asarray(p, dtype), params), data)


@functools.cache
def keys_for(seed: int, epoch: int, start: int, stop: int) -> jax.Array:
    """Keys of samples from (seed, epoch, position) alone; an independent implementation on purpose."""
    base = jax.random.fold_in(jax.random.key(seed), epoch)
    return jax.vmap(lambda position: jax.random.fold_in(base, position))(jnp.arange(start, stop))


@functools.partial(jax.jit, static_argnums=0)
def _weighted_mean(loss_fn, params, batch, keys, chosen_b):
    def mean(params):
        example = loss_fn(params, batch, keys)
        weight_b = jnp.ones_like(example.loss_b) if example.weight_b is None else example.weight_b
        return (chosen_b * example.loss_b).sum() / (chosen_b * weight_b).sum()

    return jax.value_and_grad(mean)(params)


def part_of_data(problem: Problem, seed: int, start: int, stop: int) -> tuple[float, Any]:
    """Mean loss over rows start .. stop-1 at the initial parameters, and its gradient, on one device."""
    rows = len(next(iter(problem.data.values())))
    chosen_b = (np.arange(rows) >= start) & (np.arange(rows) < stop)
    return _weighted_mean(
        problem.loss_fn, problem.params, problem.data, keys_for(seed, 0, 0, rows), chosen_b.astype(np.float32)
    )


def reference_run(
    problem: Problem, optimizer: optax.GradientTransformation, batch_size: int, steps: int, seed: int = 0
):
    """Plain training on one device, the whole batch at once, in the sampler's order."""
    sampler = Sampler(len(next(iter(problem.data.values()))), batch_size, seed)
    params, opt_state, cursor, losses = problem.params, optimizer.init(problem.params), 0, []
    for _ in range(steps):
        step = sampler.step(cursor)
        index = sampler.indices(step.epoch, step.start, step.stop)
        batch = {name: values[index] for name, values in problem.data.items()}
        keys = keys_for(seed, step.epoch, step.start, step.stop)
        loss, grads = _weighted_mean(problem.loss_fn, params, batch, keys, np.ones(step.batch, np.float32))
        updates, opt_state = optimizer.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        losses.append(float(loss))
        cursor += step.batch
    return params, losses


class RandomPlans:
    """A controller that splits every step at random, zeros included."""

    name = "random"

    def __init__(self, seed: int):
        self.rng = np.random.default_rng(seed)

    def plan(self, batch, limits, epoch=0):
        counts, quantum = np.zeros(limits.workers, np.int64), limits.quantum
        idle = self.rng.random(limits.workers) < 0.3
        for _ in range(batch // quantum):
            free = np.flatnonzero((counts + quantum <= limits.capacity_W) & ~idle)
            free = free if len(free) else np.flatnonzero(counts + quantum <= limits.capacity_W)
            counts[self.rng.choice(free)] += quantum
        if batch % quantum:
            last = np.flatnonzero(counts)[-1] if counts.any() else 0
            counts[last:] = np.where(np.arange(last, limits.workers) == last, counts[last] + batch % quantum, 0)
        return Plan(counts)

    def observe(self, seen):
        pass


def distance(a: Any, b: Any) -> float:
    """Norm of the difference of two trees over the norm of the second."""
    flat = lambda tree: np.concatenate([np.ravel(np.asarray(x, np.float64)) for x in jax.tree.leaves(tree)])
    return float(np.linalg.norm(flat(a) - flat(b)) / np.linalg.norm(flat(b)))
