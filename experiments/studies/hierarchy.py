"""Claim 003 (DASO): seldom, late averages of parameters between nodes against all-reduce, with 32 and 16 bits.

Schedule, means, 16-bit exchanges and blending are the package's (`hetjax.sync.daso`). A node has two workers that sum
their gradients in every step. A step takes

    max over workers of (startup + rows x row_time / speed), and what a node waits for bytes / link
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from studies.balancing import index_for
from studies.claims import Comparison
from studies.curves import MOMENTUM, Curves, Problem, Scale, evaluate, images, losses, spread_rates, target_of, tuned

from hetjax.sync.daso.averaging import TAKE_MEAN, blend_weights, bytes_sent, receives_before_sending
from hetjax.sync.daso.schedule import DasoSchedule

NODES, WORKERS, BATCH = 4, 2, 256
STARTUP, ROW_TIME = 2e-3, 5e-4  # seconds
LINKS = (1.0, 0.5, 0.1)  # duration of an all-reduce of 32 bits, in steps of computation


@dataclass(frozen=True)
class Method:
    """How nodes agree."""

    blend: str = "delta"
    wire: str = "bfloat16"
    faithful: bool = False
    overlap: bool = True
    only_blocking: bool = False  # all-reduce
    gradient_wire: str = "full"

    @property
    def gradient_kind(self) -> str:
        return "compressed-total" if self.gradient_wire == "bfloat16" else "total"


METHODS = {
    "all-reduce, 32 bits": Method(only_blocking=True),
    "DASO as published": Method("paper", faithful=True),
    "DASO, ours": Method(),
    "all-reduce, 16 bits": Method(only_blocking=True, gradient_wire="bfloat16"),
    "local SGD, 32 bits": Method(wire="full", overlap=False),
    "local SGD, 16 bits": Method(overlap=False),
}


class Clock:
    """Virtual seconds of one seed: local steps, and exchanges that occupy the link."""

    def __init__(self, method: Method, problem: Problem, exchange: float):
        """exchange: seconds of a 32-bit all-reduce."""
        step = STARTUP + BATCH / NODES / WORKERS * ROW_TIME
        leaves = problem.parameters
        full = bytes_sent("total", leaves, NODES)
        # The vector of a step: large gradients, then the small ones with loss and counts, which stay exact.
        large = [leaf for leaf in leaves if leaf.ndim > 1]
        rest = jax.ShapeDtypeStruct((sum(leaf.size for leaf in leaves if leaf.ndim == 1),), jnp.float32)
        seconds = lambda kind, sent: exchange * step * bytes_sent(kind, sent, NODES) / full
        self.step, self.now, self.arrives, self.ends = step, 0.0, 0.0, []
        self.of_gradients = seconds(method.gradient_kind, [*large, rest])
        self.of_parameters = {True: seconds("compressed", leaves), False: seconds("mean", leaves)}

    def tick(self, actions: Any, compressed: bool) -> None:
        """One step: compute, then what its actions wait for. Exchanges of a node run one after the other."""
        self.now += self.step
        if actions.sum_gradients:
            self.now += self.of_gradients
        if actions.receive:
            self.now = max(self.now, self.arrives)
        if actions.send:
            self.arrives = max(self.now, self.arrives) + self.of_parameters[compressed]
        if actions.block:
            self.now = self.arrives
        self.ends.append(self.now)


@dataclass
class Steps:
    """What one epoch does in each step, as numbers for the compiled program."""

    sum_gradients: list[bool]
    send: list[bool]
    receive: list[bool]
    block: list[bool]
    compressed: list[bool]
    weights: list[tuple[float, float, float]]


def epoch_steps(schedule: DasoSchedule, method: Method, count: int, clocks: Sequence[Clock]) -> Steps:
    """Ask the schedule for every step of an epoch, and charge them."""
    steps = Steps([], [], [], [], [], [])
    for b in range(count):
        compressed = method.wire == "bfloat16" and schedule.compresses(last=b == count - 1)
        actions = schedule.step(left=count - 1 - b)
        for clock in clocks:
            clock.tick(actions, compressed)
        for name in ("sum_gradients", "send", "block"):
            getattr(steps, name).append(getattr(actions, name))
        steps.receive.append(actions.receive > 0)
        steps.compressed.append(compressed)
        steps.weights.append(tuple(blend_weights(method.blend, actions.receive, NODES)))
    return steps


def _mean_over_nodes(leaves_P: list[jax.Array], base: list[jax.Array], compressed: jax.Array) -> list[jax.Array]:
    """The mean of the nodes' leaves, in 16 bits where asked for: `averaging.combine` of nodes of equal weight."""
    small = [y + in_16_bits(in_16_bits(x - y).mean(0)) for x, y in zip(leaves_P, base, strict=True)]
    return [jnp.where(compressed, b, x.mean(0)) for x, b in zip(leaves_P, small, strict=True)]


