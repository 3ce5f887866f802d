"""DASO (Coquelin et al., arXiv 2104.05588): gradients summed inside nodes, parameters averaged rarely between them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hetjax import processes
from hetjax.arguments import whole
from hetjax.devices.workers import DeviceChoice, Workers
from hetjax.reduce.base import Reduce
from hetjax.reduce.trainable import trainable
from hetjax.sampling.nodes import RULES, NodeAllocator, NodeSampler
from hetjax.sampling.order import Sampler
from hetjax.state import State
from hetjax.sync.base import Sync, SyncContext
from hetjax.sync.daso.across import CrossProcessExchange
from hetjax.sync.daso.averaging import BLENDS
from hetjax.sync.daso.exchange import Exchange, InProcessExchange, NodeMessage, from_words
from hetjax.sync.daso.node import Node, NodeLayout, across_processes, in_one_process
from hetjax.sync.daso.reduce import DasoConfig, DasoReduce
from hetjax.sync.daso.schedule import DasoSchedule
from hetjax.sync.replicas import average, replica

log = logging.getLogger("hetjax")
Tree = Any
WIRES, WAITS = ("bfloat16", "full"), ("auto", "paper")


class Daso(Sync):
    """The sync `daso` (distributed asynchronous and selective optimization, Coquelin et al., arXiv 2104.05588).

    With several processes each process is a node, plans for its own workers, and only exchanges cross between nodes. In
    one process its workers are grouped into nodes, to study the method. See `DasoSchedule` for when nodes exchange
    parameters, `averaging.mean` for their weighted mean, and `averaging.blend_weights` for how a stale mean is used.

    Two properties of the original code are left out even with `faithful`, as they are no part of the method: its local
    skip, in which the workers of a node diverge for some steps and all but one are then discarded; and its bfloat16,
    which overwrites the parameters by what was sent and so cuts them to 8 bits in every exchange. Here parameters keep
    their precision and differences are sent.

    Args:
        nodes: in one process, the number of nodes or the number of workers of each (default: 2 nodes).
        max_skip: maximum number of steps between exchanges.
        warm_up: epochs at the start in which nodes agree in every step (default: a fifth of all epochs, at most 4).
        cool_down: the same at the end, with the same default.
        stability: relative decrease of the loss that counts as progress.
        blend: 'delta' or 'paper', how a stale mean is blended in (default: 'delta', or 'paper' if faithful).
        wire: 'bfloat16' sends differences to the last mean in 16 bits, 'full' parameters as they are. If faithful, 16
            bits are used while nodes block and 32 in between.
        wait: 'auto' receives an exchange when it can have arrived, at the latest with the next one; 'paper' after a
            quarter of the skip, so that nodes block for the rest on a slow link (default: 'auto', or 'paper' if
            faithful).
        overlap: False blocks on every exchange, which is local SGD.
        between: with several processes, 'balanced' (all nodes take the same steps, with samples in proportion to their
            speed), 'equal' (with equal samples), or 'steps' (equal samples per step, and steps in proportion to speed)
            (default: 'balanced', or 'equal' if faithful).
        faithful: as published: equal nodes of equal weight, parameters instead of gradients in blocking phases, and the
            receive of `DasoSchedule`.
        wait_limit: seconds to wait for a straggling node.
        link: bandwidth in bits per second of a simulated link between nodes.
        gradient_wire: 'bfloat16' sums gradients in 16 bits while nodes agree in every step, 'full' as they are.

    Raises:
        ValueError: If an option is not one of its choices or out of range.
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
        between: str | None = None,
        faithful: bool = False,
        wait_limit: float = 300.0,
        link: float | None = None,
        gradient_wire: str = "full",
    ):
        blend, wait = blend or ("paper" if faithful else "delta"), wait or ("paper" if faithful else "auto")
        between = between or ("equal" if faithful else "balanced")
        choices = (
            ("blend", blend, BLENDS), ("wire", wire, WIRES), ("wait", wait, WAITS), ("between", between, RULES),
            ("gradient_wire", gradient_wire, WIRES),
        )  # fmt: skip
        for what, value, known in choices:
            if value not in known:
                raise ValueError(f"{what} is {value!r}: expected one of {', '.join(known)}.")
        if faithful and between != "equal":
            raise ValueError(
                f"between is {between!r}, but the published method gives all nodes the same samples and the same "
                "weight: leave out faithful, or use between='equal'."
            )
        self.nodes, self.warm_up, self.cool_down = nodes, warm_up, cool_down
        self._options: dict[str, Any] = {
            "max_skip": whole("max_skip", max_skip, 1),
            "stability": stability,
            "overlap": overlap,
            "faithful": faithful,
        }
        self.config = DasoConfig(blend, wire, wait, faithful, gradient_wire)
        self.schedule = DasoSchedule(**self._options)  # checks the options now
        self.between, self.wait_limit, self.link = between, wait_limit, link
        self.sharing: NodeAllocator | None = None  # over several processes
        self._saved_sharing: dict[str, Any] | None = None
        self.reduce: DasoReduce | None = None

    # -- the interface of a sync --

    def open(self, context: SyncContext, state: State) -> tuple[Reduce, list[Tree]]:
        if context.samples is None or context.end is None:
            raise ValueError(
                "DASO's schedule is based on epochs, but the length of this run is unknown: give Step epoch_size "
                "(samples per epoch) and epochs (their number), or use Trainer with a source of known length."
            )
        several = processes.count() > 1
        if several and self.nodes is not None:
            raise ValueError(
                f"nodes={self.nodes} groups the workers of one process, but there are {processes.count()} processes, "
                "each of them a node. Omit nodes."
            )
        layout = across_processes(context.workers) if several else in_one_process(context.workers, self.nodes)
        self._check(context, layout)
        if int(state.replicas) not in (0, layout.nodes):
            state = average(state, self._batches(state))  # without `more`: a pending exchange is part of the mean
        if self.sharing is not None:
            self.sharing.limit(processes.gather(context.capacity), context.batch)
        self._set_schedule(context, state)
        update = context.rule.update()
        core_n = [Node.place(self._core(state, j), own) for j, own in zip(layout.local, layout.workers, strict=True)]
        nodes = [Node(own, context.layout, update, core) for own, core in zip(layout.workers, core_n, strict=True)]
        self.reduce = DasoReduce(
            context.workers,
            context.layout,
            context.samples,
            nodes,
            layout.local[0],
            self._exchange(layout),
            self.schedule,
            self.config,
            self.sharing,
        )
        self._resume(self.reduce, state, layout)
        return self.reduce, core_n

    def answer(self, state: State) -> State:
        """The mean over nodes, weighted as in their exchanges. Collective, unless the state has one set already."""
        return average(state, self._batches(state))

    def state_dict(self) -> dict[str, Any]:
        shared = self._saved_sharing if self.sharing is None else self.sharing.state_dict()
        return {"schedule": self.schedule.state_dict(), "between": shared}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.schedule.load_state_dict(saved["schedule"])
        self.sharing, self._saved_sharing = None, saved["between"]

    # -- every process plans on its own --

    @property
    def by_node(self) -> bool:
        return processes.count() > 1

    def workers(self, devices: DeviceChoice) -> Workers:
        return Workers.of(devices) if processes.count() == 1 else Workers.alone(devices)

    def sampler(self, order: Any, quantum: int) -> Any:
        nodes = processes.count()
        if nodes == 1:
            return order
        if not isinstance(order, Sampler):
            raise ValueError(
                f"The nodes of DASO share the global order of samples: use partition 'global', not {order.partition!r}."
            )
        if self.between == "steps" and quantum > 1:
            raise ValueError(
                f"This model's BatchNorm takes its statistics over groups of {quantum} samples, but with "
                "between='steps' a step does not consist of whole groups. Use between='balanced'."
            )
        if self.sharing is None:
            self.sharing = NodeAllocator(nodes, self.between)
            if self._saved_sharing is not None:
                self.sharing.load_state_dict(self._saved_sharing)
        return NodeSampler(order, processes.index(), self.sharing, lambda epoch: self.schedule.blocking(epoch), quantum)

    def _batches(self, state: State) -> np.ndarray | None:
        """Samples per step of each node; None if the state does not hold them, or all nodes count alike."""
        words = (state.more or {}).get("notes") if int(state.replicas) else None  # keys: see `DasoReduce.state`
        if words is None or self.config.faithful:
            return None
        batch = lambda row: NodeMessage.of(from_words(np.asarray(row))).batch
        if getattr(words, "is_fully_addressable", True):
            batch_N = np.array([batch(row) for row in np.asarray(words)])
        else:
            batch_N = np.array(processes.gather(batch(words.addressable_data(0)[0])))
        return batch_N if batch_N.sum() > 0 else None

    # -- setting up --

    def _set_schedule(self, context: SyncContext, state: State) -> None:
        """Set the schedule of the run, with epochs counted from the start of training.

        The known schedule continues if it is at the state's position; otherwise a new one begins there.
        """
        assert context.end is not None
        assert context.samples is not None
        total = -(-context.end // context.samples)
        fifth = min(4, total // 5)
        epoch, position = divmod(int(state.cursor), context.samples)
        schedule = DasoSchedule(
            warm_up=fifth if self.warm_up is None else self.warm_up,
            cool_down=fifth if self.cool_down is None else self.cool_down,
            total=total,
            **self._options,
        )
        known = self.schedule
        if (known.epoch, known.steps_done > 0) == (epoch, position > 0) and state.cursor > 0:
            schedule.load_state_dict(known.state_dict())
            schedule.sent = schedule.sent if "sent" in (state.more or {}) else None
        else:
            schedule.begin_at(epoch, position // context.batch)
        self.schedule = schedule

    def _exchange(self, layout: NodeLayout) -> Exchange:
        if self.reduce is not None:
            self.reduce.exchange.close()
        if len(layout.workers) == layout.nodes:
            return InProcessExchange(layout.nodes)
        link = processes.link()
        assert link is not None
        return CrossProcessExchange(link, self.wait_limit, self.link)

    def _resume(self, reduce: DasoReduce, state: State, layout: NodeLayout) -> None:
        """Restore the exchanges of the state: the last mean, the nodes' messages, and the pending exchange."""
        more = state.more or {}
        if self.schedule.skip > 0 or self.config.faithful:
            first = lambda: jax.tree.leaves(trainable(self.answer(state).params))
            reduce.rebase(more.get("mean") or [np.asarray(x)[None] for x in first()])
        if more:
            pieces = lambda x: [replica(x, j) for j in layout.local]
            rows = lambda x: [np.asarray(row)[0] for row in pieces(x)]
            if "sent" in more:
                sent_n = [list(x) for x in zip(*map(pieces, more["sent"]), strict=True)]
                tree = jax.tree.structure(trainable(state.params))
                reduce.resume(rows(more["notes"]), rows(more["said"]), sent_n, tree)
            else:
                reduce.resume(rows(more["notes"]), [], [], None)

    def _check(self, context: SyncContext, layout: NodeLayout) -> None:
        sizes = [len(workers) for workers in layout.workers]
        if len(sizes) < layout.nodes:
            sizes = [size for (size,) in processes.gather(sizes)]
        if self.config.faithful and min(sizes) < max(sizes):
            raise ValueError(
                f"The nodes have {sizes} workers, but the published method assumes equal nodes: give nodes of equal "
                "size, or leave out faithful."
            )
        for j, workers in zip(layout.local, layout.workers, strict=True):
            if len(workers.kinds) > 1 or context.options.transport == "host":
                raise ValueError(
                    f"The workers of a node sum their gradients in one program, which needs devices of one kind and "
                    f"transport 'mesh' or 'auto'; the devices of node {j} are {', '.join(workers.kinds)}, with "
                    f"transport {context.options.transport!r}. Put devices of different kinds into different nodes."
                )

    def _core(self, state: State, node: int) -> Tree:
        """The core of one node, with a leading axis of one."""
        if int(state.replicas):
            return jax.tree.map(lambda x: replica(x, node), state.core)
        return jax.tree.map(lambda x: jnp.asarray(x)[None], state.core)
