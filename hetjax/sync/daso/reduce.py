"""The reduce of DASO: gradients are summed inside a node in every step, parameters between nodes when it is due."""

from __future__ import annotations

import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from hetjax.devices.workers import Workers
from hetjax.fleet.agree import Disagreement
from hetjax.reduce.base import Replicas
from hetjax.reduce.layout import Layout, Parts, StepReport
from hetjax.reduce.update import State
from hetjax.sampling.nodes import NodeAllocator
from hetjax.sampling.order import PlannedStep
from hetjax.sync.daso.averaging import ALL_OF_IT, NODE, BlendWeights, Leaves, receives_first, terms
from hetjax.sync.daso.exchange import (
    Arrived,
    Exchange,
    NodeMessage,
    PendingExchange,
    as_words,
    from_words,
    steps_under_way,
)
from hetjax.sync.daso.node import Node, averaged
from hetjax.sync.daso.schedule import DasoSchedule

Tree = Any


@dataclass(frozen=True)
class DasoConfig:
    """How nodes agree: what is done with a late average, what travels, when it is due, and whether as published."""

    blend: str = "delta"
    wire: str = "bfloat16"
    wait: str = "auto"
    faithful: bool = False


class Entry(NamedTuple):
    """One exchange: the steps that sent and received it, and seconds."""

    sent: int
    received: int
    beside: int  # local phases that ended while it was under way: they did not wait for it
    seconds: float  # under way
    waited: float  # that the receiving step stood still
    bytes: int = 0  # that this node sent


@dataclass
class _Pending:
    """An exchange under way, and what each node of this process has sent and said."""

    flight: PendingExchange
    sent_n: list[Tree]
    said_n: list[NodeMessage]
    short: bool  # in 16 bits
    since: int  # the step that sent it
    beside: int = 0  # local phases that ended while it was under way


