"""The masked and the looped engine: one `shard_map` program over all workers.

Both use a fixed buffer [workers, capacity, ...] and differ in how a worker processes its part:

    masked   All rows at once, with padding masked: the simplest form, whose time does not fall with the count. The only
             engine in which a model may communicate across workers in the forward pass.
    looped   A loop over microbatches with ceil(count / micro) trips and gradients inside the body, so work follows the
             count. For GPU and TPU, and for matmul models on CPU.

With `check_vma=False`, the gradient with respect to replicated parameters stays local to each worker: there is no
implicit psum, which would deadlock in a loop of unequal trip counts, and scans and loops of the user's model work.

Where a worker runs out of memory, the looped engine is compiled again with smaller microbatches and the step run again.
"""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import Future
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from hetjax.adapters.contract import COUNT, POSITION, control
from hetjax.adapters.sync_axis import SyncAxis
from hetjax.data.prefetch import Rows
from hetjax.devices import memory
from hetjax.devices.compile import compile_over, expected
from hetjax.devices.workers import AXIS, Workers
from hetjax.engines.base import Program
from hetjax.engines.clocks import Began, Clocks, LocalResult, queues
from hetjax.planning.limits import Limits
from hetjax.reduce.base import Replicas
from hetjax.reduce.layout import Parts
from hetjax.sampling.order import Span

log = logging.getLogger("hetjax")
Tree = Any


class Spmd:
    """Base class: the buffer and the program over the mesh; the subclasses define the sums of one worker."""

    name: str
    compiling = False

    def __init__(self, program: Program, workers: Workers, clocks: Clocks, *, capacity: int, buffer: int, quantum: int):
        self.program, self.workers, self.clocks = program.for_kinds(workers.own_kinds), workers, clocks
        self.capacity, self.buffer, self.quantum = capacity, buffer, quantum
        self.axis = SyncAxis(AXIS)
        self._run = self._compile()

    def _compile(self) -> Any:
        program, workers = self.program, self.workers
        params_spec = P(AXIS) if program.own_parameters else P()
        body = jax.shard_map(
            self._on_worker,
            mesh=workers.mesh,
            in_specs=(params_spec, params_spec, P(AXIS), P(AXIS)),
            out_specs=P(AXIS),
            check_vma=False,
        )
        put = lambda tree, place: jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), tree)
        width, buffer = len(workers.meshed), (program.block(self.buffer), program.ctl)
        wide = jax.tree.map(lambda x: jax.ShapeDtypeStruct((width, *x.shape), x.dtype), buffer)
        params = put((program.params, program.model_state), workers.replicated)
        if program.own_parameters:
            stacked = lambda x: jax.ShapeDtypeStruct((width, *x.shape[1:]), x.dtype)
            params = put(jax.tree.map(stacked, params), workers.sharded)
        with expected():
            return compile_over(body, (*params, *put(wide, workers.sharded)), workers.meshed, name=self.label)

    def _on_worker(self, params: Tree, model_state: Tree, rows_1: Tree, ctl_1: jax.Array) -> Parts:
        rows, ctl = jax.tree.map(lambda x: x[0], (rows_1, ctl_1))
        parts = self._sums(params, model_state, rows, ctl)
        busy = ctl[COUNT] > 0  # a worker without samples adds zero, whatever its buffer holds
        return tuple(jnp.where(busy, part, 0)[None] for part in parts)

    def _sums(self, params: Tree, model_state: Tree, rows: Tree, ctl: jax.Array) -> Parts:
        raise NotImplementedError

    @property
    def label(self) -> str:
        """Name of the program."""
        return f"{self.buffer} rows, masked"

    def _work(self, count: int) -> int:
        """Rows computed for a count."""
        raise NotImplementedError

    minimum = 0  # smallest count of a worker
    _share, _bucket = 1.0, 0  # work of a row, and which shape it has

    @cached_property
    def _limits(self) -> Limits:
        workers = len(self.workers)
        return Limits(
            capacity_W=np.full(workers, self.capacity, np.int64),
            minimum_W=np.full(workers, self.minimum, np.int64),
            quantum=self.quantum,
            kind_W=np.zeros(workers, np.int64),
            stairs=(self._share * np.array([0, *(self._work(n) for n in range(1, self.capacity + 1))], np.float64),),
            bucket=self._bucket,
        )

    def price_like(self, reference: Spmd, share: float, bucket: int) -> None:
        self._share, self._bucket = share, bucket
        self.__dict__.pop("_limits", None)

    def limits(self) -> Limits:
        return self._limits

    def rows_of(self, worker: int, count: int) -> int:
        return self._work(count)

    def pack(self, rows: Rows, step: Span, counts_W: np.ndarray, seed: int) -> tuple[list[int], Tree, jax.Array]:
        starts_W = step.start + np.cumsum(counts_W) - counts_W
        local = self.workers.local
        blocks = [rows.block(int(starts_W[i]), self.buffer) for i in local]
        ctls = [control(int(counts_W[i]), seed=seed, epoch=step.epoch, position=int(starts_W[i])) for i in local]
        wide = jax.tree.map(lambda *parts: self.workers.from_host(parts), *blocks)
        return [int(counts_W[i]) for i in local], wide, self.workers.from_host(ctls)

    def start(self, replicas: Replicas, packed: tuple[list[int], Tree, jax.Array]) -> list[Future[LocalResult]]:
        counts, rows, ctl = packed
        began_w = [Began(ready, queues(self.workers.own[0])) for ready in replicas.ready_w]
        phase = _Phase(self, (*replicas.on_mesh(), rows, ctl), began_w)
        return self.clocks.start([partial(phase.finish, k, count) for k, count in enumerate(counts)])

    def dispatch(self, arguments: tuple) -> list[Parts]:
        """Run the program; returns the sums of each local worker, which may not be ready."""
        return self.workers.copies(self._run(*arguments))

    def shrink(self, error: Exception) -> None:
        """Compute fewer rows at a time after running out of memory; raises if it cannot, or for another error."""
        if not memory.out_of_memory(error):
            raise error
        raise MemoryError(
            f"The {self.name} engine ran out of memory with a buffer of {self.buffer} rows per worker, which it "
            "computes at once. Give a smaller capacity or max_rows, or use engine='chunked' or 'looped'."
        ) from error

    def grow(self, counts_W: np.ndarray | None) -> None:
        """Does nothing: one program serves all counts."""

    def close(self) -> None:
        """Does nothing: there are no threads."""


