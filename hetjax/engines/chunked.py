"""The chunked engine: the host drives each worker through a short ladder of compiled microbatch sizes.

There is no control flow inside XLA, so convolutions run at native speed, and workers may be of different kinds. A count
is covered by the cheapest sequence of microbatches (chunks) at measured prices; only the last chunk is padded. The sums
of further chunks are added to those of the first in place (donated). Outputs of rows (predictions) are kept chunk by
chunk instead.

A worker that runs out of memory computes the same samples again in smaller chunks, and keeps to those from then on.
"""

from __future__ import annotations

import logging
import operator
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import numpy as np

from hetjax import processes
from hetjax.adapters.contract import COUNT, EPOCH, POSITION, SEED, control
from hetjax.data.prefetch import Rows
from hetjax.devices import memory
from hetjax.devices.compile import compile_for, expected
from hetjax.devices.workers import Workers, device_kind, on_cpu
from hetjax.engines.base import Program
from hetjax.engines.clocks import Began, Clocks, LocalResult, queues
from hetjax.engines.ladder import Ladder
from hetjax.planning.ladder_costs import PriceList, common_rungs, geometric_rungs
from hetjax.planning.limits import Limits
from hetjax.reduce.base import Replicas
from hetjax.reduce.layout import Parts
from hetjax.sampling.order import Span

log = logging.getLogger("hetjax")
Tree = Any

_UNLIKE = 2.0  # ratio of speeds from which the first plan follows them
_SMALLEST = 4  # rows of the smallest rung with several processes: the granularity of counts


@dataclass(frozen=True)
class Chunk:
    """One microbatch: its rung, its rows and its control vector."""

    rung: int
    rows: Tree
    ctl: Any


