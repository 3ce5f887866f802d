"""Decentralized SGD: every worker has parameters of its own and mixes them with its neighbors'.

    g = grad F_i(x_i);   y = sum_j W_ij x_j  if k % F == 0 else x_i;   x_i <- y + update(g);   answer: mean of the x_i

D-PSGD (Lian et al., arXiv 1705.09056) with mixing every F steps, as RCD-SGD trains (arXiv 2211.00839); with a budget
MATCHA (arXiv 1905.09435) draws which links are used. Parameters move between neighbors only. Two small sums over all
workers stay in every step: loss, metrics and timings, which the plans need, and whether all updates were finite.

Under a doubly stochastic W the mean of the x_i follows the plain mean of what the workers add, so a worker's share of
the batch has to be in its gradient: its mean gradient is taken N b_i / B times. `faithful` keeps the plain means of the
published method, which is biased where batches are unequal. The price: the rate has to suit the worker with the largest
batch, whose steps are N b_i / B times as long.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from hetjax.arguments import whole
from hetjax.devices.compile import compile_over, expected
from hetjax.devices.workers import AXIS
from hetjax.fleet.agree import gather
from hetjax.fleet.membership import kept_entries
from hetjax.reduce.base import Reduce, Replicas
from hetjax.reduce.layout import HOST_SLOTS, Parts, StepReport, StepSums, level_of_all, with_bad_update
from hetjax.reduce.transports import sum_parts
from hetjax.reduce.update import State, Update
from hetjax.sampling.order import PlannedStep
from hetjax.sync.base import Sync, SyncContext
from hetjax.sync.replicas import average, spread
from hetjax.sync.topology import Mixing, matcha, topology

log = logging.getLogger("hetjax")
Tree = Any
_LARGE = 2**14  # elements: smaller arrays travel together


class Decentralized(Sync):
    """topology: 'ring', 'complete', a .json or .npy file with W, or W itself; mix_every: F; matcha_budget: None for W
    as it is, or the share of its links to use on average; faithful: gradients as published."""

    name = "decentralized"
    own_parameters = True

    def __init__(
        self,
        topology: str | Path | np.ndarray = "ring",
        mix_every: int = 1,
        matcha_budget: float | None = None,
        faithful: bool = False,
    ):
        if matcha_budget is not None and not 0 < matcha_budget <= 1:
            raise ValueError(
                f"matcha_budget is {matcha_budget}: expected the share of links to use on average, above 0, at most 1."
            )
        self.topology, self.mix_every = topology, whole("mix_every", mix_every, 1)
        self.matcha_budget, self.faithful = matcha_budget, faithful

    def mixing(self, workers: int) -> Mixing:
        """What a mixing step of so many workers does; the same in every process, whatever its CPU's last bits."""
        matrix, name = topology(self.topology, workers, kept_entries)
        if self.matcha_budget is None:
            return Mixing.of(matrix, name)
        made = matcha(matrix, self.matcha_budget, name)
        assert made.chance_R is not None
        weight_RxW, chance_R = gather([made.weight_RxW.tolist(), made.chance_R.tolist()])[0]
        return replace(made, weight_RxW=np.array(weight_RxW).reshape(-1, workers), chance_R=np.array(chance_R))

    def open(self, setting: SyncContext, state: State) -> tuple[Reduce, Any]:
        kinds = setting.workers.kinds
        if len(kinds) > 1 or setting.transport == "hub":
            raise ValueError(
                "Decentralized workers exchange parameters in one program over all of them, which needs devices of one "
                f"kind and transport 'psum' or 'auto'; here they are {', '.join(kinds)} with transport "
                f"{setting.transport!r}. Use sync='allreduce'."
            )
        mixing = self.mixing(len(setting.workers))
        log.info(
            "Decentralized: %s over %d workers, mixing every %d steps in %s.",
            mixing.name, mixing.workers, self.mix_every,
            "one sum" if mixing.everybody else f"{len(mixing.rounds)} exchanges between neighbors",
        )  # fmt: skip
        core = spread(state, setting.workers)
        return Neighbors(setting, core, mixing, self.mix_every, self.faithful), core

    def answer(self, state: State) -> State:
        return average(state)


