"""The ladder of one kind of device: chunk programs of a few fixed sizes, compiled ahead and priced by a stopwatch."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from hetjax.devices import memory
from hetjax.devices.compile import compile_for, expected
from hetjax.planning.ladder_costs import PriceList

log = logging.getLogger("hetjax")
Arguments = Callable[[int, jax.Device | None], tuple]  # (rows, device) -> arguments; shapes only when device is None

_ROUNDS, _BUDGET = 12, 0.25  # time every rung so often, or until that has taken so many seconds each; thrice at least
_IN_A_ROW, _CHAIN = 16, 0.03  # chunks timed in a row: at most so many, and for so many seconds
_CHUNK_COST_IN_ROWS = 0.25  # where rows are the price, one more chunk is still not quite free
_AROUND = (0.9, 0.95, 1.0, 1.05, 1.1)  # where a further rung is judged, in counts
_WORTH_COMPILING = 0.01  # a further rung has to save one per cent of the work


class Ladder:
    """Programs and prices by rung. A rung that does not fit into memory is dropped with a sentence.

    `wanted` are the rungs a complete ladder would have. Training starts with four of them, a factor of four apart, and
    takes more into use between steps when they promise to save work at the present counts.
    """

    def __init__(
        self,
        chunk: Callable,
        arguments: Arguments,
        join: dict[jax.Device, Any],
        devices: Sequence[jax.Device],
        wanted: Sequence[int],
        *,
        complete: bool,
        priced_by_rows: bool,
    ):
        self.chunk, self.arguments, self.join = chunk, arguments, join
        self.devices, self.wanted = tuple(devices), sorted(wanted)
        self.priced_by_rows = priced_by_rows
        self.programs: dict[int, dict[jax.Device, Any]] = {}
        first = set(self.wanted) if complete else {_nearest(self.wanted, self.wanted[-1] / f) for f in (1, 4, 16, 64)}
        self._build(first)
        self.list = PriceList({}, 0.0, 0.0)  # until it is measured

    @property
    def kind(self) -> str:
        return f"{self.devices[0].platform} ({self.devices[0].device_kind})"

    def _build(self, first: set[int]) -> None:
        smallest = self.wanted[0]
        for rung in sorted(self.wanted, reverse=True):
            if rung in first or not self.programs:  # when the largest was dropped, the next smaller takes its place
                self._try(rung, self.compile(rung))
        if not self.programs:
            raise ValueError(
                f"Not even a chunk of {smallest} rows fits into the memory of {self.kind}. "
                "Use a smaller model, fewer workers on this host, or smaller samples."
            )
        log.info("Ladder for %s: chunks of %s rows.", self.kind, ", ".join(map(str, sorted(self.programs))))

    def measure(self, rungs: Sequence[int]) -> PriceList:
        """The prices of these rungs, on the first of the devices."""
        prices, joint = self._prices(rungs)
        return PriceList(prices, joint, unit=prices[max(prices)] / max(prices))

    def compile(self, rung: int) -> dict[jax.Device, Any] | None:
        """The programs of one rung for all devices, not yet in use; None if they would not fit into memory."""
        try:
            with expected():
                programs = compile_for(self.chunk, self.arguments(rung, None), self.devices)
        except Exception as error:
            self._drop(rung, "compiling it ran out of memory", error)
            return None
        need, have = memory.needed(programs[0]), memory.available(self.devices[0])
        if need is not None and have is not None and need > have:
            self._drop(rung, f"it needs {need / 2**30:.2f} GiB and the device has {have / 2**30:.2f} GiB")
            return None
        return dict(zip(self.devices, programs, strict=True))

    def add(self, rung: int, programs: dict[jax.Device, Any] | None) -> None:
        """Take a compiled rung into use, priced side by side with the rung next to it, whatever the machine does."""
        if self._try(rung, programs):
            known = _nearest(list(self.list.prices), rung)
            now, _ = self._prices([rung, known])
            self.list = self.list.adding(rung, now[rung] * self.list.prices[known] / now[known])

    def _try(self, rung: int, programs: dict[jax.Device, Any] | None) -> bool:
        """A first run; a rung that runs out of memory is dropped."""
        if programs is None:
            return False
        try:
            jax.block_until_ready(programs[self.devices[0]](*self.arguments(rung, self.devices[0])))
        except Exception as error:
            self._drop(rung, "a trial run ran out of memory", error)
            return False
        self.programs[rung] = programs
        return True

    def _prices(self, rungs: Sequence[int]) -> tuple[dict[int, float], float]:
        """The seconds of a chunk of each rung, and of adding one chunk's sums to another's; or rows.

        Chunks are timed in a row, as in a phase: there the host is ahead of the device, and a wait for every single one
        would make the small ones look dear. All take turns, and what counts is the median share of a rung in its round:
        on a shared machine the shortest time of each is that of another lucky moment, and twice as far off.
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

    def _chain(self, rung: int, arguments: tuple, chunks: int, adding: bool = False) -> float:
        """Seconds of so many chunks one after the other, behind a first one that brings everything into the caches."""
        device = self.devices[0]
        program, join = self.programs[rung][device], self.join[device]
        parts = jax.block_until_ready(program(*arguments))
        began = time.perf_counter()
        for _ in range(chunks):
            more = program(*arguments)
            parts = join(parts, more) if adding else more
        jax.block_until_ready(parts)
        return time.perf_counter() - began

    def _drop(self, rung: int, why: str, error: Exception | None = None) -> None:
        if error is not None and not _out_of_memory(error):
            raise error
        self.wanted.remove(rung)
        log.warning("A chunk of %d rows is left out of the ladder for %s: %s.", rung, self.kind, why)

    def next_rung(self, counts: Sequence[int], max_rows: Sequence[int]) -> int | None:
        """The missing rung that promises to save most, at interpolated prices; None if none does.

        Judged around the present counts, not only at them: plans avoid counts that waste rows, so a coarse ladder
        shows no waste where it is, but keeps the plan from better counts nearby.
        """
        places: dict[int, list[int]] = {limit: [] for limit in max_rows}
        for count, limit in zip(counts, max_rows, strict=True):
            places[limit].extend({round(count * factor) for factor in _AROUND} - {0})
        places = {limit: counts for limit, counts in places.items() if counts}

        def cost(prices: PriceList) -> np.ndarray:
            stairs = [prices.staircase(limit, max(counts)).price_N[counts] for limit, counts in places.items()]
            return np.concatenate(stairs)

        now, best, chosen = cost(self.list), 1 - _WORTH_COMPILING, None
        for rung in sorted(set(self.wanted) - set(self.list.prices)):
            share = float(np.mean(cost(self.list.adding(rung, self.list.guess(rung))) / now))
            if share < best:
                best, chosen = share, rung
        return chosen


def _nearest(rungs: Sequence[int], size: float) -> int:
    return min(rungs, key=lambda rung: abs(rung - size))


def _out_of_memory(error: Exception) -> bool:
    return isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error) or "out of memory" in str(error).lower()
