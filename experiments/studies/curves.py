"""What all reproduced claims train: a small MLP on real or generated data, many seeds at once, and its loss curve."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from studies.claims import Arm
from studies.rcd_sgd import reached

from hetjax.data import load
from hetjax.data.libsvm import libsvm_source

FASHION = Path("/usr/share/datasets/fashion-mnist")
TUNING_SEED = 1000  # seeds of the runs are 0, 1, ...
SLACK = 1.05
EVALUATED = 2048  # training samples of the loss curve
Params = Any


@dataclass(frozen=True)
class Scale:
    """How large a reproduction is."""

    seeds: int = 5
    quick: bool = False

    def epochs(self, full: int) -> int:
        """Epochs of a run that has `full` of them in a full reproduction."""
        return max(2, full // 4) if self.quick else full


@dataclass(frozen=True, eq=False)
class Problem:
    """Training samples on the device, and the layer widths of the MLP."""

    name: str
    x: jax.Array
    y: jax.Array
    widths: tuple[int, ...]

    @property
    def size(self) -> int:
        """Training samples."""
        return len(self.y)

    @property
    def parameters(self) -> list[jax.ShapeDtypeStruct]:
        """Shapes of the parameters."""
        return jax.tree.leaves(jax.eval_shape(lambda: self.init(0)))

    def init(self, seed: int) -> Params:
        """Initial parameters (He normal)."""
        keys = jax.random.split(jax.random.key(seed), len(self.widths) - 1)
        layer = lambda key, a, b: {"w": jax.random.normal(key, (a, b)) * (2 / a) ** 0.5, "b": jnp.zeros(b)}
        return [layer(key, a, b) for key, (a, b) in zip(keys, pairwise(self.widths), strict=True)]

    def init_all(self, seeds: Sequence[int]) -> Params:
        """Initial parameters of several seeds, stacked."""
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *(self.init(seed) for seed in seeds))


def losses(params: Params, x: jax.Array, y: jax.Array) -> jax.Array:
    """Cross-entropy of each row."""
    for layer in params[:-1]:
        x = jax.nn.relu(x @ layer["w"] + layer["b"])
    return optax.softmax_cross_entropy_with_integer_labels(x @ params[-1]["w"] + params[-1]["b"], y)


@jax.jit
def evaluate(params_S: Params, x: jax.Array, y: jax.Array) -> jax.Array:
    """Mean loss of each seed's parameters over the first training samples."""
    return jax.vmap(lambda params: losses(params, x[:EVALUATED], y[:EVALUATED]).mean())(params_S)


def images(samples: int, hidden: tuple[int, ...] = (64,)) -> Problem:
    """Fashion-MNIST (Debian's dataset-fashion-mnist) if it is installed, otherwise scikit-learn's digits."""
    source = load(f"idx:{FASHION}" if FASHION.is_dir() else "digits", "train")
    batch = source[np.arange(min(samples, len(source)))]
    x = np.asarray(batch["image"], np.float32).reshape(len(batch["label"]), -1)
    name = "Fashion-MNIST" if FASHION.is_dir() else "digits"
    return Problem(name, jnp.asarray(x - x.mean()), jnp.asarray(batch["label"]), (x.shape[1], *hidden, 10))


def sparse(kind: str, samples: int, hidden: int, file: Path | None = None) -> Problem:
    """A two-class problem with the shape of w8a or covtype: generated, or from a LIBSVM file.

    w8a has 300 binary features, 4% of them set, and 3% positive samples; covtype 54 features, 10 of them dense and the
    others two one-hot groups, and about as many positive as negative samples.
    """
    if file is not None:
        source = libsvm_source(file)
        batch = source.rows(np.arange(min(samples, len(source))))
        x, y = batch["image"], batch["label"]
        return Problem(file.name, jnp.asarray(x), jnp.asarray(y), (x.shape[1], hidden, 2))
    rng = np.random.default_rng(7)
    if kind == "w8a":
        frequency = 0.25 / np.arange(1, 301) ** 0.5
        x = (rng.random((samples, 300)) < frequency * (0.04 / frequency.mean())).astype(np.float32)
    else:
        groups = [np.eye(size)[rng.integers(size, size=samples)] for size in (4, 40)]
        x = np.hstack([rng.normal(size=(samples, 10)), *groups]).astype(np.float32)
    hidden_truth = np.tanh(x @ rng.normal(size=(x.shape[1], 16)) / 2)
    score = hidden_truth @ rng.normal(size=16) + 0.3 * rng.normal(size=samples)
    y = score > np.quantile(score, 0.97 if kind == "w8a" else 0.51)
    return Problem(f"{kind}-like", jnp.asarray(x), jnp.asarray(y.astype(np.int32)), (x.shape[1], hidden, 2))


@dataclass(frozen=True)
class Curves:
    """Loss of each seed after some numbers of steps."""

    step_E: np.ndarray
    loss_SxE: np.ndarray
    rate: float
    tuning_steps: float = float("nan")  # to the target, on the tuning seed

    def arm(self, seconds_SxT: np.ndarray, target: float, **more: str) -> Arm:
        """The arm whose step k ends at seconds_SxT[:, k - 1]."""
        clock_SxE = np.stack([np.concatenate([[0.0], own_T])[self.step_E] for own_T in seconds_SxT])
        return Arm(self.step_E, clock_SxE, self.loss_SxE, clock_SxE[:, -1], target, self.rate, more)

    @property
    def end(self) -> float:
        """Mean loss at the end."""
        return float(self.loss_SxE[:, -1].mean())