class Neighbors:
    """The reduce of decentralized SGD: two programs, with and without mixing, compiled before the first step."""

    name = "neighbors"

    def __init__(self, setting: SyncContext, core: Tree, mixing: Mixing, every: int, faithful: bool):
        self.workers, self.layout, self.seed = setting.workers, setting.layout, setting.seed
        self.mixing, self.every, self.faithful = mixing, every, faithful
        self.finish, self.update = setting.rule.finish(), Update(self._moved, setting.rule.undo)
        always = every == 1 and mixing.chance_R is None
        self.mix = self._compile(core, mixes=True)
        self.stay = self.mix if always else self._compile(core, mixes=False)

    def _compile(self, core: Tree, mixes: bool) -> Any:
        program = jax.shard_map(
            partial(self._on_worker, mixes),
            mesh=self.workers.mesh,
            in_specs=(P(AXIS), P(AXIS), P(AXIS)),
            out_specs=(P(AXIS), P()),
            check_vma=False,
        )
        wide = lambda size, dtype: jax.ShapeDtypeStruct((len(self.workers), size), dtype, sharding=self.workers.sharded)
        parts = tuple(wide(size, self.layout.dtype) for size in self.layout.sizes)
        said = wide(HOST_SLOTS + 1 + len(self.mixing.rounds), np.float32)
        with expected():
            return compile_over(program, (core, parts, said), self.workers.devices, donate=self.update.donate)

    # -- on a worker --

    def _on_worker(self, mixes: bool, core_1: Tree, parts_1: Parts, said_1xS: jax.Array) -> tuple[Tree, jax.Array]:
        core, parts, said = jax.tree.map(lambda x: x[0], (core_1, parts_1, said_1xS))
        slots, weight, active_R = said[:HOST_SLOTS], said[HOST_SLOTS], said[HOST_SLOTS + 1 :]
        layout, count = self.layout, len(self.workers)
        sent = layout.outgoing(parts, slots, jax.lax.axis_index(AXIS), count)
        (tail,) = sum_parts((layout.tail(sent),), self.workers)
        params = self._mixed(core[0], active_R) if mixes else core[0]
        total = tail[1]  # the weight of all samples, behind the loss
        moved, bad_W = self.update(
            core,
            (params, layout.unpack(parts), weight.astype(layout.dtype), total, tail[0] / total),
            total,
            level_of_all(tail, count),
            share=self._told,
        )
        return jax.tree.map(lambda x: x[None], moved), with_bad_update(tail, count, bad_W)

    def _told(self, bad: jax.Array) -> jax.Array:
        """Whether each worker's update was bad: all have to know, for nobody moves then."""
        own_W = jnp.zeros(len(self.workers), self.layout.dtype).at[jax.lax.axis_index(AXIS)].set(bad)
        return sum_parts((own_W,), self.workers)[0] > 0

    def _moved(self, core: Tree, given: tuple[Tree, StepSums, jax.Array, jax.Array, jax.Array]) -> Tree:
        """One worker's update from its own sums. Without samples its gradient is zero: momentum and schedule go on.

        An optimizer that takes the loss is given the mean over all workers, `loss`.
        """
        params, own, weight, total, loss = given
        some = own.weight > 0
        factor = weight if self.faithful else weight * len(self.workers)
        over = jnp.where(some, own.weight, 1) if self.faithful else total
        sums = replace(own, grads=jax.tree.map(lambda g: g * factor, own.grads), weight=over, loss=loss * over)
        params, model_state, opt_state, ema = self.finish((params, *core[1:]), sums)
        return params, jax.tree.map(partial(jnp.where, some), model_state, core[1]), opt_state, ema

    def _mixed(self, params: Tree, active_R: jax.Array) -> Tree:
        """y = W x, by one sum if W is 1/N throughout, else by one exchange per round."""
        widened = lambda x: x.astype(jnp.promote_types(x.dtype, jnp.float32))
        if self.mixing.everybody:
            total = jax.lax.psum(jax.tree.map(widened, params), AXIS)
            return jax.tree.map(lambda y, x: (y / len(self.workers)).astype(x.dtype), total, params)
        bundles, undo = _bundled(params)
        mixed = wide = [widened(x) for x in bundles]
        me = jax.lax.axis_index(AXIS)
        for r, pairs in enumerate(self.mixing.rounds):

            def exchanged(mixed: list[jax.Array], r: int = r, pairs: Any = pairs) -> list[jax.Array]:
                share = jnp.asarray(self.mixing.weight_RxW[r])[me]
                came = [jax.lax.ppermute(x, AXIS, pairs) for x in bundles]
                return [y + share.astype(y.dtype) * (c - x) for y, c, x in zip(mixed, came, wide, strict=True)]

            if self.mixing.chance_R is None:
                mixed = exchanged(mixed)
            else:  # the same draw on all workers, so that they meet or none of them does
                mixed = jax.lax.cond(active_R[r] > 0, exchanged, lambda mixed: mixed, mixed)
        return undo([y.astype(x.dtype) for y, x in zip(mixed, bundles, strict=True)])

    # -- on the host --

    def __call__(
        self, core: Tree, parts_w: Sequence[Parts], slots_w: Sequence[list[float]], step: PlannedStep
    ) -> tuple[Tree, jax.Array]:
        parts = tuple(self.workers.stack(part) for part in zip(*parts_w, strict=True))
        due = step.number % self.every == 0  # the recursion's k
        active_R = self.mixing.active(self.seed, step.number) & due
        weights_W = step.plan.weights_W
        weight_w = [1.0 if weights_W is None else float(weights_W[i]) for i in self.workers.local]
        said = [np.array([*own, weight, *active_R], np.float32) for own, weight in zip(slots_w, weight_w, strict=True)]
        run = self.mix if due and (self.mixing.everybody or active_R.any()) else self.stay
        return run(core, parts, self.workers.from_host(said))

    def read(self, tail: jax.Array) -> StepReport:
        return StepReport.read(self.layout, np.asarray(tail.addressable_data(0)), len(self.workers))

    def replicas(self, core: Tree, tail: jax.Array | None) -> Replicas:
        ready = jax.tree.leaves(core)[0] if tail is None else tail
        return Replicas(self.workers.copies(jax.tree.leaves(core[:2])), self.workers.pieces(ready), lambda: core[:2])

    def state(self, core: Tree, step: int, cursor: int) -> State:
        return replace(State.of(core, step, cursor), replicas=len(self.workers))


def _bundled(tree: Tree) -> tuple[list[jax.Array], Callable[[list[jax.Array]], Tree]]:
    """A few flat arrays to send instead of many: large ones alone, the small ones of a type together; and the way
    back."""
    leaves, structure = jax.tree.flatten(tree)
    groups: dict[Any, list[int]] = {}
    for place, leaf in enumerate(leaves):
        groups.setdefault(place if leaf.size >= _LARGE else leaf.dtype, []).append(place)
    bundles = [jnp.concatenate([jnp.ravel(leaves[place]) for place in places]) for places in groups.values()]

    def undo(bundles: list[jax.Array]) -> Tree:
        found: list[Any] = [None] * len(leaves)
        for bundle, places in zip(bundles, groups.values(), strict=True):
            cuts = np.cumsum([leaves[place].size for place in places])[:-1]
            for place, part in zip(places, jnp.split(bundle, cuts), strict=True):
                found[place] = part.reshape(leaves[place].shape)
        return jax.tree.unflatten(structure, found)

    return bundles, undo
