"""The ladder of one kind of device: programs for a few microbatch sizes, compiled ahead, with measured prices."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from hetjax.devices import memory
from hetjax.devices.compile import compile_for, expected
from hetjax.devices.targets import target_of
from hetjax.planning.ladder_costs import PriceList

log = logging.getLogger("hetjax")
Arguments = Callable[[int, jax.Device | None], tuple]  # (rows, device) -> arguments; shapes only when device is None

_ROUNDS, _BUDGET = 12, 0.25  # rounds of timing, at least 3; none is started after this many seconds per rung
_IN_A_ROW, _CHAIN = 16, 0.03  # chunks timed in a row: at most this many, for about this many seconds
_PACE = 0.2  # seconds over which the pace of a process is measured; longer than the period of a CPU quota
_CHUNK_COST_IN_ROWS = 0.25  # if rows are the price, an additional chunk costs this many
_AROUND = (0.9, 0.95, 1.0, 1.05, 1.1)  # a further rung is evaluated at these multiples of the counts
_WORTH_COMPILING = 0.01  # a further rung has to save one percent of the work
_SETTLED = 8  # steps with unchanged counts before a rung is added for them; they are timed, so plans may change
_APART = 8  # factor between the two rungs of a complete ladder where compiling is slow


class Ladder:
    """Programs and prices by rung. A rung that does not fit into memory is dropped with a warning.

    `wanted` holds the rungs of a complete ladder. Training starts with four of them, a factor of four apart; others are
    added between steps if they are predicted to save work at the current counts. Where compiling is slow, as it is for
    accelerators, training starts with the largest that fits, and the ladder is complete with one more.

    Args:
        chunk: The function to compile.
        arguments: Its arguments for a number of rows.
        adders: A program per device that adds the sums of two chunks.
        devices: The devices, all of one kind.
        wanted: The rungs of a complete ladder.
        complete: Whether to compile the complete ladder now.
        priced_by_rows: Whether prices are rows instead of measured seconds.
        slow_compiler: Whether to make do with two rungs.
        held: Bytes on the device besides a chunk's arguments and sums: those of the chunks before it. (The state of the
            optimizer may be sliced between processes, or on the host; a worker that runs out of memory adapts.)
    """

    def __init__(
        self,
        chunk: Callable,
        arguments: Arguments,
        adders: dict[jax.Device, Any],
        devices: Sequence[jax.Device],
        wanted: Sequence[int],
        *,
        complete: bool,
        priced_by_rows: bool,
        slow_compiler: bool = False,
        held: int = 0,
    ):
        self.chunk, self.arguments, self.adders = chunk, arguments, adders
        self.devices, self.wanted = tuple(devices), sorted(wanted)
        self.smallest = self.wanted[0]
        self.there, self.held = target_of(self.devices[0]) is None, held
        self.priced_by_rows = priced_by_rows or not self.there
        self.programs: dict[int, dict[jax.Device, Any]] = {}
        self.patience = 1 if slow_compiler else _SETTLED
        if slow_compiler:
            self._build({self.wanted[-1]})
            (largest,) = self.programs
            self.first = {largest}
            self.wanted = sorted({largest, _nearest(self.wanted, largest / _APART)})
        else:
            self.first = {_nearest(self.wanted, self.wanted[-1] / f) for f in (1, 4, 16, 64)}
        self._build(set(self.wanted) if complete else self.first)
        self.price_list = PriceList({}, 0.0, 0.0)  # until measured

    @property
    def incomplete(self) -> bool:
        """Whether further rungs may be added."""
        return len(self.price_list.prices) < len(self.wanted)

    @property
    def kind(self) -> str:
        """Name of the devices, for messages."""
        return f"{self.devices[0].platform} ({self.devices[0].device_kind})"

    def _build(self, first: set[int]) -> None:
        for rung in sorted(set(self.wanted) - set(self.programs), reverse=True):
            if rung in first or not self.programs:  # if the largest was dropped, the next smaller replaces it
                self._try(rung, self.compile(rung))
        if not self.programs:
            raise self._nothing_fits()
        log.info("Ladder for %s: microbatches of %s rows.", self.kind, ", ".join(map(str, sorted(self.programs))))

    def measure(self, rungs: Sequence[int]) -> PriceList:
        """Measure the prices of these rungs on the first device, except those that run out of memory in a row."""
        rungs = sorted(rungs)
        while rungs:
            try:
                prices, joint = self._prices(rungs)
                return PriceList(prices, joint, unit=prices[max(prices)] / max(prices))
            except Exception as error:
                self._drop(rungs.pop(), "several in a row ran out of memory", error)
        raise self._nothing_fits()

    def compile(self, rung: int) -> dict[jax.Device, Any] | None:
        """Compile the programs of one rung for all devices; None if they do not fit into memory."""
        try:
            with expected():
                programs = compile_for(
                    self.chunk, self.arguments(rung, None), self.devices, name=f"microbatch of {rung} rows"
                )
        except Exception as error:
            self._drop(rung, "compiling it ran out of memory", error)
            return None
        need, have = memory.needed(programs[0]), memory.available(self.devices[0])
        if need is not None and have is not None and need + self.held > have:
            beside = f" beside {self.held / 2**30:.2f} GiB of sums" if self.held else ""
            self._drop(rung, f"it needs {need / 2**30:.2f} GiB{beside} and the device has {have / 2**30:.2f} GiB")
            return None
        return dict(zip(self.devices, programs, strict=True))

    def add(self, rung: int, programs: dict[jax.Device, Any] | None) -> None:
        """Add a compiled rung, priced relative to its nearest rung: timed together, so the machine's load cancels."""
        if self._try(rung, programs):
            known = _nearest(list(self.price_list.prices), rung)
            try:
                now, _ = self._prices([rung, known])
            except Exception as error:
                self._drop(rung, "several in a row ran out of memory", error)
                return
            self.price_list = self.price_list.adding(rung, now[rung] * self.price_list.prices[known] / now[known])

    def _try(self, rung: int, programs: dict[jax.Device, Any] | None) -> bool:
        """Run a rung once, unless this is a target; drop it if it runs out of memory."""
        if programs is None:
            return False
        try:
            if self.there:
                jax.block_until_ready(programs[self.devices[0]](*self.arguments(rung, self.devices[0])))
        except Exception as error:
            self._drop(rung, "a trial run ran out of memory", error)
            return False
        self.programs[rung] = programs
        return True

    def _prices(self, rungs: Sequence[int]) -> tuple[dict[int, float], float]:
        """Seconds (or rows) per chunk of each rung, and for adding one chunk's sums to another's.

        Chunks are timed in a row, as in a local phase: the host runs ahead of the device there, and waiting for each
        chunk would overprice small ones. Rungs take turns, and each is priced by the median of its share in a round:
        on a shared machine the shortest time of each rung is an outlier of its own, and twice as far off.
        """
        if self.priced_by_rows:
            return {rung: rung + _CHUNK_COST_IN_ROWS for rung in rungs}, 0.0
        arguments = {rung: self.arguments(rung, self.devices[0]) for rung in rungs}
        once = {rung: self._chain(rung, arguments[rung], 1) for rung in rungs}
        chunks = {rung: min(max(round(_CHAIN / once[rung]), 1), _IN_A_ROW) for rung in rungs}
        least = min(rungs)
        cases = [(rung, False) for rung in rungs] + [(least, True)]
        until = time.perf_counter() + _BUDGET * len(cases)
        rounds: list[list[float]] = []
        while len(rounds) < 3 or (len(rounds) < _ROUNDS and time.perf_counter() < until):
            rounds.append([self._chain(rung, arguments[rung], chunks[rung], adding) for rung, adding in cases])
        whole_R = np.sum(rounds, axis=1)
        share_C = np.median(np.array(rounds) / whole_R[:, None], axis=0)
        seconds = dict(zip(cases, (share_C * np.median(whole_R)).tolist(), strict=True))
        joint = max(seconds[least, True] - seconds[least, False], 0.0) / chunks[least]
        return {rung: seconds[rung, False] / chunks[rung] for rung in rungs}, joint

    def pace(self) -> float:
        """Samples per second that this process reaches now with its largest microbatch."""
        rung = max(self.programs)
        arguments = self.arguments(rung, self.devices[0])
        chunks = min(max(round(_PACE / self._chain(rung, arguments, 1)), 1), _IN_A_ROW)
        return rung * chunks / self._chain(rung, arguments, chunks)

    def _chain(self, rung: int, arguments: tuple, chunks: int, adding: bool = False) -> float:
        """Seconds of `chunks` chunks in a row, after a first one that warms the caches."""
        device = self.devices[0]
        program, add = self.programs[rung][device], self.adders[device]
        parts = jax.block_until_ready(program(*arguments))
        began = time.perf_counter()
        for _ in range(chunks):
            more = program(*arguments)
            parts = add(parts, more) if adding else more
        jax.block_until_ready(parts)
        return time.perf_counter() - began

    def _drop(self, rung: int, why: str, error: Exception | None = None) -> None:
        if error is not None and not memory.out_of_memory(error):
            raise error
        self.wanted.remove(rung)
        self.programs.pop(rung, None)
        log.warning("A microbatch of %d rows is dropped from the ladder for %s: %s.", rung, self.kind, why)

    def _nothing_fits(self) -> ValueError:
        return ValueError(
            f"Not even a microbatch of {self.smallest} rows fits into the memory of {self.kind}. "
            "Use a smaller model, fewer workers on this host, or smaller samples."
        )

    def below(self, rung: int) -> int | None:
        """The largest rung of at most half as many rows, or else the smallest below `rung`; None if there is none."""
        smaller = [rows for rows in self.price_list.prices if rows < rung]
        return max((rows for rows in smaller if 2 * rows <= rung), default=min(smaller, default=None))

    def next_rung(self, counts: Sequence[int], max_rows: Sequence[int]) -> int | None:
        """The missing rung predicted to save most, at interpolated prices; None if none saves enough.

        Evaluated around the current counts, not only at them: plans avoid counts that waste rows, so a coarse ladder
        shows no waste at its own counts but keeps plans from better counts nearby.
        """
        nearby: dict[int, list[int]] = {limit: [] for limit in max_rows}
        for count, limit in zip(counts, max_rows, strict=True):
            nearby[limit].extend({round(count * factor) for factor in _AROUND} - {0})
        nearby = {limit: counts for limit, counts in nearby.items() if counts}
        if not nearby:  # this kind of device has no samples, such as a slow CPU beside a GPU
            return None

        def cost(prices: PriceList) -> np.ndarray:
            stairs = [prices.staircase(limit, max(counts)).price_N[counts] for limit, counts in nearby.items()]
            return np.concatenate(stairs)

        now, best, chosen = cost(self.price_list), 1 - _WORTH_COMPILING, None
        for rung in sorted(set(self.wanted) - set(self.price_list.prices)):
            share = float(np.mean(cost(self.price_list.adding(rung, self.price_list.guess(rung))) / now))
            if share < best:
                best, chosen = share, rung
        return chosen


def _nearest(rungs: Sequence[int], size: float) -> int:
    return min(rungs, key=lambda rung: abs(rung - size))
