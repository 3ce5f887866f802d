"""DASO (Coquelin et al., arXiv 2104.05588): agree in every step inside a node, seldom and late between nodes.

Over several processes a process is a node, and only exchanges of parameters cross between them. In one process its
workers are divided into nodes, to study the method.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hetjax.plan.daso_schedule import Schedule
from hetjax.run.update import State
from hetjax.run.workers import Workers
from hetjax.sync.daso.blend import BLENDS
from hetjax.sync.daso.exchange import Stacked
from hetjax.sync.daso.node import Node
from hetjax.sync.daso.reduce import Manner, Nodes
from hetjax.sync.protocol import Setting
from hetjax.sync.replicas import average

log = logging.getLogger("hetjax")
Tree = Any
WIRES = ("bfloat16", "full")


class Daso:
    """The sync `daso`.

    nodes      in one process: how many nodes its workers form, or the number of workers of each
    max_skip   most steps between exchanges
    warm_up    epochs at the start in which all agree in every step; cool_down: the same at the end; unless told a
               fifth of the epochs each, at most 4
    stability  how much of the loss has to be gained for training to count as moving on
    blend      'delta' or 'paper': what is done with an average that comes late (see blend.py)
    wire       'bfloat16': differences to the last mean travel in 16 bits; 'full': parameters as they are
    overlap    False: nodes wait for each other at every exchange, which is local SGD
    faithful   as published: equal weights for all nodes, parameters and not gradients in blocking phases, the slip
    """

    name = "daso"
    own_parameters = True

    def __init__(
        self,
        nodes: int | Sequence[int] | None = None,
        max_skip: int = 8,
        warm_up: int | None = None,
        cool_down: int | None = None,
        stability: float = 0.05,
        blend: str | None = None,
        wire: str = "bfloat16",
        overlap: bool = True,
        faithful: bool = False,
    ):
        blend = blend or ("paper" if faithful else "delta")
        for what, value, known in (("blend", blend, BLENDS), ("wire", wire, WIRES)):
            if value not in known:
                raise ValueError(f"{what} is {value!r}: choose one of {', '.join(known)}.")
        self.nodes, self.warm_up, self.cool_down = nodes, warm_up, cool_down
        self._options: dict[str, Any] = {
            "max_skip": max_skip,
            "stability": stability,
            "overlap": overlap,
            "faithful": faithful,
        }
        self.manner = Manner(blend, wire, faithful)
        self.schedule = Schedule(**self._options)  # refuses nonsense at once

    # -- the protocol of a sync --

    def open(self, setting: Setting, state: State) -> Nodes:
        groups = self.groups(setting.workers)
        self._check(setting, groups)
        if int(state.replicas) not in (0, len(groups)):
            state = average(state)  # has no `more`
        self._set_schedule(setting, state)
        nodes = [
            Node(workers, setting.layout, setting.rule.finish(), self._core(state, j))
            for j, workers in enumerate(groups)
        ]
        leads = [workers.devices[0] for workers in groups]
        reduce = Nodes(
            setting.workers,
            setting.layout,
            setting.samples,
            nodes,
            leads,
            Stacked(leads),
            self.schedule,
            self.manner,
        )
        more = state.more or {}
        if self.schedule.skip > 0:
            mean = more.get("mean") or [jnp.asarray(x)[None] for x in jax.tree.leaves(average(state).params)]
            reduce.rebase(mean)
        if more:
            mine = lambda x: [np.asarray(x)[j : j + 1] for j in range(len(groups))]
            sent_n = list(zip(*(mine(x) for x in more["sent"]), strict=True)) if "sent" in more else None
            reduce.go_on([x[0] for x in mine(more["notes"])], sent_n)
        return reduce

    def answer(self, state: State) -> State:
        return average(state)

    def state_dict(self) -> dict[str, Any]:
        return {"schedule": self.schedule.state_dict()}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.schedule.load_state_dict(saved["schedule"])

    # -- setting up --

    def _set_schedule(self, setting: Setting, state: State) -> None:
        """Epochs are counted from the start of training. The schedule goes on if it stands where the state does."""
        total = -(-setting.end // setting.samples)
        fifth = min(4, total // 5)
        epoch, inside = divmod(int(state.cursor), setting.samples)
        fresh = Schedule(
            warm_up=fifth if self.warm_up is None else self.warm_up,
            cool_down=fifth if self.cool_down is None else self.cool_down,
            total=total,
            **self._options,
        )
        known = self.schedule
        if (known.epoch, known.at > 0) == (epoch, inside > 0) and state.cursor > 0:
            fresh.load_state_dict(known.state_dict())
        else:
            fresh.begin_at(epoch, inside // setting.batch)
        self.schedule = fresh

    def groups(self, workers: Workers) -> list[Workers]:
        """The workers of each node, in order."""
        count = len(workers)
        asked = 2 if self.nodes is None else self.nodes
        if isinstance(asked, int | np.integer):
            if not 1 <= asked <= count:
                raise ValueError(f"{asked} nodes cannot be made of {count} workers: give 1 to {count}.")
            sizes = [count // asked + (j < count % asked) for j in range(asked)]
        else:
            sizes = [int(size) for size in asked]
            if sum(sizes) != count or min(sizes) < 1:
                raise ValueError(f"Nodes of {sizes} workers were asked for, and there are {count} workers in all.")
        ends = np.cumsum(sizes)
        return [Workers(workers.devices[end - size : end]) for end, size in zip(ends, sizes, strict=True)]

    def _check(self, setting: Setting, groups: list[Workers]) -> None:
        for j, workers in enumerate(groups):
            if len(workers.kinds) > 1 or setting.transport == "hub":
                raise ValueError(
                    f"The workers of a node sum their gradients in one program, which needs devices of one kind and "
                    f"transport 'psum' or 'auto'; those of node {j} are {', '.join(workers.kinds)}, with transport "
                    f"{setting.transport!r}. Put unlike devices into nodes of their own."
                )

    def _core(self, state: State, node: int) -> Tree:
        """One node's arrays, with a leading axis of one."""
        if int(state.replicas):
            return jax.tree.map(lambda x: np.asarray(x)[node : node + 1], state.core)
        return jax.tree.map(lambda x: jnp.asarray(x)[None], state.core)
