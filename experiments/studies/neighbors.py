"""Claim 002 (RCD-SGD): decentralized SGD on blocks, in stages, each with random blocks as the control.

A worker's parameters x_i follow x <- M_k x - rate A_k g(x) with the package's mixing (`hetjax.sync.topology`) in M and
its weights of gradients in A. A step takes

    max over workers of rows x row_time / speed + messages x bytes / link
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
from studies.claims import Arm, Comparison
from studies.curves import (
    TUNING_SEED,
    Curves,
    Problem,
    Scale,
    Train,
    evaluate,
    images,
    losses,
    spread_rates,
    target_of,
    tuned,
)

from hetjax.data.source_blocks import make_blocks
from hetjax.sampling.shards import BlockSampler
from hetjax.sync.topology import Mixing, matcha, ring

SPEED_W = np.array([1.0, 0.5, 0.25, 0.25])
BATCH, ROW_TIME, LINK = 256, 3e-4, 100e6  # samples of a step, seconds at speed 1, bits per second
BUDGET = 0.5  # of MATCHA


@dataclass(frozen=True)
class Stage:
    """Blocks, and how workers mix."""

    blocks: str  # random, facility-location or graph-cut
    even: bool = False  # blocks of equal size instead of by rate
    every: int = 1  # F; 0: all-reduce
    matcha: bool = False
    faithful: bool = True  # plain means and equal weights, as published


DPSGD = {
    "even random blocks, F=1": Stage("random", even=True),
    "even facility-location, F=1": Stage("facility-location", even=True),
    "random blocks by rate, F=1": Stage("random"),
    "facility-location, F=1": Stage("facility-location"),
    "random blocks by rate, F=2": Stage("random", every=2),
    "facility-location, F=2": Stage("facility-location", every=2),
    "graph-cut, F=2": Stage("graph-cut", every=2),
    "random by rate, F=2, weights b/B": Stage("random", every=2, faithful=False),
    "random by rate, all-reduce": Stage("random", every=0),
}
MATCHA = {name: replace(stage, matcha=stage.every > 0) for name, stage in DPSGD.items() if stage.faithful}


def matrix_of(mixing: Mixing, share_W: np.ndarray, active_R: np.ndarray) -> np.ndarray:
    """The W' of these rounds with stationary weights share_W."""
    matrix, weight_RxW = np.eye(mixing.workers), mixing.weighted(share_W)
    for r in np.flatnonzero(active_R):
        for sender, receiver in mixing.rounds[r]:
            matrix[receiver, sender] += weight_RxW[r, receiver]
            matrix[receiver, receiver] -= weight_RxW[r, receiver]
    return matrix


@cache
def submodular_owner(problem: Problem, objective: str, even: bool) -> np.ndarray:
    """The worker of every sample; by the published selection rule."""
    rows = {"image": np.asarray(problem.x), "label": np.asarray(problem.y)}
    rates = np.ones(4) if even else SPEED_W
    return make_blocks(rows, rates, "submodular", objective=objective, rule="min-block").owner_D


def owner_of(problem: Problem, stage: Stage, seed: int) -> np.ndarray:
    """The worker of every sample in a stage."""
    if stage.blocks != "random":
        return submodular_owner(problem, stage.blocks, stage.even)
    rows = {"image": np.asarray(problem.y)[:, None], "label": np.asarray(problem.y)}  # random blocks need no features
    return make_blocks(rows, np.ones(4) if stage.even else SPEED_W, "random", seed=seed).owner_D


@dataclass(frozen=True)
class Schedule:
    """All steps of one seed."""

    index_TxWxR: np.ndarray
    weight_TxWxR: np.ndarray  # 1 / count, 0 for padding
    mix_TxWxW: np.ndarray  # M
    gradient_TxWxW: np.ndarray  # A
    answer_W: np.ndarray
    seconds_T: np.ndarray


def schedule_of(problem: Problem, stage: Stage, seed: int, steps: int, rows: int) -> Schedule:
    """The steps of a stage; `rows`: the most that a worker gets."""
    owner_D, workers = owner_of(problem, stage, seed), len(SPEED_W)
    sampler = BlockSampler([np.flatnonzero(owner_D == i) for i in range(workers)], BATCH, seed)
    mixing = matcha(ring(workers), BUDGET) if stage.matcha else Mixing.of(ring(workers))
    size = 32 * sum(leaf.size for leaf in problem.parameters)
    index, weight = np.zeros((steps, workers, rows), np.int32), np.zeros((steps, workers, rows), np.float32)
    mix, gradient = np.tile(np.eye(workers), (2, steps, 1, 1))
    seconds_T, cursor = np.zeros(steps), 0
    equal_W = answer_W = np.full(workers, 1 / workers)
    for k in range(steps):
        span, plan = sampler.next(cursor, lambda batch, epoch: None)
        cursor += span.batch
        samples, counts_W = sampler.indices(span.epoch, span.start, span.stop), plan.counts_W
        for i, own in enumerate(np.split(samples, np.cumsum(counts_W)[:-1])):
            index[k, i, : len(own)], weight[k, i, : len(own)] = own, 1 / max(len(own), 1)
        answer_W = equal_W if stage.faithful else mixing.shares(counts_W)
        messages = 0.0
        if stage.every == 0:
            gradient[k] = counts_W / counts_W.sum()
            answer_W, messages = equal_W, 2 * (workers - 1) / workers
        else:
            if k % stage.every == 0:
                active_R = mixing.active(seed, k)
                mix[k] = matrix_of(mixing, answer_W, active_R)
                messages = float(active_R.sum())
            gradient[k] = np.diag(np.ones(workers) if stage.faithful else counts_W / counts_W.sum() / answer_W)
        seconds_T[k] = np.max(counts_W * ROW_TIME / SPEED_W) + messages * size / LINK
    return Schedule(index, weight, mix.astype(np.float32), gradient.astype(np.float32), answer_W, seconds_T)