def in_16_bits(x: jax.Array) -> jax.Array:
    """Rounded to bfloat16, as on the wire."""
    return x.astype(jnp.bfloat16).astype(x.dtype)


def _epoch(method: Method, carry: Any, x: jax.Array, y: jax.Array, given: Any) -> Any:
    """The steps of an epoch of one seed; also its mean loss.

    carry: parameters and velocities of the nodes, the pending mean and what each sent, and the last common mean.
    """
    first = receives_before_sending(method.blend)

    def gradient(params: Any, index_B: jax.Array) -> Any:
        return jax.value_and_grad(lambda p: losses(p, x[index_B], y[index_B]).mean())(params)

    def step(carry: Any, given: Any) -> Any:
        params_P, velocity_P, pending, sent_P, base = carry
        index_PxB, sums, send, receive, block, compressed, (keep, take, back), rate = given
        loss_P, grads_P = jax.vmap(gradient)(params_P, index_PxB)
        leaves, tree = jax.tree.flatten(grads_P)
        if method.gradient_wire == "bfloat16":
            summed = [in_16_bits(in_16_bits(g).sum(0)) for g in leaves]
            whole = [jnp.broadcast_to(total / NODES, g.shape) for total, g in zip(summed, leaves, strict=True)]
        else:
            whole = [jnp.broadcast_to(g.mean(0), g.shape) for g in leaves]
        grads_P = jax.tree.unflatten(tree, [jnp.where(sums, a, g) for a, g in zip(whole, leaves, strict=True)])
        velocity_P = jax.tree.map(lambda v, g: MOMENTUM * v + g, velocity_P, grads_P)
        params_P = jax.tree.map(lambda p, v: p - rate * v, params_P, velocity_P)
        now, tree = jax.tree.flatten(params_P)
        blended = lambda now: [
            jnp.where(receive, keep * p + take * m - back * s, p) for p, m, s in zip(now, pending, sent_P, strict=True)
        ]
        if first:
            now = blended(now)
        base = [jnp.where(receive, m, b) for m, b in zip(pending, base, strict=True)]
        fresh = _mean_over_nodes(now, base, compressed)
        sent_P = [jnp.where(send, p, s) for p, s in zip(now, sent_P, strict=True)]
        if not first:
            now = blended(now)
        pending = [jnp.where(send, m, old) for m, old in zip(fresh, pending, strict=True)]
        keep, take, _ = TAKE_MEAN
        now = [jnp.where(block, keep * p + take * m, p) for p, m in zip(now, pending, strict=True)]
        base = [jnp.where(block | sums, p[0], b) for p, b in zip(now, base, strict=True)]
        return (jax.tree.unflatten(tree, now), velocity_P, pending, sent_P, base), loss_P.mean()

    return jax.lax.scan(step, carry, given)


