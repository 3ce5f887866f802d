"""The loops behind `Trainer`: over a source with a sampler, over a stream of batches, and over all samples in order."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice, zip_longest
from typing import Any

from hetjax import presets
from hetjax.adapters.probe import sample_size
from hetjax.data.batches import FeedBatch, as_batch, is_stream, sample_of
from hetjax.data.bucketed import Bucketed
from hetjax.data.memory import as_source
from hetjax.data.prefetch import Feed
from hetjax.data.source import Source, check_finite
from hetjax.history import History, Hook, Record, Recorder
from hetjax.recovery import StateLost
from hetjax.sampling.order import Sampler
from hetjax.state import LiveState, State
from hetjax.step import Step

Tree = Any
Advance = Callable[[LiveState], tuple[LiveState, Record | None] | None]  # one step; None when there is none left


def over_source(
    step: Step,
    state: State,
    source: Source,
    samples: Sequence[Tree],
    sampler: Any,
    *,
    end: int,
    until: int,
    steps: int | None,
    hooks: Sequence[Hook],
    epoch_size: int | None,
) -> tuple[State, History]:
    """Plan, fetch and run one step after the other.

    Args:
        step: the step.
        state: where to start.
        source: the samples.
        samples: rows to compile for, of each bucket.
        sampler: their order, and the span and plan of every step.
        end: cursor at which training ends; an upper bound if `steps` is given.
        until: the cursor that training will reach, for schedules that depend on it.
        steps: number of steps, or None to run to `end`.
        hooks: called with every record and the state after its step.
        epoch_size: samples in an epoch; None without epochs.
    """
    first, size = state.step, sampler.size
    last = first + (steps or sampler.steps_between(state.cursor, end))
    batches = getattr(sampler, "batch_K", None)
    terms = {"first": first, "last": last, "end": end, "number_of_samples": size}
    live = step.open(
        state, samples[0], further=samples[1:], batches=batches, epoch_size=epoch_size, end=until, terms=terms
    )
    if step.recovery is not None:  # one that joins goes on where the others are, and ends with them
        agreed = step.recovery.terms
        presets.check_terms(terms, agreed)
        first, last, end = agreed["first"], agreed["last"], agreed["end"]
    feed = Feed(source, sampler)

    def advance(live: LiveState) -> tuple[LiveState, Record | None] | None:
        if live.cursor >= end or (steps is not None and live.step >= last):
            return None
        span, plan = sampler.next(live.cursor, step.plan)
        cursor = live.cursor + span.advance
        following = sampler.ahead(cursor) if cursor < end else None
        return step.run(live, FeedBatch(feed, span, following), span, plan)

    try:
        return _run(step, state, live, advance, last, hooks, lambda: feed.waited)
    finally:
        feed.close()


def over_stream(
    step: Step, state: State, stream: Iterable[Any], steps: int | None, hooks: Sequence[Hook]
) -> tuple[State, History]:
    """Train on batches as they come, for a number of steps or until the stream ends."""
    batches = step.batches(islice(stream, steps))
    batch = next(batches, None)
    if batch is None:
        raise ValueError("The stream of batches is empty: there is nothing to train on.")
    sample = sample_of(as_batch(batch, step.batch_size), sample_size(state, step.quantum))
    live, waited = step.open(state, sample), 0.0

    def advance(live: LiveState) -> tuple[LiveState, Record | None] | None:
        nonlocal batch, waited
        if batch is None:
            began = time.perf_counter()
            batch = next(batches, None)
            waited += time.perf_counter() - began
        if batch is None:
            return None
        given, batch = batch, None
        return step(live, given)

    return _run(step, state, live, advance, live.step + (steps or 0), hooks, lambda: waited)


def _run(
    step: Step, start: State, live: LiveState, advance: Advance, last: int, hooks: Sequence[Hook],
    waited: Callable[[], float],
) -> tuple[State, History]:  # fmt: skip
    """Run until no step is left or a stop was requested, and keep the history; `start`: the state at the start."""
    step.requests.stop = False
    engine = live.pipeline.session.engine.name
    history = History(
        engine=engine,
        transport=live.pipeline.reduce.name,
        controller=step.controller.name,
        workers=len(step.workers),
        last_step=last,
    )
    if (wire := getattr(live.pipeline.reduce, "wire", None)) is not None:
        history.more["wire"] = wire
    restore = next((hook.restore for hook in hooks if hasattr(hook, "restore")), lambda like: like)
    with Recorder(history, hooks, step.simulation) as recorder:
        lost: StateLost | None = None
        while True:
            try:
                if lost is not None:
                    assert step.recovery is not None
                    live = step.recovery.go_back(lost, lambda: restore(start))
                state = _to_the_end(step, live, advance, recorder)
                break
            except StateLost as error:
                lost = error
        recorder.finish(history.own_rates(), waited())
        if step.bench is not None and step.bench.events:
            history.more["benched"] = list(step.bench.events)
        if step.recovery is not None:
            history.more["members"] = list(step.recovery.events)
    return state, history


def _to_the_end(step: Step, live: LiveState, advance: Advance, recorder: Recorder) -> State:
    """Run until no step is left or a stop was requested; returns the state."""
    made, record = None, None
    while not (record is not None and record.stop) and (made := advance(live)) is not None:
        before, (live, record) = live, made
        record = _added(step, recorder, record, before)
        if step.requests.leave and step.recovery is not None:  # after the hooks, in which all may evaluate or save
            step.recovery.leave()
    _added(step, recorder, step.flush(), live)
    return live.whole()


def _added(step: Step, recorder: Recorder, record: Record | None, live: LiveState) -> Record | None:
    """Add a record to the history and call the hooks; returns it, if they were called."""
    if record is None:
        return None
    if step.recovery is not None and record.step <= step.recovery.read + 1:  # others do not call theirs again
        recorder.append(record)
        return None
    recorder.add(record, live.view())
    return record


@contextmanager
def in_order(source: Any, limit: int, purpose: str) -> Iterator[Iterable[Any]]:
    """Batches over a source in its own order, prefetched; a stream is passed on."""
    if is_stream(source):
        yield source
        return
    source = as_source(source)
    check_finite(source, f"to {purpose} every sample")
    order: Any = (
        source.sampler(limit, shuffle=False)
        if isinstance(source, Bucketed)
        else Sampler(len(source), limit, shuffle=False)
    )
    feed, spans = Feed(source, order), [order.step(0)]
    while spans[-1].stop < len(source):
        spans.append(order.step(spans[-1].stop))
    try:
        yield (FeedBatch(feed, span, following) for span, following in zip_longest(spans, spans[1:]))
    finally:
        feed.close()