class MaskedEngine(Spmd):
    """Computes the whole buffer and masks the padding."""

    name = "masked"

    def __init__(self, program: Program, workers: Workers, clocks: Clocks, *, capacity: int, quantum: int = 1):
        buffer = -(-capacity // quantum) * quantum
        self.minimum = quantum  # the whole buffer is computed anyway: an idle worker would save no time
        super().__init__(program, workers, clocks, capacity=capacity, buffer=buffer, quantum=quantum)

    def _sums(self, params: Tree, model_state: Tree, rows: Tree, ctl: jax.Array) -> Parts:
        with self.axis.allowed():
            return self.program.row_sums(params, model_state, rows, ctl)

    def _work(self, count: int) -> int:
        return self.buffer  # padding is computed too


class LoopedEngine(Spmd):
    """Loops over as many microbatches as the count needs."""

    name = "looped"

    def __init__(
        self, program: Program, workers: Workers, clocks: Clocks, *, capacity: int, micro: int, quantum: int = 1
    ):
        self.micro = -(-micro // quantum) * quantum
        buffer = -(-capacity // self.micro) * self.micro
        super().__init__(program, workers, clocks, capacity=capacity, buffer=buffer, quantum=quantum)

    def _sums(self, params: Tree, model_state: Tree, rows: Tree, ctl: jax.Array) -> Parts:
        micro = self.micro

        def body(trip: jax.Array, sums: Parts) -> Parts:
            start = trip * micro
            block = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, start, micro), rows)
            done = start.astype(jnp.uint32)
            part = ctl.at[COUNT].set(jnp.minimum(ctl[COUNT] - done, micro)).at[POSITION].add(done)
            return jax.tree.map(jnp.add, sums, self.program.row_sums(params, model_state, block, part))

        trips = ((ctl[COUNT] + (micro - 1)) // micro).astype(jnp.int32)
        return jax.lax.fori_loop(0, trips, body, tuple(part[0] for part in self.program.zeros()))

    @property
    def label(self) -> str:
        return f"loop over {self.micro} rows"

    def _work(self, count: int) -> int:
        return -(-count // self.micro) * self.micro

    def shrink(self, error: Exception) -> None:
        if not memory.out_of_memory(error):
            raise error
        # The buffer stays, as rows are packed for it ahead: smaller microbatches divide it.
        parts = self.micro // self.quantum
        smaller = max((self.quantum * n for n in range(1, parts // 2 + 1) if parts % n == 0), default=None)
        if smaller is None or self.workers.several_processes:
            why = "smaller ones are impossible" if smaller is None else "one process alone cannot make them smaller"
            raise MemoryError(
                f"The looped engine ran out of memory with microbatches of {self.micro} rows, and {why}. Give "
                "engine=hetjax.Looped(micro=...) or a smaller capacity, or use a smaller model or smaller samples."
            ) from error
        log.warning(
            "The looped engine ran out of memory with microbatches of %d rows. It is compiled again for %d rows, and "
            "the step is run again with the same samples.",
            self.micro, smaller,
        )  # fmt: skip
        self.micro = smaller
        self._run = self._compile()
        self.__dict__.pop("_limits", None)  # they depend on the microbatch


class _Phase:
    """The local phases of one step: dispatched as one program, and again where a worker runs out of memory."""

    def __init__(self, engine: Spmd, arguments: tuple, began_w: list[Began]):
        self.engine, self.arguments, self.began_w = engine, arguments, began_w
        self.attempts, self._lock = 0, threading.Lock()
        self._dispatch()

    def _dispatch(self) -> None:
        while True:
            self.attempts += 1
            self.began = time.perf_counter()
            try:
                self.sums_w = self.engine.dispatch(self.arguments)
                return
            except Exception as error:
                self.engine.shrink(error)

    def finish(self, k: int, count: int) -> LocalResult:
        """Wait for the sums of local worker k, which has `count` samples."""
        while True:
            with self._lock:
                attempt, began, sums, rows = self.attempts, self.began, self.sums_w[k], self.engine.rows_of(k, count)
            try:
                began = max(began, self.began_w[k].time())
                result = self.engine.clocks.finish(k, rows, began, sums)
                return result if attempt == 1 else replace(result, as_planned=False)
            except Exception as error:
                if not memory.out_of_memory(error):
                    raise
                with self._lock:
                    if attempt == self.attempts:  # otherwise another worker's thread has dispatched it again
                        self.engine.shrink(error)
                        self._dispatch()
