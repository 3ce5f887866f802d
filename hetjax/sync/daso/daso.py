"""DASO (Coquelin et al., arXiv 2104.05588): agree in every step inside a node, seldom and late between nodes.

Over several processes a process is a node, plans for its own workers, and only exchanges cross between nodes. In one
process its workers are divided into nodes, to study the method.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hetjax.arguments import whole
from hetjax.devices.workers import Workers
from hetjax.fleet.agree import gather
from hetjax.reduce.base import Reduce
from hetjax.reduce.update import State
from hetjax.sampling.nodes import RULES, BetweenNodes, NodeSampler
from hetjax.sampling.order import Sampler
from hetjax.sync.base import Sync, SyncContext
from hetjax.sync.daso.across import AcrossProcesses
from hetjax.sync.daso.averaging import BLENDS
from hetjax.sync.daso.exchange import Exchange, NodeMessage, Stacked, from_words
from hetjax.sync.daso.node import Node, NodeLayout, across_processes, in_one_process, own_devices
from hetjax.sync.daso.reduce import DasoConfig, Nodes
from hetjax.sync.daso.schedule import DasoSchedule
from hetjax.sync.replicas import average

log = logging.getLogger("hetjax")
Tree = Any
WIRES, WAITS = ("bfloat16", "full"), ("auto", "paper")


class Daso(Sync):
    """The sync `daso`.

    nodes      in one process: how many nodes its workers form, or the number of workers of each
    max_skip   most steps between exchanges
    warm_up    epochs at the start in which all agree in every step; cool_down: the same at the end; unless told a
               fifth of the epochs each, at most 4
    stability  how much of the loss has to be gained for training to count as moving on
    blend      'delta' or 'paper': what is done with an average that comes late (see blend.py)
    wire       'bfloat16': differences to the last mean travel in 16 bits; 'full': parameters as they are
    wait       'auto': an exchange is received when it can have arrived, at the latest with the next one; 'paper': after
               a quarter of the skip, which on a slow link makes all stand still for the rest
    overlap    False: nodes wait for each other at every exchange, which is local SGD
    between    over several processes: 'balanced' (all nodes make the same steps, with samples in proportion to what
               they can do), 'equal', or 'steps' (the same samples a step, and steps in proportion to speed)
    wait_limit most seconds to wait for a node that is late; link: bits a second of a simulated link between nodes
    faithful   as published: equal weights for all nodes, parameters and not gradients in blocking phases, the slip

    Two things of the original are left out even then, as they are faults of its code and no part of the method. Its
    local skip: the workers of a node go on apart for some steps, and then the steps of all but one are thrown away. And
    its bfloat16: parameters are overwritten by what traveled, so that every exchange cuts them down to 8 bits. Here
    they stay as precise as they were, and differences travel.
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
        wait: str | None = None,
        overlap: bool = True,
        between: str = "balanced",
        faithful: bool = False,
        wait_limit: float = 300.0,
        link: float | None = None,
    ):
        blend, wait = blend or ("paper" if faithful else "delta"), wait or ("paper" if faithful else "auto")
        choices = ("blend", blend, BLENDS), ("wire", wire, WIRES), ("wait", wait, WAITS), ("between", between, RULES)
        for what, value, known in choices:
            if value not in known:
                raise ValueError(f"{what} is {value!r}: choose one of {', '.join(known)}.")
        self.nodes, self.warm_up, self.cool_down = nodes, warm_up, cool_down
        self._options: dict[str, Any] = {
            "max_skip": whole("max_skip", max_skip, 1),
            "stability": stability,
            "overlap": overlap,
            "faithful": faithful,
        }
        self.manner = DasoConfig(blend, wire, wait, faithful)
        self.schedule = DasoSchedule(**self._options)  # refuses nonsense at once
        self.between, self.wait_limit, self.link = between, wait_limit, link
        self.sharing: BetweenNodes | None = None  # over several processes
        self._shared_before: dict[str, Any] | None = None
        self.reduce: Nodes | None = None

    # -- the protocol of a sync --

    def open(self, setting: SyncContext, state: State) -> tuple[Reduce, list[Tree]]:
        if setting.samples is None or setting.end is None:
            raise ValueError(
                "DASO's schedule goes by epochs, and this run has none: give Step epoch_size (samples in an epoch) and "
                "epochs (how many there will be), or use Trainer with a source of known length."
            )
        several = jax.process_count() > 1
        if several and self.nodes is not None:
            raise ValueError(
                f"nodes={self.nodes} divides the workers of one process, and here are {jax.process_count()} processes, "
                "each of them a node. Leave it out."
            )
        places = across_processes(setting.workers) if several else in_one_process(setting.workers, self.nodes)
        self._check(setting, places)
        if int(state.replicas) not in (0, places.nodes):
            state = average(state, self._batches(state))  # has no `more`
        if self.sharing is not None:
            self.sharing.limit(gather(setting.capacity), setting.batch)
        self._set_schedule(setting, state)
        update = setting.rule.update()
        core_n = [Node.place(self._core(state, j), own) for j, own in zip(places.mine, places.workers, strict=True)]
        nodes = [Node(own, setting.layout, update, core) for own, core in zip(places.workers, core_n, strict=True)]
        self.reduce = Nodes(
            setting.workers,
            setting.layout,
            setting.samples,
            nodes,
            places.leads,
            self._exchange(places, nodes[0], core_n[0]),
            self.schedule,
            self.manner,
            self.sharing,
        )
        self._take_up(self.reduce, state, places)
        return self.reduce, core_n

    def answer(self, state: State) -> State:
        """The nodes' mean, weighted as in their exchanges. Over several processes all have to call this, unless the
        state is already one set."""
        one = average(state, self._batches(state))
        local = lambda x: x.addressable_data(0) if isinstance(x, jax.Array) and not x.is_fully_addressable else x
        return jax.tree.map(local, one)

    def state_dict(self) -> dict[str, Any]:
        shared = self._shared_before if self.sharing is None else self.sharing.state_dict()
        return {"schedule": self.schedule.state_dict(), "between": shared}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.schedule.load_state_dict(saved["schedule"])
        self.sharing, self._shared_before = None, saved["between"]

    # -- every process plans for itself --

    @property
    def by_node(self) -> bool:
        return jax.process_count() > 1

    def workers(self, devices: Sequence[jax.Device] | None) -> Workers:
        return Workers.of(devices if jax.process_count() == 1 else own_devices(devices))

    def sampler(self, order: Any, quantum: int) -> Any:
        nodes = jax.process_count()
        if nodes == 1:
            return order
        if not isinstance(order, Sampler):
            raise ValueError(
                f"Nodes of DASO take parts of the global order: use partition 'global', not {order.partition!r}."
            )
        if self.between == "steps" and quantum > 1:
            raise ValueError(
                f"This model's BatchNorm takes its statistics over groups of {quantum} samples, and steps in "
                "proportion to speed are not made of whole groups. Use between='balanced'."
            )
        if self.sharing is None:
            self.sharing = BetweenNodes(nodes, self.between)
            if self._shared_before is not None:
                self.sharing.load_state_dict(self._shared_before)
        return NodeSampler(
            order, jax.process_index(), self.sharing, lambda epoch: self.schedule.blocking(epoch), quantum
        )

    def _batches(self, state: State) -> np.ndarray | None:
        """The samples that each node has in one step, where the state holds several nodes and they have said so."""
        words = (state.more or {}).get("notes") if int(state.replicas) else None
        if words is None or self.manner.faithful:
            return None
        batch = lambda row: NodeMessage.of(from_words(np.asarray(row))).batch
        spread = isinstance(words, jax.Array) and not words.is_fully_addressable
        batch_N = np.array(gather(batch(_piece(words, 0)[0])) if spread else [batch(row) for row in np.asarray(words)])
        return batch_N if batch_N.sum() > 0 else None

    # -- setting up --

    def _set_schedule(self, setting: SyncContext, state: State) -> None:
        """Epochs are counted from the start of training. The schedule goes on if it stands where the state does; what
        was under way between other nodes is in their mean already."""
        assert setting.end is not None
        assert setting.samples is not None
        total = -(-setting.end // setting.samples)
        fifth = min(4, total // 5)
        epoch, inside = divmod(int(state.cursor), setting.samples)
        fresh = DasoSchedule(
            warm_up=fifth if self.warm_up is None else self.warm_up,
            cool_down=fifth if self.cool_down is None else self.cool_down,
            total=total,
            **self._options,
        )
        known = self.schedule
        if (known.epoch, known.at > 0) == (epoch, inside > 0) and state.cursor > 0:
            fresh.load_state_dict(known.state_dict())
            fresh.sent = fresh.sent if "sent" in (state.more or {}) else None
        else:
            fresh.begin_at(epoch, inside // setting.batch)
        self.schedule = fresh

    def _exchange(self, places: NodeLayout, node: Node, core: Tree) -> Exchange:
        if self.reduce is not None:
            self.reduce.exchange.close()
        several = len(places.workers) < places.nodes
        made: Exchange = (
            AcrossProcesses(places.carriers, self.wait_limit, self.link) if several else Stacked(places.leads)
        )
        for kind, shapes in node.sent_shapes(core, self.manner.wire == "bfloat16"):
            made.prepare(kind, shapes)
        return made

    def _take_up(self, reduce: Nodes, state: State, places: NodeLayout) -> None:
        """What the state says of exchanges: the last mean, the nodes' notes, and one that was under way."""
        more = state.more or {}
        if self.schedule.skip > 0 or self.manner.faithful:
            mean = more.get("mean") or [jnp.asarray(x)[None] for x in jax.tree.leaves(self.answer(state).params)]
            reduce.rebase(mean)
        if more:
            mine = lambda x: [_piece(x, j) for j in places.mine]
            rows = lambda x: [np.asarray(row)[0] for row in mine(x)]
            if "sent" in more:
                sent_n = [list(x) for x in zip(*map(mine, more["sent"]), strict=True)]
                reduce.go_on(rows(more["notes"]), rows(more["said"]), sent_n, jax.tree.structure(state.params))
            else:
                reduce.go_on(rows(more["notes"]), [], [], None)

    def _check(self, setting: SyncContext, places: NodeLayout) -> None:
        for j, workers in zip(places.mine, places.workers, strict=True):
            if len(workers.kinds) > 1 or setting.transport == "hub":
                raise ValueError(
                    f"The workers of a node sum their gradients in one program, which needs devices of one kind and "
                    f"transport 'psum' or 'auto'; those of node {j} are {', '.join(workers.kinds)}, with transport "
                    f"{setting.transport!r}. Put unlike devices into nodes of their own."
                )

    def _core(self, state: State, node: int) -> Tree:
        """One node's arrays, with a leading axis of one."""
        if int(state.replicas):
            return jax.tree.map(lambda x: _piece(x, node), state.core)
        return jax.tree.map(lambda x: jnp.asarray(x)[None], state.core)


def _piece(x: Any, node: int) -> Any:
    """A node's part [1, ...] of a stacked array; of one that lies spread over processes, the part that is here."""
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        return x.addressable_data(0)
    return np.asarray(x)[node : node + 1]