class Nodes:
    """The reduce of DASO. Its core is a list, one for each node of this process; what the host knows of exchanges, with
    the one that is under way, stays here."""

    name = "nodes"

    def __init__(
        self,
        workers: Workers,
        layout: Layout,
        samples: int,
        nodes: Sequence[Node],
        leads: Sequence[jax.Device],
        exchange: Exchange,
        schedule: DasoSchedule,
        manner: DasoConfig,
        sharing: NodeAllocator | None = None,
    ):
        """samples: of an epoch; leads: the first worker of every node, of all processes; sharing: who takes how much
        of a step, where nodes plan on their own."""
        self.workers, self.layout, self.samples = workers, layout, samples
        self.nodes, self.exchange, self.schedule, self.manner = list(nodes), exchange, schedule, manner
        self.sharing = sharing
        self.journal: list[Entry] = []
        self.steps = 0  # made so far
        self._at: tuple[int, int] | None = None  # epoch and position in it after the last step
        mesh = Mesh(np.array(leads), (NODE,), axis_types=(AxisType.Auto,))
        self._over_nodes = NamedSharding(mesh, PartitionSpec(NODE))
        ends = np.cumsum([len(node.workers) for node in self.nodes])
        self._slices = [slice(end - len(node.workers), end) for end, node in zip(ends, self.nodes, strict=True)]
        self._notes_n = [NodeMessage() for _ in self.nodes]
        self._pending: _Pending | None = None
        self._short = manner.wire == "bfloat16"
        self._mean: Leaves | None = None  # the last one that all nodes know, where differences to it travel
        self._told: list[NodeMessage] | None = None  # what all nodes said, where that arrived with the last step
        self._asked_to_stop = self._asked_to_save = False  # what one of them wished, in any exchange of the last step
        self._tails_n: list[jax.Array] = []  # of the last step, one for each node
        self._reports_n: list[StepReport] | None = None  # of the last step
        self._scalars: jax.Array | None = None  # of all nodes in the last step, where their gradients were summed
        self._loss: StepReport | None = None  # the last one of a step with samples

    # -- a step --

    def __call__(
        self, core_n: list[Tree], parts_w: Sequence[Parts], slots_w: Sequence[list[float]], step: PlannedStep
    ) -> tuple[list[Tree], Any]:
        if step.plan.weights_W is not None:
            raise ValueError("DASO counts all samples alike: use a controller without weights of its own.")
        at = step.span
        self.steps, self._at = self.steps + 1, (at.epoch, at.end)
        if self._pending is not None and not self._pending.flight.done:
            self._pending.beside += 1
        added_n = [node.add(parts_w[own], slots_w[own]) for node, own in zip(self.nodes, self._slices, strict=True)]
        totals_n, tails_n = [totals for totals, _ in added_n], [tail for _, tail in added_n]
        self._tails_n = tails_n  # what goes along with an exchange of gradients
        self._told = self._reports_n = self._scalars = None
        self._asked_to_stop = self._asked_to_save = False
        last, cycling = at.end == self.samples, self.schedule.skip > 0
        act = self.schedule.step(last)
        if act.gradients:
            sums_n = [node.lead(x) for node, x in zip(self.nodes, totals_n, strict=True)]
            flight = self._start("total", sums_n, self._say())
            totals_n = [self._learn(flight).leaves] * len(self.nodes)
        moved_n = [node.apply(*given) for node, *given in zip(self.nodes, core_n, totals_n, tails_n, strict=True)]
        core_n, self._tails_n = [core for core, *_ in moved_n], [tail for *_, tail in moved_n]
        if act.gradients:
            self._scalars = moved_n[0][1]
        core_n = self._agree(core_n, act.send, act.receive, act.block, short=self._short and not last)
        if last:
            core_n = self._end_epoch(core_n, cycling)
        return core_n, self._tails_n

    def _agree(self, core_n: list[Tree], send: bool, receive: int, block: bool, short: bool) -> list[Tree]:
        """`short`: what is sent now travels in 16 bits; never at the end of an epoch, as nodes go on from that mean."""
        due, first = self._pending, receives_first(self.manner.blend)
        rule = terms(self.manner.blend, receive, self.exchange.nodes)
        if receive and first:
            core_n = self._receive(core_n, due, rule)
        if receive:
            self._pending = None
        if send:
            snapshot_n = [node.snapshot(core) for node, core in zip(self.nodes, core_n, strict=True)]
            self._send(snapshot_n, self._say(), short)
        if receive and not first:
            core_n = self._receive(core_n, due, rule)
        if block:
            core_n = self._receive(core_n, self._pending, ALL_OF_IT)
            self._pending = None
        return core_n

    def _send(self, sent_n: list[Tree], said_n: list[NodeMessage], short: bool) -> None:
        leaves_n = [jax.tree.leaves(node.lead(sent)) for node, sent in zip(self.nodes, sent_n, strict=True)]
        flight = self._start("short" if short else "mean", leaves_n, said_n)
        self._pending = _Pending(flight, sent_n, said_n, short, self.steps)

    def _say(self) -> list[NodeMessage]:
        """What goes along with an exchange that starts now; counted anew from here."""
        self._read()
        said_n = [replace(notes) for notes in self._notes_n]
        for notes in self._notes_n:
            notes.sent()
        return said_n

    def _start(self, kind: str, leaves_n: list[Leaves], said_n: list[NodeMessage]) -> PendingExchange:
        checksum = self._checksum()
        weight_n = [1.0 if self.manner.faithful else notes.batch for notes in said_n]
        rows_n = np.array([replace(notes, checksum=checksum).array() for notes in said_n])
        return self.exchange.start(kind, leaves_n, weight_n, rows_n)

    def _checksum(self) -> int:
        """Of what all nodes have to agree on: where they are, when they exchange, and who takes which samples."""
        sharing = self.sharing
        shared = None if sharing is None else (sharing.rule, sharing.capacity_N, sharing.state_dict())
        return zlib.crc32(repr((self._at, self.schedule.state_dict(), shared)).encode()) & 0xFFFFFF

    def _receive(self, core_n: list[Tree], pending: _Pending | None, rule: BlendWeights) -> list[Tree]:
        assert pending is not None
        arrived = self._learn(pending.flight, pending)
        if pending.short:
            self._mean = arrived.leaves
        else:
            self.rebase(arrived.leaves)
        parties = zip(self.nodes, core_n, pending.sent_n, strict=True)
        return [node.blend(core, arrived.leaves, sent, rule) for node, core, sent in parties]

    def _learn(self, flight: PendingExchange, pending: _Pending | None = None) -> Arrived:
        """Wait for an exchange and take notice of what the nodes said."""
        asked = time.perf_counter()
        arrived = flight.result()
        waited = time.perf_counter() - asked
        sent, beside = (self.steps, 0) if pending is None else (pending.since, pending.beside)
        self.journal.append(Entry(sent, self.steps, beside, arrived.seconds, waited, arrived.sent))
        if sent < self.steps:
            for notes in self._notes_n:
                notes.carried = arrived.seconds
        self._told = [NodeMessage.of(row) for row in arrived.table]
        self._asked_to_stop |= any(notes.stop for notes in self._told)
        self._asked_to_save |= any(notes.save for notes in self._told)
        if self.sharing is not None:
            columns = np.array([[notes.steps, notes.samples, notes.seconds] for notes in self._told]).T
            self.sharing.observe(*columns)
        if self.manner.wait == "auto":
            self.schedule.needs = steps_under_way(self._told) or self.schedule.needs
        odd = [j for j, notes in enumerate(self._told) if notes.checksum != self._told[0].checksum]
        if odd:
            raise Disagreement(
                f"Nodes {odd} are at another place of the training or its schedule than node 0, or share the samples "
                "in another way: they no longer agree. Check that all run the same code, data and configuration, and "
                "start again from the last checkpoint."
            )
        return arrived

    def _end_epoch(self, core_n: list[Tree], cycling: bool) -> list[Tree]:
        assert self._told is not None
        weight = sum(notes.weight for notes in self._told)
        self.schedule.end_epoch(sum(notes.loss for notes in self._told) / weight if weight else np.nan)
        for notes in self._notes_n:
            notes.loss = notes.weight = 0.0
        if not cycling and self.schedule.skip > 0:
            self.rebase(jax.tree.leaves(self.nodes[0].lead(self.nodes[0].snapshot(core_n[0]))))
        if cycling and not self.manner.faithful:
            core_n = self._average_rest(core_n, with_optimizer=self.schedule.skip == 0)
        return core_n

    def _average_rest(self, core_n: list[Tree], with_optimizer: bool) -> list[Tree]:
        """What goes along with the parameters: model state, moving average, counters; before a blocking phase, the
        whole state of the optimizer too."""
        places, told = averaged(core_n[0], with_optimizer), self._told
        if places:
            pairs = list(zip(self.nodes, core_n, strict=True))
            leaves_n = [node.lead([jax.tree.leaves(core)[k] for k in places]) for node, core in pairs]
            mean = self._learn(self._start("mean", leaves_n, self._say())).leaves
            core_n = [node.put_leaves(core, places, mean) for node, core in pairs]
        self._told = told
        return core_n

    # -- what is told --

    def _read(self) -> list[StepReport]:
        """What each node's workers did in the last step; counted into the notes when it is read first."""
        if self._reports_n is None:
            self._reports_n = []
            for node, notes, tail in zip(self.nodes, self._notes_n, self._tails_n, strict=False):  # no tail yet: none
                report = StepReport.read(self.layout, np.asarray(tail.addressable_data(0)), len(node.workers))
                self._reports_n.append(report)
                seconds = np.max(report.times_W[report.rows_W > 0], initial=0.0)  # NaN if one was not timed
                notes.step(report.count, seconds if seconds > 0 else None)
                if not report.left_out:
                    notes.loss, notes.weight = notes.loss + report.loss_sum, notes.weight + report.weight
                notes.stop, notes.save = max(notes.stop, report.stop), max(notes.save, report.save)
        return self._reports_n

    def read(self, tail: Any) -> StepReport:
        """Of the last step: what the nodes have told each other is not in its tails."""
        reports_n = self._read()
        tails = [np.asarray(own.addressable_data(0)) for own in self._tails_n]
        cut = 3 + len(self.layout.metrics)
        own = np.sum([tail[:cut] for tail in tails], axis=0)
        scalars = own if self._scalars is None else np.asarray(self._scalars.addressable_data(0))
        report = StepReport.read(
            self.layout, np.concatenate([scalars, *(tail[cut:] for tail in tails)]), len(self.workers)
        )
        if self.exchange.nodes > len(reports_n):  # what others have to follow takes effect when all know of it
            report = replace(report, stop=self._asked_to_stop, save=self._asked_to_save)
        if report.weight or report.left_out:
            self._loss = report
        elif self._loss is not None:  # a node that sat this step out
            seen = self._loss
            report = replace(report, loss_sum=seen.loss_sum, weight=seen.weight, metric_sums=seen.metric_sums)
        return report

    # -- what is held --

    def state(self, core_n: list[Tree], step: int, cursor: int) -> State:
        core = jax.tree.map(self._stacked, *(node.lead(own) for node, own in zip(self.nodes, core_n, strict=True)))
        leads = [node.workers.devices[0] for node in self.nodes]
        words = lambda notes, lead: jax.device_put(as_words(notes.array())[None], lead)
        more: dict[str, Any] = {"notes": self._stacked(*map(words, self._notes_n, leads))}
        if self._mean is not None:
            more["mean"] = self._mean
        if self._pending is not None:
            sent_n = [node.lead(sent) for node, sent in zip(self.nodes, self._pending.sent_n, strict=True)]
            more["sent"] = jax.tree.leaves(jax.tree.map(self._stacked, *sent_n))
            more["said"] = self._stacked(*map(words, self._pending.said_n, leads))
        return replace(State.of(core, step, cursor), replicas=self.exchange.nodes, more=more)

    def _stacked(self, *pieces_n: jax.Array) -> jax.Array:
        shape = (self.exchange.nodes, *pieces_n[0].shape[1:])
        return jax.make_array_from_single_device_arrays(shape, self._over_nodes, list(pieces_n))

    def rebase(self, mean: Leaves) -> None:
        """Go on from parameters that all nodes know; what travels is the difference to them."""
        if self._short:
            self._mean = mean
            self.exchange.rebase(mean)

    def go_on(
        self, notes_n: Sequence[np.ndarray], said_n: Sequence[np.ndarray], sent_n: Sequence[Leaves], tree: Any
    ) -> None:
        """Take up what `State.more` held: notes, and an exchange that was under way, which is started again with what
        was said then. Wishes for the end or a checkpoint were about the run before: they are fulfilled. `tree`: the
        structure of the parameters."""
        of = lambda words: replace(NodeMessage.of(from_words(words)), stop=0.0, save=0.0)
        self._notes_n = [of(words) for words in notes_n]
        if sent_n:
            placed = lambda node, leaves: jax.tree.unflatten(tree, [node.put(leaf) for leaf in leaves])
            parts_n = [placed(node, leaves) for node, leaves in zip(self.nodes, sent_n, strict=True)]
            self._send(parts_n, [of(words) for words in said_n], self._short)

    def replicas(self, core_n: list[Tree], tail: Any) -> Replicas:
        pairs = list(zip(self.nodes, core_n, strict=True))
        stack = lambda *leaf_n: self.workers.stack(
            [piece for node, leaf in zip(self.nodes, leaf_n, strict=True) for piece in node.workers.pieces(leaf)]
        )
        return Replicas(
            [leaves for node, core in pairs for leaves in node.workers.copies(jax.tree.leaves(core[:2]))],
            [piece for node, core in pairs for piece in node.workers.pieces(jax.tree.leaves(core)[0])],
            lambda: jax.tree.map(stack, *(core[:2] for core in core_n)),
        )
