"""Recovery: what the members of an elastic fleet do when one is lost, leaves or joins.

All of it happens between two steps, from the view of the training loop. A member that finds out, wherever it waits for
another one, enters the next generation and settles with the others:

    1  every member says which steps it has made, and what it holds of the state after them
    2  all go on from the newest step of which all pieces are left: who lacks parameters or pieces gets them
    3  workers, prices, controller and the owners of pieces follow the members
    4  steps that some had made, or started, are done again with the same samples

Members are lost at any time. Others are let in before the sum of a step, the same one in all members: each announces
the generation that lets them in with its sums, and when all have announced it, all enter it before the next sum. So
whoever joins finds the others neither evaluating nor saving, nor about to do so after a step that it has not made.

A step that one member has made is thus taken over by the others, or if a piece of it is lost with its holders, done
again by all. The state before a step is kept until all have made it, so there is always one to go back to.

What is done by all outside of steps (an evaluation, a checkpoint) ends when all have done it, and is done again if a
member is lost before.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from hetjax import presets, processes
from hetjax.data.batches import HostBatch
from hetjax.fleet.elastic import GenerationChanged
from hetjax.pipeline import Pipeline
from hetjax.planning.controllers.base import Plan
from hetjax.reduce.layout import LEAVING
from hetjax.sampling.order import PlannedStep, Span
from hetjax.state import LiveState, State

log = logging.getLogger("hetjax")
T = TypeVar("T")
_LOST = "The optimizer state of some parameters was lost with all members that held it."
Row = Mapping[str, Any]  # what a member says of itself


class StateLost(RuntimeError):
    """The optimizer state of some parameters was lost with all its holders."""


class Left(SystemExit):
    """This process has left an elastic fleet, as it was asked to; the run goes on."""

    def __init__(self, message: str):
        super().__init__(0)
        self.message = message

    def __str__(self) -> str:
        return self.message


@dataclass(frozen=True)
class _Kept:
    """A step that may have to be done again, and the cursor before it."""

    batch: HostBatch
    span: Span
    cursor: int


class Recovery:
    """Carries a step over changes of the membership.

    Args:
        step: the `hetjax.Step`.
        link: joins this process with the others (`hetjax.fleet.elastic`).
    """

    def __init__(self, step: Any, link: Any):
        presets.check_elastic(step)
        self.step, self.link = step, link
        self.pipeline: Pipeline | None = None
        self.events: list[dict[str, Any]] = []  # changes of the membership; seconds: since the step before
        self._reported = 0  # number of them that a record has named
        self.stop = ""  # why the run ends early
        self.terms: dict[str, Any] = {}  # of the training loop, the same for all members
        self._settled: Any = None  # the last generation in which all was settled
        self._new = True  # has not settled with the others since the start, or since it went back
        self._fits = 0  # number of times that this run has begun; 0: not settled with others yet
        self.read = -1  # the last step whose record a member had read before all went back, or this one joined
        self._kept: dict[int, _Kept] = {}  # by step
        self._cursors: dict[int, int] = {}  # by number of steps made
        self._members_W = [[link.number, i] for i in range(len(step.workers.own))]
        self.planned_for = 0  # the generation of the last plan
        self._collectives, self._inside, self._done = 0, False, False

    @property
    def _reduce(self) -> Any:
        assert self.pipeline is not None
        return self.pipeline.reduce

    # -- around what exchanges something --

    def begin(self, pipeline: Pipeline, cursor: int, terms: Mapping[str, Any]) -> int:
        """Meet the others before the first step, or join them between two steps.

        Args:
            pipeline: what will run the steps.
            cursor: the cursor of the state that this process starts from.
            terms: of the training loop.

        Returns:
            The cursor from which all go on.
        """
        self.pipeline, self.terms, self._new = pipeline, dict(terms), True
        self._fits += self._fits > 0
        self._kept, self._cursors = {}, {pipeline.made: cursor}
        pipeline.recovery = self
        alike = {name.replace("_", " "): str(value) for name, value in self.step.alike().items()}
        self.link.registration.describe(alike | {"model": digest_of(pipeline.session.key)})
        self._settle(enter=self.link.generation == 0)
        return self._cursors[pipeline.made]

    def complete(self, work: Callable[[], None]) -> None:
        """Complete a step; again in the next generation, if the membership changes."""
        if not self._inside and self._entry_agreed:
            self._settle()
        while True:
            try:
                work()
                self.link.step = self._made
                return
            except GenerationChanged:
                self._settle()

    @property
    def _made(self) -> int:
        assert self.pipeline is not None
        return self.pipeline.made

    @property
    def _entry_agreed(self) -> bool:
        """Whether all members have announced, with the last step, the generation that lets others in."""
        pipeline, entry = self.pipeline, self.link.entry
        if pipeline is None or pipeline.last is None or not entry:
            return False
        return bool((pipeline.report_of(*pipeline.last).entry_W == entry).all())

    def run(self, work: Callable[[], T]) -> T:
        """Do something that all members do, outside of steps; it has ended when all have done it."""
        if self._inside:
            return work()
        while True:
            self._inside, self._done = True, False
            try:
                result = work()
                self._done = True
                self.link.gather(b"")
                self._collectives += 1
                return result
            except GenerationChanged:
                number = self._collectives
                self._settle()
                if self._collectives > number:
                    return result
            finally:
                self._inside = self._done = False

    def leave(self) -> None:
        """Finish the running step and leave the fleet, which goes on with the other members.

        Where no other member has the optimizer state of its pieces, it asks to own nothing any more, and returns: call
        it again after the next step.

        Raises:
            Left: when it has left; if it is not caught, the program ends with exit code 0.
        """
        assert self.pipeline is not None
        if self.link.holders == 1 and self.link.count > 1 and getattr(self.pipeline.core, "owned", None):
            self.step.requests.left = LEAVING
            return
        self.pipeline.complete()
        number = self.link.number
        self.link.leave()
        self.link.close(together=True)
        raise Left(f"Member {number} left the run after step {self.pipeline.made}; the others go on.")

    def go_back(self, lost: StateLost, restore: Callable[[], State]) -> LiveState:
        """Go on from an earlier state, in the same processes and with the same programs.

        Steps that are done again give no second record; hooks are not called for one that others have read before.

        Args:
            lost: why.
            restore: returns that state, in all members at once.

        Returns:
            The state on the devices.

        Raises:
            StateLost: if members that have to go back once more were lost meanwhile.
        """
        pipeline = self.pipeline
        assert pipeline is not None
        while True:
            try:
                while not all(row["lost"] for row in processes.gather({"lost": True})):
                    pass  # the others find out
                state = restore()
                break
            except GenerationChanged:
                self.link.enter_next()
        log.warning("%s Going on after step %d.", lost, state.step)
        self._new, self._kept, self._cursors = True, {}, {state.step: state.cursor}
        pipeline.settled(self._reduce.place(state.core), state.step)
        self._settle(enter=False)
        return LiveState(pipeline, pipeline.made, self._cursors[pipeline.made])

    def take_news(self) -> list[dict[str, Any]]:
        """The changes of the membership since the last record; the first membership is none."""
        reported, self._reported = self._reported, len(self.events)
        return self.events[max(reported, 1) :]

    # -- events of the pipeline --

    def keep(self, number: int, batch: HostBatch, span: Span) -> None:
        """Remember a step that starts now; the one before the last is not done again."""
        cursor = self._cursors[number]
        self._kept[number], self._cursors[number + 1] = _Kept(batch, span, cursor), cursor + span.advance
        for old in [step for step in self._kept if step < number - 1]:
            del self._kept[old]
            self._cursors.pop(old, None)

    def planned(self) -> None:
        """Remember that the last plan is one for the present members."""
        self.planned_for = self.link.generation

    @property
    def outdated(self) -> bool:
        """Whether the last plan is one for former members."""
        return self.planned_for != self.link.generation

    # -- settling --

    def _settle(self, enter: bool = True) -> None:
        """Go on with the members of the next generation; `enter`: not yet entered."""
        pipeline = self.pipeline
        assert pipeline is not None
        began = pipeline.ended or time.perf_counter()
        wanted, finished = pipeline.next, pipeline.made
        running = pipeline.abandon()
        while True:
            try:
                if enter:
                    self._enter()
                self._agree(running)
                self._repeat(wanted, finished)
                break
            except GenerationChanged:
                enter, running = True, pipeline.abandon() or running  # one that was started again
        generation = self.link.entered
        assert generation is not None
        if self._settled is not generation:
            self._settled = generation
            seconds = time.perf_counter() - began
            numbers = list(generation.numbers)
            former = set(self.events[-1]["members"]) if self.events else set()
            self.events.append({
                "step": pipeline.made, "generation": generation.number, "members": numbers,
                "left": sorted(former - set(numbers)), "came": sorted(set(numbers) - former),
                "reason": generation.reason, "seconds": round(seconds, 3),
            })  # fmt: skip
            if generation.stop:
                self.stop = f"The run stops: {generation.stop}"
                self.step.requests.stop = True
            log.info("Step %d: generation %d with members %s, %.2f s after the step before. %s", pipeline.made,
                     generation.number, ", ".join(map(str, numbers)), seconds, generation.reason)  # fmt: skip

    def _enter(self) -> None:
        if self.link.joins and self.link.generation == 0:
            self.link.registration.ready()
        self.link.enter_next()

    def _agree(self, running: PlannedStep | None) -> None:
        """Exchange what all have, and take over the state from which all go on."""
        step, pipeline = self.step, self.pipeline
        assert pipeline is not None
        reduce = self._reduce
        held = reduce.held(pipeline.core, pipeline.made)
        rows = self._meet(held)
        if max(row["fits"] for row in rows) > self._fits > 0:  # all but this one knew that all were done
            self._collectives, self._done = self._collectives + 1, False
            return
        presets.check_rows(rows, self.link.index)
        base = [p for p, row in enumerate(rows) if not row["new"]] or list(range(len(rows)))
        found = _Found.of(rows, base, len(reduce.pieces) if held is not None else 0)
        source = base[0]
        workers = step.workers.among([row["workers"] for row in rows], self.link.index)
        members_W = [[row["number"], i] for row in rows for i in range(len(row["workers"]))]
        core, me = pipeline.core, found.mine(self.link.index)
        if me is not None and me < pipeline.made:
            core = reduce.before
        room_P = np.array([row["room"] for row in rows])
        pieces = {} if held is None or me is None else held.get(me, {})
        core = reduce.settle(core, workers, room_P, pieces, found.fresh, found.have_K)
        step.follow(workers, rows, source, _positions(members_W, rows[source]["members_W"]))
        self._members_W = members_W
        self._cursors[found.step] = next(row["cursors"][str(found.step)] for row in (rows[p] for p in base)
                                         if str(found.step) in row["cursors"])  # fmt: skip
        self.terms = dict(rows[source]["terms"])
        if found.step == pipeline.made + 1 and running is not None:
            pipeline.summed_already(running, found.tail(reduce.layout.dtype))
        elif found.step < pipeline.made or self._new:
            pipeline.forget()
        else:
            pipeline.read_already()
        pipeline.settled(core, found.step)
        if self._new:
            self.read = max(row["handed_out"] for row in rows)
            pipeline.handed_out = pipeline.handed_out if self._fits else self.read
        self.link.step, self._new, self._fits = found.step, False, max(1, *(row["fits"] for row in rows))
        if self._inside:
            ahead = [row["collectives"] > self._collectives for row in rows if not row["new"]]
            done = [row["collectives"] == self._collectives and row["done"] for row in rows if not row["new"]]
            if any(ahead) or all(done):
                self._collectives, self._done = self._collectives + 1, False
        else:
            self._collectives = max(rows[p]["collectives"] for p in base)

    def _meet(self, held: Mapping[int, Mapping[int, Any]] | None) -> list[Row]:
        """What all members say of themselves, once those that begin another run are not ahead of others."""
        while True:
            rows: list[Row] = processes.gather(self._row(held))
            if any(row["lost"] for row in rows):
                raise StateLost(_LOST)
            if all(row["fits"] >= self._fits for row in rows if row["fits"]):
                return rows

    def _row(self, held: Mapping[int, Mapping[int, Any]] | None) -> dict[str, Any]:
        """What this member says of itself, as JSON values."""
        step, pipeline = self.step, self.pipeline
        assert pipeline is not None
        last, reduce = pipeline.last, self._reduce
        return {
            "number": self.link.number,
            "workers": step.workers.described(),
            "engines": step.sessions.offers(),
            "room": reduce.room,
            "new": self._new,
            "lost": False,  # has no state any more
            "fits": self._fits,
            "handed_out": pipeline.handed_out,
            "made": pipeline.made,
            "vectors": [pipeline.made, *([pipeline.made - 1] if reduce.before is not None else [])],
            "pieces": {str(made): sorted(pieces) for made, pieces in (held or {}).items()},
            "left_out": reduce.before is pipeline.core,
            "tail": None if last is None else np.asarray(last[1], np.float64).tolist(),
            "cursors": {str(made): cursor for made, cursor in self._cursors.items()},
            "collectives": self._collectives,
            "done": self._done,
            "controller": step.controller.state_dict(),
            "members_W": self._members_W,
            "alike": step.alike(),
            "terms": self.terms,
        }

    def _repeat(self, wanted: int, finished: int) -> None:
        """Do steps again up to the last one that was started, and complete those that were complete."""
        pipeline = self.pipeline
        assert pipeline is not None
        for number in range(pipeline.made, max(wanted, pipeline.made)):
            kept = self._kept[number]
            plan: Plan = self.step.plan(len(kept.batch), kept.span.epoch, kept.span.bucket)
            pipeline.restart(kept.batch, kept.span, plan)
        if pipeline.made < finished:
            pipeline.complete_once()
        self.link.step = pipeline.made


@dataclass(frozen=True)
class _Found:
    """The step that all go on from, and who has what of it."""

    step: int  # number of steps made
    rows: Sequence[Row]
    fresh: list[int]  # processes with its parameters
    have_K: list[list[int]]  # processes with each piece
    shifted: frozenset[int]  # processes that lack the last step, which had no effect

    @classmethod
    def of(cls, rows: Sequence[Row], base: Sequence[int], pieces: int) -> _Found:
        """Find it among those processes that train, or the first time among all.

        Raises:
            StateLost: if there is none.
        """
        newest = max(rows[p]["made"] for p in base)
        left_out = any(rows[p]["made"] == newest and rows[p]["left_out"] for p in base)
        shifted = frozenset(p for p in base if left_out and rows[p]["made"] == newest - 1)
        for step in (newest, newest - 1):
            at = {p: step - (p in shifted and step == newest) for p in base}
            fresh = [p for p in base if at[p] in rows[p]["vectors"]]
            have_K = [[p for p in base if k in rows[p]["pieces"].get(str(at[p]), ())] for k in range(pieces)]
            if fresh and all(have_K):
                return cls(step, rows, fresh, have_K, shifted if step == newest else frozenset())
        raise StateLost(_LOST)

    def mine(self, process: int) -> int | None:
        """Which of the states that a process holds is the one to go on from, by its steps; None: it has none."""
        at = self.step - (process in self.shifted)
        has = process in self.fresh or any(process in have for have in self.have_K)
        return at if has else None

    def tail(self, dtype: Any) -> np.ndarray:
        """The tail of the last step, from a process that has made it."""
        row = next(row for row in self.rows if not row["new"] and row["made"] == self.step)
        return np.asarray(row["tail"], dtype)


def digest_of(text: str) -> str:
    """A short digest of a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _positions(members_W: Sequence[Any], former_W: Sequence[Any]) -> list[int | None]:
    """Which of the former workers each worker is; None: it has joined."""
    return [former_W.index(worker) if worker in former_W else None for worker in members_W]
