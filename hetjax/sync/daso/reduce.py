"""The reduce of DASO: gradients are summed inside a node in every step, parameters averaged between nodes when due."""

from __future__ import annotations

import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import numpy as np

from hetjax.devices.workers import Workers
from hetjax.fleet.agree import Disagreement
from hetjax.reduce.base import Replicas
from hetjax.reduce.layout import Layout, Parts, StepReport
from hetjax.reduce.trainable import trained_core
from hetjax.sampling.nodes import NodeAllocator
from hetjax.sampling.order import PlannedStep
from hetjax.state import State
from hetjax.sync.daso.averaging import TAKE_MEAN, BlendWeights, Leaves, blend_weights, receives_before_sending
from hetjax.sync.daso.exchange import (
    Exchange,
    ExchangeResult,
    NodeMessage,
    PendingExchange,
    as_words,
    exchange_steps,
    from_words,
)
from hetjax.sync.daso.node import Node, averaged_leaves
from hetjax.sync.daso.schedule import DasoSchedule, StepActions
from hetjax.sync.replicas import stacked

Tree = Any


@dataclass(frozen=True)
class DasoConfig:
    """How nodes agree; see `Daso` for the values."""

    blend: str = "delta"
    wire: str = "bfloat16"
    wait: str = "auto"
    faithful: bool = False
    gradient_wire: str = "full"

    @property
    def gradient_kind(self) -> str:
        """The kind of exchange that sums gradients (`exchange.KINDS`)."""
        return "compressed-total" if self.gradient_wire == "bfloat16" else "total"


class ExchangeRecord(NamedTuple):
    """The journal entry of one exchange."""

    sent: int  # the step that sent it
    received: int  # the step that received it
    overlapped: int  # local phases that ended while it was pending: they did not wait for it
    seconds: float  # from start to arrival
    waited: float  # seconds that the receiving step was blocked
    bytes: int = 0  # sent by this node


@dataclass
class _PendingAverage:
    """An average that was sent and not received yet."""

    exchange: PendingExchange
    sent_n: list[Tree]  # parameters of each node of this process
    message_n: list[NodeMessage]
    compressed: bool  # in 16 bits
    step: int  # that sent it
    overlapped: int = 0  # local phases that ended while it was pending