class ChunkedEngine:
    """One ladder per kind of device; see `Chunked` for the user's options.

    Args:
        program: The computation.
        workers: All workers.
        clocks: Time the local phases.
        capacity_W: The largest count of each worker.
        quantum: Counts are multiples of it.
        max_rows_W: The largest chunk of each worker, in rows. Default: its capacity.
        rungs: Rows of the chunks to compile; None: chosen automatically.
        complete: The ladder does not grow.
        priced_by_rows: Chunks are priced by their rows instead of measured.
    """

    name = "chunked"
    compiling = False  # a compile competes with CPU workers, so their times are meaningless

    def __init__(
        self,
        program: Program,
        workers: Workers,
        clocks: Clocks,
        *,
        capacity_W: np.ndarray,
        quantum: int = 1,
        max_rows_W: np.ndarray | None = None,
        rungs: Sequence[int] | None = None,
        complete: bool = False,
        priced_by_rows: bool = False,
    ):
        self.program, self.workers, self.clocks, self.quantum = program, workers, clocks, quantum
        self.capacity_W = np.asarray(capacity_W, np.int64)
        self.max_rows_W = np.minimum(self.capacity_W, self.capacity_W if max_rows_W is None else max_rows_W)
        self.fitting_W = self.max_rows_W.copy()  # the same, but falls where this process runs out of memory
        self._lock = threading.Lock()  # limits change between steps, and on the thread of a worker out of memory
        self.devices = list(workers.own)
        several = workers.several_processes  # all need the same rungs, so the ladder does not grow
        self.ladders: dict[str, Ladder] = {}
        self._zeros: dict[jax.Device, Any] = {}
        self._add: dict[jax.Device, Any] = {}
        for kind in dict.fromkeys(map(device_kind, self.devices)):
            devices = [d for d in self.devices if device_kind(d) == kind]
            if program.keeps_rows:  # one tuple of parts after the other
                self._zeros.update(dict.fromkeys(devices, tuple))
                self._add.update(dict.fromkeys(devices, operator.add))
            else:
                with expected():
                    sums = jax.eval_shape(program.zeros)
                    zeros = compile_for(program.zeros, (), devices, name="no samples")
                    add = compile_for(_add, (sums, sums), devices, donate=(0,), name="add two microbatches")
                    self._zeros.update(zip(devices, zeros, strict=True))
                    self._add.update(zip(devices, add, strict=True))
            self.ladders[kind] = Ladder(
                _chunk_of(program.for_kinds([kind])),
                self._arguments,
                self._add,
                devices,
                rungs or self._candidates(kind, several),
                complete=complete or rungs is not None or several,
                priced_by_rows=priced_by_rows,
                slow_compiler=rungs is None and not on_cpu(kind),
                held=0 if program.keeps_rows else memory.size(jax.eval_shape(program.zeros)),
            )
        gather = processes.gather if several and not workers.elastic else lambda value: [value]
        self._remote = self._price(gather)
        self._pace = {} if program.keeps_rows else self._measured_pace()
        self._rate_W = self._expected_rates(gather(self._pace))
        self._background = ThreadPoolExecutor(1, thread_name_prefix="hetjax-ladder")
        self.growing: Future | None = None  # background search for a further rung, and its compile
        self._counts_W, self._settled = np.zeros(len(workers), np.int64), 0
        self._units: dict[str, float] = {}  # price of one unit of work by kind, if not that of the kind's own list
        self._bucket = 0
        self._update_limits()

    def _candidates(self, kind: str, several: bool) -> list[int]:
        """Rungs at every worker's limit, at the equal share, and in a geometric series below the largest.

        Compilers for accelerators are slow: there, an equal share and fractions of it.
        With several processes the whole ladder is compiled before the first step, so it is coarse: up to twice an equal
        share, with small rungs to cover the counts in between.
        """
        limits = [rows for rows, worker in zip(self.max_rows_W, self.workers.members, strict=True)
                  if worker.kind == kind]  # fmt: skip
        share = -(-int(self.capacity_W.max()) // self.workers.expected)
        share = -(-share // self.quantum) * self.quantum  # every worker gets this before the first timing
        if not on_cpu(kind):  # the ladder chooses two of them
            return geometric_rungs(min(share, max(limits)), self.quantum, ratio=2.0, span=share)
        if several:
            top = min(max(limits), max(2 * share, _SMALLEST))
            return geometric_rungs(top, self.quantum, ratio=2**0.5, span=max(1, top // _SMALLEST))
        tops = {max(self.quantum, int(rows) // self.quantum * self.quantum) for rows in limits}
        return sorted({*tops, min(share, max(tops)), *geometric_rungs(max(tops), self.quantum)})

    # -- programs --

    def _arguments(self, rows: int, device: jax.Device | None) -> tuple:
        p = self.program
        shapes = (jax.tree.leaves((p.params, p.model_state)), p.block(rows), p.ctl)
        if device is None:
            return shapes
        values = jax.tree.map(lambda x: jax.device_put(np.zeros(x.shape, x.dtype), device), shapes[:-1])
        return *values, control(rows, seed=0, epoch=0, position=0)

    # -- prices and growth --

    def _price(self, gather: Callable[[Any], list[Any]]) -> dict[str, PriceList]:
        """Set prices that all processes agree on: one process measures each kind while the others wait.

        Returns the prices of kinds that only other processes have.
        """
        have = {kind: sorted(map(int, ladder.programs)) for kind, ladder in self.ladders.items()}
        have_by_process = gather(have)
        me = processes.index() if len(have_by_process) > 1 else 0
        mine = {kind: rungs for kind, (owner, rungs) in common_rungs(have_by_process).items() if owner == me}
        measured = {kind: self.ladders[kind].measure(rungs).plain() for kind, rungs in mine.items()}
        agreed: dict[str, PriceList] = {}
        for prices in gather(measured):
            agreed |= {kind: PriceList.from_plain(plain) for kind, plain in prices.items()}
        for kind, ladder in self.ladders.items():
            ladder.price_list = agreed.pop(kind)
        return agreed

    def _measured_pace(self) -> dict[str, float]:
        """Samples per second of each kind of device in this process; nothing where speeds are simulated, or alike."""
        if any(ladder.priced_by_rows for ladder in self.ladders.values()):
            return {}
        if len(self.workers.kinds) == 1 and not self.workers.several_processes:
            return {}
        return {kind: float(f"{ladder.pace():.3g}") for kind, ladder in self.ladders.items()}

    def _expected_rates(self, pace_P: Sequence[dict[str, float]]) -> np.ndarray | None:
        """Relative speed of each worker, for the first plan; None where speeds are about the same, or simulated.

        Processes measure at the same time, as they compute: those with the same kind of device may differ, too.
        """
        if not all(pace_P) or len(pace_P) < len(set(self.workers.process_W.tolist())) > 1:
            return None
        of = lambda worker: pace_P[worker.process if len(pace_P) > 1 else 0][worker.kind]
        rate_W = np.array([of(worker) for worker in self.workers.members])
        return rate_W / rate_W.max() if rate_W.max() > _UNLIKE * rate_W.min() else None

    def offer(self) -> dict[str, Any]:
        """What the other members of an elastic fleet have to know of this engine, as JSON values."""
        own = self.workers.local
        return {
            "capacity": [int(self.capacity_W[i]) for i in own],
            "max_rows": [int(self.fitting_W[i]) for i in own],  # from the next membership on plans know it, too
            "rungs": {kind: sorted(map(int, ladder.programs)) for kind, ladder in self.ladders.items()},
            "prices": {kind: prices.plain() for kind, prices in self._price_lists().items()},
            "pace": self._pace,
        }

    def follow(self, workers: Workers, offer_P: Sequence[dict[str, Any]] = (), source: int = 0) -> None:
        """Go on with the workers of another membership; nothing compiles.

        Args:
            workers: the workers.
            offer_P: what their processes offer; none for an engine that does not train, whose prices decide nothing.
            source: the process whose prices count; a kind that it does not know is priced by the first that has it.
        """
        rows, capacity = int(self.max_rows_W.min()), int(self.capacity_W.max())
        fitting_w = self.fitting_W[list(self.workers.local)]
        self.workers = self.clocks.workers = workers
        if not offer_P:
            self.capacity_W, self.max_rows_W = np.full(len(workers), capacity), np.full(len(workers), rows)
            self.fitting_W, self._remote, self._rate_W = self.max_rows_W.copy(), {}, None
            self.fitting_W[list(workers.local)] = np.minimum(fitting_w, rows)
            with self._lock:
                self._update_limits()
            return
        joined = lambda name: np.array([value for offer in offer_P for value in offer[name]], np.int64)
        self.capacity_W, self.max_rows_W = joined("capacity"), joined("max_rows")
        self.fitting_W = self.max_rows_W.copy()
        prices: dict[str, Any] = {}
        for offer in [offer_P[source], *offer_P]:
            prices = offer["prices"] | prices
        common = common_rungs([offer["rungs"] for offer in offer_P])
        self._remote = {}
        for kind in workers.kinds:
            agreed = PriceList.from_plain(prices[kind]).only(common[kind][1])
            if kind in self.ladders:
                self.ladders[kind].price_list = agreed
            else:
                self._remote[kind] = agreed
        self._rate_W = self._expected_rates([offer["pace"] for offer in offer_P])
        self._counts_W = np.zeros(len(workers), np.int64)
        with self._lock:
            self._update_limits()

    def _update_limits(self) -> None:
        """Rebuild the limits of plans, which all processes agree on, and the price staircases of the workers."""
        kind_W = [worker.kind for worker in self.workers.members]
        grouped = lambda rows_W: list(zip(kind_W, rows_W.tolist(), self.capacity_W.tolist(), strict=True))
        agreed_W, own_W = grouped(self.max_rows_W), grouped(self.fitting_W)
        lists = self._price_lists()
        stairs = {g: lists[g[0]].staircase(g[1], g[2]) for g in dict.fromkeys(agreed_W + own_W)}
        groups = list(dict.fromkeys(agreed_W))
        self._stairs_W = [stairs[g] for g in own_W]
        self._limits = Limits(
            capacity_W=self.capacity_W,
            minimum_W=np.zeros(len(self.workers), np.int64),
            quantum=self.quantum,
            kind_W=np.array([groups.index(g) for g in agreed_W], np.int64),
            stairs=tuple(stairs[g].price_N / self._units.get(g[0], lists[g[0]].unit) for g in groups),
            bucket=self._bucket,
            rate_W=self._rate_W,
        )

    def _price_lists(self) -> dict[str, PriceList]:
        own = {kind: ladder.price_list for kind, ladder in self.ladders.items()}
        unknown = dict.fromkeys(self.workers.kinds, next(iter(own.values())))  # nothing is planned by these
        return unknown | own | self._remote

    def price_like(self, reference: ChunkedEngine, share: float, bucket: int) -> None:
        by_rows = any(ladder.priced_by_rows for ladder in self.ladders.values())
        lists = reference._price_lists().items()
        self._units = {kind: prices.unit / (share if by_rows else 1.0) for kind, prices in lists}
        self._bucket = bucket
        self._update_limits()

    def rate_of(self, kind: str) -> float:
        """Samples per second of a device of this kind, by its prices."""
        return 1.0 / self._price_lists()[kind].unit

    def limits(self) -> Limits:
        return self._limits

    def rows_of(self, worker: int, count: int) -> int:
        return self._stairs_W[worker].rows(count)

    def grow(self, counts_W: np.ndarray | None) -> None:
        """Add a rung that has been compiled, or start the search for the next one.

        The search and the compile run in the background, once the counts have settled.
        """
        if self.growing is not None and self.growing.done():
            found, self.growing, self.compiling = self.growing.result(), None, False
            if found is not None:
                self._join(*found)
                self._settled = 0  # a further rung may pay for the same counts
        incomplete = [kind for kind, ladder in self.ladders.items() if ladder.incomplete]
        if self.growing is None and incomplete and counts_W is not None:
            self._settled = self._settled + 1 if np.array_equal(counts_W, self._counts_W) else 0
            self._counts_W = counts_W
            if due := [kind for kind in incomplete if self._settled == self.ladders[kind].patience]:
                self.growing = self._background.submit(self._next_rung, counts_W, due)

    def settle(self, counts_W: np.ndarray) -> None:
        """Grow the ladder for these counts, in the foreground, until no further rung saves work."""
        if self.growing is not None:
            self.growing.result()
            self.grow(counts_W)
        while (found := self._next_rung(counts_W, list(self.ladders))) is not None:
            self._join(*found)
        self.compiling = False

    def _join(self, ladder: Ladder, rung: int, programs: Any) -> None:
        ladder.add(rung, programs)
        with self._lock:
            self._update_limits()

    def _next_rung(self, counts_W: np.ndarray, kinds: Sequence[str]) -> tuple[Ladder, int, Any] | None:
        for kind, ladder in ((kind, self.ladders[kind]) for kind in kinds):
            mine = [i for i, worker in enumerate(self.workers.members) if worker.kind == kind]
            rung = ladder.next_rung([int(counts_W[i]) for i in mine], [int(self.max_rows_W[i]) for i in mine])
            if rung is not None:
                self.compiling = any(device.platform == "cpu" for device in self.devices)
                return ladder, rung, ladder.compile(rung)
        return None

    # -- a step --

    def pack(self, rows: Rows, step: Span, counts_W: np.ndarray, seed: int) -> list[list[Chunk]]:
        starts_W = step.start + np.cumsum(counts_W) - counts_W
        return [self.chunks(rows, step.epoch, i, int(starts_W[i]), int(counts_W[i]), seed) for i in self.workers.local]

    def chunks(self, rows: Rows, epoch: int, worker: int, start: int, count: int, seed: int) -> list[Chunk]:
        """Lay out `count` samples from position `start` of an epoch for one worker."""
        device, chunks, done = self.workers.device(worker), [], 0
        for rung in self._stairs_W[worker].chunks(count):
            ctl = control(min(rung, count - done), seed=seed, epoch=epoch, position=start + done)
            block = rows.block(start + done, rung)
            if queues(device):  # CPU programs read host memory directly; others get it ahead of time
                block, ctl = jax.device_put((block, ctl), device)
            chunks.append(Chunk(rung, block, ctl))
            done += rung
        return chunks

    def start(self, replicas: Replicas, packed: list[list[Chunk]]) -> list[Future[LocalResult]]:
        return self.clocks.start([partial(self._phase_of, k, chunks, replicas) for k, chunks in enumerate(packed)])

    def _phase_of(self, k: int, chunks: list[Chunk], replicas: Replicas) -> LocalResult:
        """A worker without samples does nothing: its parameters are not even copied to its device."""
        if not chunks and not self.program.keeps_rows:
            now = time.perf_counter()
            return LocalResult((), 0, now, now)
        return self.phase(k, chunks, replicas.leaves_w[k], replicas.ready_w[k])

    def phase(self, k: int, chunks: list[Chunk], leaves: list[jax.Array], ready: jax.Array) -> LocalResult:
        """Run the local phase of local worker k on the calling thread, with parameters on its device."""
        worker, fitting = self.workers.local[k], chunks
        while True:
            fitting = self._refit(worker, fitting)
            try:
                result = self._attempt(k, fitting, leaves, ready)
                return result if fitting is chunks else replace(result, as_planned=False)
            except Exception as error:
                if not chunks or not memory.out_of_memory(error):
                    raise
                self._lower(worker, max(chunk.rung for chunk in fitting), error)

    def _attempt(self, k: int, chunks: list[Chunk], leaves: list[jax.Array], ready: jax.Array) -> LocalResult:
        device = self.devices[k]
        programs = self.ladders[device_kind(device)].programs
        began = Began(ready, queues(device))
        parts: Parts | None = None
        for chunk in chunks:
            more = programs[chunk.rung][device](leaves, chunk.rows, chunk.ctl)
            parts = more if parts is None else self._add[device](parts, more)
            began.dispatched()
        if parts is None:
            parts = self._zeros[device]()
        return self.clocks.finish(k, sum(chunk.rung for chunk in chunks), began.time(), parts)

    # -- out of memory --

    def _lower(self, worker: int, rung: int, error: Exception) -> None:
        """Keep a worker to smaller chunks than `rung` rows, which did not fit into its memory."""
        device = self.workers.device(worker)
        limit = self.ladders[device_kind(device)].below(rung)
        if limit is None:
            which = "all processes have compiled" if self.workers.several_processes else "is compiled"
            raise MemoryError(
                f"Worker {worker} ({device}) ran out of memory with a microbatch of {rung} rows, the smallest that "
                f"{which}. Give smaller ones (engine=hetjax.Chunked(rungs=[...])), use a smaller model or smaller "
                "samples, or leave this device out."
            ) from error
        several = self.workers.several_processes
        log.warning(
            "Worker %d (%s) ran out of memory with a microbatch of %d rows. It runs the step again with the same "
            "samples, and from now on computes at most %d rows at a time.%s",
            worker, device, rung, limit, " Plans still assume the larger ones: all processes agreed on them." * several,
        )  # fmt: skip
        with self._lock:
            self.fitting_W[worker] = limit
            if not several:
                self.max_rows_W[worker] = limit
            self._update_limits()

    def _refit(self, worker: int, chunks: list[Chunk]) -> list[Chunk]:
        """Lay the samples of chunks out anew if some no longer fit into the worker's memory."""
        if all(chunk.rung <= self._stairs_W[worker].rungs[-1] for chunk in chunks):
            return chunks
        fitting = []
        for chunk in chunks:
            rows, ctl = jax.device_get((chunk.rows, chunk.ctl))
            count, seed, epoch, start = (int(ctl[i]) for i in (COUNT, SEED, EPOCH, POSITION))
            fitting += self.chunks(Rows(rows, start), epoch, worker, start, count, seed)
        return fitting

    def close(self) -> None:
        self._background.shutdown(wait=True, cancel_futures=True)


def _chunk_of(program: Program) -> Callable[[list[jax.Array], Tree, jax.Array], Parts]:
    """The function to compile: the sums over rows from the leaves of the parameters and the model state."""
    tree = jax.tree.structure((program.params, program.model_state))

    def chunk(leaves: list[jax.Array], rows: Tree, ctl: jax.Array) -> Parts:
        params, model_state = jax.tree.unflatten(tree, leaves)
        return tuple(part[None] for part in program.row_sums(params, model_state, rows, ctl))

    return chunk


def _add(parts: Parts, more: Parts) -> Parts:
    return jax.tree.map(jax.lax.add, parts, more)