Train = Callable[[Sequence[int], np.ndarray], Curves]  # (seeds, learning rate of each) -> curves


def lowest(loss_RxE: np.ndarray) -> int:
    """The rate with the lowest mean loss in the second half of the run; one that diverged does not count."""
    return int(np.argmin(np.nan_to_num(loss_RxE[:, loss_RxE.shape[1] // 2 :].mean(axis=1), nan=np.inf)))


def target_of(train: Train, rates: Sequence[float]) -> float:
    """The target of a comparison, from the paper's control on the tuning seed, before any other seed is run.

    5% above the loss that its best rate reaches within two thirds of the run, so that other seeds reach it too.
    """
    tried = train([TUNING_SEED] * len(rates), np.asarray(rates)).loss_SxE
    own_E = tried[lowest(tried)]
    return SLACK * float(own_E[: round(2 / 3 * (len(own_E) - 1)) + 1].min())


def tuned(train: Train, rates: Sequence[float], seeds: int, target: float) -> Curves:
    """Train with each rate on the tuning seed, then all seeds with the one that reaches the target in the fewest steps.

    If none does, the one of the lowest loss is taken. The number of rates and seeds should agree, so that one compiled
    program does both.
    """
    tried = train([TUNING_SEED] * len(rates), np.asarray(rates))
    steps_R = np.array([reached(tried.step_E, own_E, target) for own_E in tried.loss_SxE])
    best = int(np.nanargmin(steps_R)) if np.isfinite(steps_R).any() else lowest(tried.loss_SxE)
    found = train(range(seeds), np.full(seeds, rates[best]))
    return Curves(found.step_E, found.loss_SxE, float(rates[best]), float(steps_R[best]))


def spread_rates(middle: float, count: int, factor: float = 2.0) -> list[float]:
    """Learning rates around one, each `factor` times the one before."""
    return [middle * factor ** (k - count // 2) for k in range(count)]


MOMENTUM, DECAY = 0.9, 5e-4


def _sgd_steps(carry: Any, x: jax.Array, y: jax.Array, index_KxB: Any, weight_KxB: Any, rate_K: Any) -> Any:
    """SGD with Nesterov momentum and weight decay; the gradient of a step is sum_b weight_b grad loss_b."""

    def step(carry: Any, given: Any) -> Any:
        (params, velocity), (index_B, weight_B, rate) = carry, given
        grads = jax.grad(lambda p: (weight_B * losses(p, x[index_B], y[index_B])).sum())(params)
        grads = jax.tree.map(lambda g, p: g + DECAY * p, grads, params)
        velocity = jax.tree.map(lambda v, g: MOMENTUM * v + g, velocity, grads)
        params = jax.tree.map(lambda p, g, v: p - rate * (g + MOMENTUM * v), params, grads, velocity)
        return (params, velocity), None

    return jax.lax.scan(step, carry, (index_KxB, weight_KxB, rate_K))[0]


_sgd_chunk = jax.jit(jax.vmap(_sgd_steps, in_axes=(0, None, None, 0, 0, 0)), donate_argnums=0)


def train_sgd(
    problem: Problem, index_of: Callable[[int], np.ndarray], weight_of: Callable[[int], np.ndarray], chunk: int
) -> Train:
    """A `Train` of plain data-parallel SGD with a cosine schedule.

    Args:
        problem: what to train.
        index_of: seed -> the samples [steps, batch].
        weight_of: seed -> weight of each sample in the gradient of its step [steps, batch].
        chunk: steps between two evaluations.
    """

    def train(seeds: Sequence[int], rates: np.ndarray) -> Curves:
        index_SxTxB = np.stack([index_of(seed) for seed in seeds])
        steps = index_SxTxB.shape[1] // chunk * chunk
        weight_SxTxB = np.stack([weight_of(seed) for seed in seeds])
        factor_T = 0.5 * (1 + np.cos(np.pi * np.arange(steps) / steps))
        rate_SxT = (np.asarray(rates)[:, None] * factor_T).astype(np.float32)
        params = problem.init_all(list(seeds))
        carry = params, jax.tree.map(jnp.zeros_like, params)
        found = [np.asarray(evaluate(carry[0], problem.x, problem.y))]
        for start in range(0, steps, chunk):
            part = slice(start, start + chunk)
            given = index_SxTxB[:, part], weight_SxTxB[:, part].astype(np.float32), rate_SxT[:, part]
            carry = _sgd_chunk(carry, problem.x, problem.y, *map(jnp.asarray, given))
            found.append(np.asarray(evaluate(carry[0], problem.x, problem.y)))
        return Curves(np.arange(0, steps + 1, chunk), np.stack(found, axis=1), float(rates[0]))

    return train


def sample_weights(counts_TxW: np.ndarray, weights_TxW: np.ndarray) -> np.ndarray:
    """Weight of each sample in the gradient of its step, from the weights of the plans (`Plan.weights_W`)."""
    rows = zip(weights_TxW / counts_TxW.sum(axis=1, keepdims=True), counts_TxW, strict=True)
    return np.stack([np.repeat(each_W, counts_W) for each_W, counts_W in rows])