def train_nodes(problem: Problem, method: Method, epochs: int, clocks_of: dict[int, list[Clock]]) -> Any:
    """A `Train` of a method; the first call with a seed that has clocks charges them."""
    index_of, count = index_for(problem, BATCH, epochs), problem.size // BATCH
    run = jax.jit(jax.vmap(partial(_epoch, method), in_axes=(0, None, None, 0)))
    options = {"faithful": method.faithful, "overlap": method.overlap, "total": epochs}
    phases = {"warm_up": epochs, "cool_down": 0} if method.only_blocking else {}
    phases = phases or {"warm_up": min(4, epochs // 5), "cool_down": min(4, epochs // 5)}

    def train(seeds: Sequence[int], rates: np.ndarray) -> Curves:
        schedules = [DasoSchedule(**options, **phases) for _ in seeds]
        params = problem.init_all(list(seeds))
        nodes = jax.tree.map(lambda p: jnp.repeat(p[:, None], NODES, axis=1), params)
        stacked, common = jax.tree.leaves(nodes), jax.tree.leaves(params)
        carry = nodes, jax.tree.map(jnp.zeros_like, nodes), common, stacked, common
        index = np.stack([index_of(seed) for seed in seeds]).reshape(len(seeds), epochs, count, NODES, BATCH // NODES)
        found = [np.asarray(evaluate(params, problem.x, problem.y))]
        for epoch in range(epochs):
            clocks = [clocks_of.get(seed, []) for seed in seeds]
            steps = [epoch_steps(s, method, count, own) for s, own in zip(schedules, clocks, strict=True)]
            flags = [
                jnp.asarray(np.array([getattr(one, name) for one in steps]))
                for name in ("sum_gradients", "send", "receive", "block", "compressed")
            ]
            weights = jnp.asarray(np.array([one.weights for one in steps], np.float32))
            weights_3 = tuple(weights[..., k] for k in range(3))
            rate = 0.5 * (1 + np.cos(np.pi * epoch / epochs)) * np.asarray(rates)
            rate_SxK = jnp.asarray(np.repeat(rate[:, None], count, axis=1), jnp.float32)
            given = jnp.asarray(index[:, epoch]), *flags, weights_3, rate_SxK
            carry, loss_SxK = run(carry, problem.x, problem.y, given)
            for schedule, own in zip(schedules, np.asarray(loss_SxK).mean(axis=1), strict=True):
                schedule.end_epoch(float(own))
            if not method.faithful and schedules[0].skip == 0:  # entering a blocking phase averages optimizer state
                same = jax.tree.map(lambda v: jnp.broadcast_to(v.mean(1, keepdims=True), v.shape), carry[1])
                carry = (carry[0], same, *carry[2:])
            answer = jax.tree.map(lambda p: p.mean(axis=1), carry[0])
            found.append(np.asarray(evaluate(answer, problem.x, problem.y)))
        return Curves(np.arange(0, epochs * count + 1, count), np.stack(found, axis=1), float(rates[0]))

    return train


def daso(scale: Scale, log: Callable[[str], None]) -> list[Comparison]:
    """003: DASO as published and ours against all-reduce and local SGD, at three ratios of exchange to compute."""
    problem, epochs = images(4_096 if scale.quick else 12_288), scale.epochs(24)
    rates, curves, clocks, target = spread_rates(0.2, scale.seeds), {}, {}, None
    for name, method in METHODS.items():
        # The schedule follows the training, and the training does not depend on the link: every seed has three clocks.
        clocks_of = {s: [Clock(method, problem, part) for part in LINKS] for s in range(scale.seeds)}
        train = train_nodes(problem, method, epochs, clocks_of)
        if target is None:  # the first method is the paper's control
            target = target_of(train, rates)
        curves[name], clocks[name] = tuned(train, rates, scale.seeds, target), clocks_of
        log(f"003 {name}: rate {curves[name].rate:g}, loss {curves[name].end:.3f}")
    assert target is not None
    found = []
    for k, part in enumerate(LINKS):
        setting = f"all-reduce takes {part:g} of a step"
        ends = {name: np.array([own[k].ends for own in by_seed.values()]) for name, by_seed in clocks.items()}
        arms = {name: own.arm(ends[name], target) for name, own in curves.items()}
        found.append(
            Comparison(
                "003", setting, "-25% to -34%", "DASO as published", "all-reduce, 32 bits",
                ("all-reduce, 16 bits", "local SGD, 32 bits", "local SGD, 16 bits"), arms,
            )
        )  # fmt: skip
    return found