def _steps(params_W: object, x: jax.Array, y: jax.Array, steps: tuple[jax.Array, ...]) -> object:
    """Some steps of one seed, whose workers' parameters are stacked."""

    def own_gradient(params: object, index_R: jax.Array, weight_R: jax.Array) -> object:
        return jax.grad(lambda p: (weight_R * losses(p, x[index_R], y[index_R])).sum())(params)

    def step(params_W: object, given: tuple[jax.Array, ...]) -> tuple[object, None]:
        index_WxR, weight_WxR, mix_WxW, gradient_WxW, rate = given
        grads_W = jax.vmap(own_gradient)(params_W, index_WxR, weight_WxR)
        moved = lambda p, g: jnp.tensordot(mix_WxW, p, 1) - rate * jnp.tensordot(gradient_WxW, g, 1)
        return jax.tree.map(moved, params_W, grads_W), None

    return jax.lax.scan(step, params_W, steps)[0]


_chunk = jax.jit(jax.vmap(_steps, in_axes=(0, None, None, 0)), donate_argnums=0)


def train_blocks(problem: Problem, schedules: dict[int, Schedule], chunk: int) -> Train:
    """A `Train` on these schedules, by seed; the rate falls by 10 after a half and after three quarters."""

    def train(seeds: Sequence[int], rates: np.ndarray) -> Curves:
        own = [schedules[seed] for seed in seeds]
        steps = len(own[0].seconds_T) // chunk * chunk
        part_T = np.arange(steps) / steps
        rate_SxT = np.asarray(rates)[:, None] * np.where(part_T < 0.5, 1.0, np.where(part_T < 0.75, 0.1, 0.01))
        params = jax.tree.map(
            lambda p: jnp.repeat(p[:, None], len(SPEED_W), axis=1), problem.init_all(list(seeds))
        )  # [S, W, ...]
        answer_SxW = jnp.asarray(np.stack([one.answer_W for one in own]), jnp.float32)
        answer = lambda p: jnp.einsum("sw,sw...->s...", answer_SxW, p)
        found = [np.asarray(evaluate(jax.tree.map(answer, params), problem.x, problem.y))]
        fields = ("index_TxWxR", "weight_TxWxR", "mix_TxWxW", "gradient_TxWxW")
        for start in range(0, steps, chunk):
            cut = slice(start, start + chunk)
            given = [jnp.asarray(np.stack([getattr(one, name)[cut] for one in own])) for name in fields]
            params = _chunk(params, problem.x, problem.y, (*given, jnp.asarray(rate_SxT[:, cut], jnp.float32)))
            found.append(np.asarray(evaluate(jax.tree.map(answer, params), problem.x, problem.y)))
        return Curves(np.arange(0, steps + 1, chunk), np.stack(found, axis=1), float(rates[0]))

    return train


def rcd_sgd(scale: Scale, log: Callable[[str], None]) -> list[Comparison]:
    """002: from even blocks to submodular ones by rate at F = 2, for D-PSGD and MATCHA."""
    problem = images(2_048 if scale.quick else 12_288)
    steps, found = problem.size // BATCH * scale.epochs(16), []
    chunk, rows = max(problem.size // BATCH // 4, 1), int(np.ceil(BATCH * SPEED_W.max() / SPEED_W.sum())) + 1
    rates = spread_rates(0.4, scale.seeds)
    settings = (
        ("D-PSGD", DPSGD, {"facility-location, F=2": "-32%", "graph-cut, F=2": "-26%"}),
        ("MATCHA", MATCHA, {"facility-location, F=2": "-16%", "graph-cut, F=2": "-12%"}),
    )
    for setting, stages, reported_of in settings:
        curves, seconds, target = {}, {}, None
        for name, stage in stages.items():
            seeds = [*range(scale.seeds), TUNING_SEED]
            schedules = {seed: schedule_of(problem, stage, seed, steps, rows) for seed in seeds}
            train = train_blocks(problem, schedules, chunk)
            if target is None:  # the first stage is the paper's control
                target = target_of(train, rates)
            curves[name] = tuned(train, rates, scale.seeds, target)
            seconds[name] = np.stack([np.cumsum(schedules[seed].seconds_T) for seed in range(scale.seeds)])
            log(f"002 {setting}, {name}: rate {curves[name].rate:g}, loss {curves[name].end:.3f}")
        assert target is not None
        arms: dict[str, Arm] = {name: own.arm(seconds[name], target) for name, own in curves.items()}
        omitted = ("random blocks by rate, F=2", "random by rate, all-reduce")
        for method, reported in reported_of.items():
            found.append(Comparison("002", setting, reported, method, "even random blocks, F=1", omitted, arms))
    return found