class DasoReduce:
    """The reduce of DASO.

    Its core is a list with one core per node of this process. The state of exchanges, with the pending one, stays here.

    Args:
        workers: of all nodes of this process.
        layout: of the sums of a step.
        samples: per epoch.
        nodes: those of this process.
        first: index of the first of them.
        exchange: carries out exchanges between nodes.
        schedule: decides when they take place.
        config: how nodes agree.
        sharing: divides each step's samples between nodes that plan on their own; None within one process.
    """

    name = "nodes"

    def __init__(
        self,
        workers: Workers,
        layout: Layout,
        samples: int,
        nodes: Sequence[Node],
        first: int,
        exchange: Exchange,
        schedule: DasoSchedule,
        config: DasoConfig,
        sharing: NodeAllocator | None = None,
    ):
        self.workers, self.layout, self.samples = workers, layout, samples
        self.nodes, self.exchange, self.schedule, self.config = list(nodes), exchange, schedule, config
        self.first, self.sharing = first, sharing
        self.journal: list[ExchangeRecord] = []
        self.steps = 0  # taken so far
        self._position: tuple[int, int] | None = None  # epoch and position in it after the last step
        ends = np.cumsum([len(node.workers) for node in self.nodes])
        self._slices = [slice(end - len(node.workers), end) for end, node in zip(ends, self.nodes, strict=True)]
        self._message_n = [NodeMessage() for _ in self.nodes]  # what the next exchange will report
        self._pending: _PendingAverage | None = None
        self._compressed = config.wire == "bfloat16"
        self._mean: Leaves | None = None  # the last one that all nodes have, if differences to it are sent
        self._message_N: list[NodeMessage] | None = None  # of all nodes, if an exchange arrived in the last step
        self._stop_requested = self._save_requested = False  # by any node, in an exchange of the last step
        self._tails_n: list[jax.Array] = []  # of the last step, one per node
        self._reports_n: list[StepReport] | None = None  # of the last step
        self._scalars: jax.Array | None = None  # of all nodes in the last step, if their gradients were summed
        self._last_report: StepReport | None = None  # of a step with samples

    # -- a step --

    def __call__(
        self, core_n: list[Tree], parts_w: Sequence[Parts], slots_w: Sequence[list[float]], step: PlannedStep
    ) -> tuple[list[Tree], Any]:
        if step.plan.weights_W is not None:
            raise ValueError("DASO weighs all samples equally: use a controller that sets no weights of its own.")
        span = step.span
        self.steps, self._position = self.steps + 1, (span.epoch, span.end)
        if self._pending is not None and not self._pending.exchange.done:
            self._pending.overlapped += 1
        added_n = [node.add(parts_w[own], slots_w[own]) for node, own in zip(self.nodes, self._slices, strict=True)]
        totals_n, tails_n = [totals for totals, _ in added_n], [tail for _, tail in added_n]
        self._tails_n = tails_n  # read for the message of an exchange of gradients
        self._message_N = self._reports_n = self._scalars = None
        self._stop_requested = self._save_requested = False
        left = -(-(self.samples - span.end) // max(span.advance, 1))  # steps of the epoch after this one
        last, cycling = left == 0, self.schedule.skip > 0
        compressed = self._compressed and self.schedule.compresses(last)
        actions = self.schedule.step(left)
        if actions.sum_gradients:
            sums_n = [node.lead(x) for node, x in zip(self.nodes, totals_n, strict=True)]
            exchange = self._start(self.config.gradient_kind, sums_n, self._take_messages())
            totals_n = [self._wait_for(exchange).leaves] * len(self.nodes)
        moved_n = [node.apply(*given) for node, *given in zip(self.nodes, core_n, totals_n, tails_n, strict=True)]
        core_n, self._tails_n = [core for core, *_ in moved_n], [tail for *_, tail in moved_n]
        if actions.sum_gradients:
            self._scalars = moved_n[0][1]
        core_n = self._agree(core_n, actions, compressed)
        if last:
            core_n = self._end_epoch(core_n, cycling)
        return core_n, self._tails_n

    def _agree(self, core_n: list[Tree], actions: StepActions, compressed: bool) -> list[Tree]:
        """Send and receive averages; `compressed`: send in 16 bits."""
        due, receive_first = self._pending, receives_before_sending(self.config.blend)
        weights = blend_weights(self.config.blend, actions.receive, self.exchange.nodes)
        if actions.receive and receive_first:
            core_n = self._receive(core_n, due, weights)
        if actions.receive:
            self._pending = None
        if actions.send:
            snapshot_n = [node.snapshot(core) for node, core in zip(self.nodes, core_n, strict=True)]
            self._send(snapshot_n, self._take_messages(), compressed)
        if actions.receive and not receive_first:
            core_n = self._receive(core_n, due, weights)
        if actions.block:
            core_n = self._receive(core_n, self._pending, TAKE_MEAN)
            self._pending = None
        return core_n

    def _send(self, sent_n: list[Tree], message_n: list[NodeMessage], compressed: bool) -> None:
        leaves_n = [jax.tree.leaves(node.lead(sent)) for node, sent in zip(self.nodes, sent_n, strict=True)]
        exchange = self._start("compressed" if compressed else "mean", leaves_n, message_n)
        self._pending = _PendingAverage(exchange, sent_n, message_n, compressed, self.steps)

    def _take_messages(self) -> list[NodeMessage]:
        """The messages of an exchange that starts now; their counts start anew."""
        self._read_reports()
        message_n = [replace(message) for message in self._message_n]
        for message in self._message_n:
            message.reset()
        return message_n

    def _start(self, kind: str, leaves_n: list[Leaves], message_n: list[NodeMessage]) -> PendingExchange:
        checksum = self._checksum()
        weight_n = [1.0 if self.config.faithful else message.batch for message in message_n]
        message_nxK = np.array([replace(message, checksum=checksum).array() for message in message_n])
        return self.exchange.start(kind, leaves_n, weight_n, message_nxK)

    def _checksum(self) -> int:
        """Of what all nodes must agree on: position in the run, schedule, and division of samples."""
        sharing = self.sharing
        shared = None if sharing is None else (sharing.rule, sharing.capacity_N, sharing.state_dict())
        return zlib.crc32(repr((self._position, self.schedule.state_dict(), shared)).encode()) & 0xFFFFFF

    def _receive(self, core_n: list[Tree], pending: _PendingAverage | None, weights: BlendWeights) -> list[Tree]:
        assert pending is not None
        mean = self._wait_for(pending.exchange, pending).leaves
        if pending.compressed:
            self._mean = mean
        else:
            self.rebase(mean)
        sent_n = zip(self.nodes, core_n, pending.sent_n, strict=True)
        return [node.blend(core, mean, sent, weights) for node, core, sent in sent_n]

    def _wait_for(self, exchange: PendingExchange, pending: _PendingAverage | None = None) -> ExchangeResult:
        """Wait for an exchange, record it in the journal, and act on the messages of the nodes."""
        began = time.perf_counter()
        result = exchange.result()
        waited = time.perf_counter() - began
        sent, overlapped = (self.steps, 0) if pending is None else (pending.step, pending.overlapped)
        self.journal.append(ExchangeRecord(sent, self.steps, overlapped, result.seconds, waited, result.bytes))
        if sent < self.steps:
            for message in self._message_n:
                message.exchange_seconds = result.seconds
        self._message_N = [NodeMessage.of(row) for row in result.message_NxK]
        self._stop_requested |= any(message.stop for message in self._message_N)
        self._save_requested |= any(message.save for message in self._message_N)
        if self.sharing is not None:
            timings_Nx3 = np.array([[m.timed_steps, m.timed_samples, m.timed_seconds] for m in self._message_N])
            self.sharing.observe(*timings_Nx3.T)
        if self.config.wait == "auto":
            self.schedule.exchange_steps = exchange_steps(self._message_N) or self.schedule.exchange_steps
        differing = [j for j, message in enumerate(self._message_N) if message.checksum != self._message_N[0].checksum]
        if differing:
            raise Disagreement(
                f"Nodes {differing} differ from node 0 in their position in the run, their schedule, or their division "
                "of the samples. Check that all nodes run the same code, data and configuration, and restart from the "
                "last checkpoint."
            )
        return result

    def _end_epoch(self, core_n: list[Tree], cycling: bool) -> list[Tree]:
        assert self._message_N is not None
        weight = sum(message.weight for message in self._message_N)
        self.schedule.end_epoch(sum(message.loss for message in self._message_N) / weight if weight else np.nan)
        for message in self._message_n:
            message.loss = message.weight = 0.0
        if not cycling and self.schedule.skip > 0:
            self.rebase(jax.tree.leaves(self.nodes[0].lead(self.nodes[0].snapshot(core_n[0]))))
        if cycling and not self.config.faithful:
            core_n = self._average_others(core_n, with_optimizer=self.schedule.skip == 0)
        return core_n

    def _average_others(self, core_n: list[Tree], with_optimizer: bool) -> list[Tree]:
        """Average model state, moving average and counters; before a blocking phase also the optimizer's state."""
        indices, message_N = averaged_leaves(core_n[0], with_optimizer), self._message_N
        if indices:
            pairs = list(zip(self.nodes, core_n, strict=True))
            leaves_n = [node.lead([jax.tree.leaves(trained_core(core))[k] for k in indices]) for node, core in pairs]
            mean = self._wait_for(self._start("mean", leaves_n, self._take_messages())).leaves
            core_n = [node.put_leaves(core, indices, mean) for node, core in pairs]
        self._message_N = message_N
        return core_n

    # -- reports --

    def _read_reports(self) -> list[StepReport]:
        """The report of each node's last step; counted into the messages when first read."""
        if self._reports_n is None:
            self._reports_n = []
            # Before the first step there are no tails.
            for node, message, tail in zip(self.nodes, self._message_n, self._tails_n, strict=False):
                report = StepReport.read(self.layout, np.asarray(tail.addressable_data(0)), len(node.workers))
                self._reports_n.append(report)
                seconds = np.max(report.times_W[report.rows_W > 0], initial=0.0)  # NaN if a worker was not timed
                message.count_step(report.count, seconds if seconds > 0 else None)
                if not report.left_out:
                    message.loss, message.weight = message.loss + report.loss_sum, message.weight + report.weight
                message.stop, message.save = max(message.stop, report.stop), max(message.save, report.save)
        return self._reports_n

    def read(self, tail: Any) -> StepReport:
        """The report of the last step; requests of other nodes come with exchanges, not with its tails."""
        reports_n = self._read_reports()
        tails = [np.asarray(own.addressable_data(0)) for own in self._tails_n]
        cut = self.layout.values
        own = np.sum([tail[:cut] for tail in tails], axis=0)
        scalars = own if self._scalars is None else np.asarray(self._scalars.addressable_data(0))
        report = StepReport.read(
            self.layout, np.concatenate([scalars, *(tail[cut:] for tail in tails)]), len(self.workers)
        )
        if self.exchange.nodes > len(reports_n):  # a request takes effect when all nodes know of it
            report = replace(report, stop=self._stop_requested, save=self._save_requested)
        if report.weight or report.left_out:
            self._last_report = report
        elif self._last_report is not None:  # this node had no samples in the step: repeat its last loss and metrics
            last = self._last_report
            report = replace(
                report,
                loss_sum=last.loss_sum,
                weight=last.weight,
                metric_sums=last.metric_sums,
                metric_weights=last.metric_weights,
            )
        return report

    # -- state --

    def state(self, core_n: list[Tree], step: int, cursor: int) -> State:
        """The state with one replica per node.

        The keys of `State.more` are part of the checkpoint format:

        notes  the messages that the next exchange will report, as 32-bit words
        mean   the last mean that all nodes have
        sent   parameters of the pending exchange; said: its messages
        """
        core = jax.tree.map(self._stacked, *(node.lead(own) for node, own in zip(self.nodes, core_n, strict=True)))
        leads = [node.workers.own[0] for node in self.nodes]
        words = lambda message, lead: jax.device_put(as_words(message.array())[None], lead)
        more: dict[str, Any] = {"notes": self._stacked(*map(words, self._message_n, leads))}
        if self._mean is not None:
            more["mean"] = self._mean
        if self._pending is not None:
            sent_n = [node.lead(sent) for node, sent in zip(self.nodes, self._pending.sent_n, strict=True)]
            more["sent"] = jax.tree.leaves(jax.tree.map(self._stacked, *sent_n))
            more["said"] = self._stacked(*map(words, self._pending.message_n, leads))
        return replace(State.of(core, step, cursor), replicas=self.exchange.nodes, more=more)

    def _stacked(self, *pieces_n: jax.Array) -> Any:
        return stacked(pieces_n, self.first, self.exchange.nodes)

    def rebase(self, mean: Leaves) -> None:
        """Set the parameters, known to all nodes, to which compressed exchanges send differences."""
        if self._compressed:
            self._mean = mean
            self.exchange.rebase(mean)

    def resume(
        self, words_n: Sequence[np.ndarray], sent_words_n: Sequence[np.ndarray], sent_n: Sequence[Leaves], tree: Any
    ) -> None:
        """Continue from what `State.more` held. A pending exchange is started again with its original messages.

        Requests to stop or save are dropped: they concerned the previous run.

        Args:
            words_n: the messages of each node of this process.
            sent_words_n: those of the pending exchange; empty if there is none.
            sent_n: its parameters.
            tree: the structure of the trainable parameters.
        """
        message = lambda words: replace(NodeMessage.of(from_words(words)), stop=0.0, save=0.0)
        self._message_n = [message(words) for words in words_n]
        if sent_n:
            placed = lambda node, leaves: jax.tree.unflatten(tree, [node.put(leaf) for leaf in leaves])
            parts_n = [placed(node, leaves) for node, leaves in zip(self.nodes, sent_n, strict=True)]
            compressed = self._compressed and self.schedule.compresses(last=False)
            self._send(parts_n, [message(words) for words in sent_words_n], compressed)

    def replicas(self, core_n: list[Tree], tail: Any) -> Replicas:
        """What each worker computes with: the parameters of its node."""
        pairs = list(zip(self.nodes, core_n, strict=True))
        stack = lambda *leaf_n: self.workers.stack(
            [piece for node, leaf in zip(self.nodes, leaf_n, strict=True) for piece in node.workers.pieces(leaf)]
        )
        return Replicas(
            [leaves for node, core in pairs for leaves in node.workers.copies(jax.tree.leaves(core[:2]))],
            [piece for node, core in pairs for piece in node.workers.pieces(jax.tree.leaves(core)[0])],
            lambda: jax.tree.map(stack, *(core[:2] for core in core_n)),
        )
