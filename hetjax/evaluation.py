"""Evaluation and prediction over batches, split among the workers like the training steps.

mean = sum over all samples of value_b / sum over all samples of weight_b; a prediction is the output of every sample,
in order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from hetjax import processes
from hetjax.data.batches import HostBatch, as_batch, sample_of
from hetjax.devices.workers import Workers
from hetjax.engines.clocks import LocalResult
from hetjax.engines.session import Session
from hetjax.fleet.agree import digest, same
from hetjax.pipeline import Pipeline, bucket_of, packed_rows
from hetjax.planning.allocation import solve
from hetjax.planning.controllers.base import Plan
from hetjax.planning.rounding import largest_remainder
from hetjax.reduce.base import Replicas
from hetjax.reduce.layout import Means, Value
from hetjax.sampling.order import Span

Tree = Any


def mean_over(
    batches: Iterable[Any], open_pipeline: Callable[[HostBatch], Pipeline], limit: int, shares_W: np.ndarray
) -> dict[str, Value]:
    """Return the mean loss and metrics over all samples of the batches.

    Args:
        batches: any batches that a step takes, each with at most `limit` samples.
        open_pipeline: makes a pipeline whose update changes nothing, for rows like those of the batch it is given.
        limit: maximum samples of a batch.
        shares_W: relative share of every worker.

    Raises:
        ValueError: if there are no batches.
    """
    pipeline: Pipeline | None = None
    position, means = 0, Means()
    for each in batches:
        batch = as_batch(each, limit)
        if pipeline is None:
            pipeline = open_pipeline(batch)
        span = Span(0, position, position + len(batch), bucket=pipeline.bucket_of(batch))
        position = span.stop
        finished = pipeline.submit(batch, span, _split(pipeline.sessions[span.bucket], len(batch), shares_W))
        means = means if finished is None else means.plus(finished[1])
    if pipeline is None:
        raise ValueError("There is nothing to evaluate: the batches are empty.")
    finished = pipeline.flush()
    means = means if finished is None else means.plus(finished[1])
    return {"loss": means.loss, **means.metrics}


def outputs_over(
    batches: Iterable[Any],
    open_sessions: Callable[[Tree], Sequence[Session]],
    leaves: Sequence[Any],
    limit: int,
    shares_W: np.ndarray,
    seed: int,
) -> Tree:
    """Return the outputs of all samples of the batches, in order, as host arrays; in all processes.

    Args:
        batches: any batches that a step takes, each with at most `limit` samples.
        open_sessions: makes sessions for predictions, of each shape of rows if the sample it is given has one of them.
        leaves: those of the parameters and the model state.
        limit: maximum samples of a batch.
        shares_W: relative share of every worker.
        seed: the samples' random keys derive from it and from their positions.

    Raises:
        ValueError: if there are no batches, or outputs of rows of several shapes differ in shape.
    """
    sessions: Sequence[Session] = ()
    session: Session | None = None  # the one that runs
    position, counts_SxW, made = 0, [], []
    running: list[Future[LocalResult]] | None = None
    try:
        for each in batches:
            batch = as_batch(each, limit)
            if not sessions:
                sessions = open_sessions(sample_of(batch))
                _check_alike([each.outputs for each in sessions])
                replicas = _placed(leaves, sessions[0].engine.workers)
                outputs = len(jax.tree.leaves(sessions[0].outputs))
            span = Span(0, position, position + len(batch), bucket=bucket_of(batch, sessions))
            following = sessions[span.bucket]
            plan, position = _split(following, len(batch), shares_W), span.stop
            packed = packed_rows(following.engine, batch, span, plan, seed)  # while the batch before runs
            finished = None if session is None or running is None else session.clocks.wait(running)
            session = following
            running = session.engine.start(replicas, packed)
            counts_SxW.append(plan.counts_W)
            made += [] if finished is None else _valid_rows(finished, outputs)
        if session is None or running is None:
            raise ValueError("There is nothing to predict: the batches are empty.")
        made += _valid_rows(session.clocks.wait(running), outputs)
    except BaseException:
        if session is not None and running is not None:
            wait(running, timeout=session.clocks.wait_limit)
        raise
    workers, shapes = session.engine.workers, jax.tree.leaves(session.outputs)
    own = [
        np.concatenate([chunk[i] for chunk in made] or [np.zeros((0, *x.shape), x.dtype)]) for i, x in enumerate(shapes)
    ]
    whole = _from_all(own, np.array(counts_SxW), workers) if workers.several_processes else own
    return jax.tree.unflatten(jax.tree.structure(session.outputs), whole)


def _check_alike(outputs_K: Sequence[Tree]) -> None:
    """Refuse outputs that differ between the shapes of rows: they would not fit into one array."""
    shapes = [[(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(outputs)] for outputs in outputs_K]
    if any(each != shapes[0] for each in shapes):
        shown = " and ".join(dict.fromkeys(", ".join(map(str, jax.tree.leaves(outputs))) for outputs in outputs_K))
        raise ValueError(
            f"The outputs of samples in buckets of unequal length have no common shape ({shown}). Let predict_fn "
            "return outputs without an axis of tokens, such as a sum, a mean or those of the last token, or pad them "
            "there to the longest; or call predict for the samples of each bucket."
        )


def _placed(leaves: Sequence[Any], workers: Workers) -> Replicas:
    """The parameters on the device of every local worker."""
    here = [x if getattr(x, "is_fully_addressable", True) else x.addressable_data(0) for x in leaves]
    leaves_w = [jax.device_put(here, device) for device in workers.own]
    return Replicas(leaves_w, [own[-1] for own in leaves_w], lambda: None)


def _valid_rows(results: list[LocalResult], outputs: int) -> list[list[np.ndarray]]:
    """The outputs of every microbatch as host arrays, in order, without padding."""
    made = []
    for result in results:
        for i in range(0, len(result.parts), outputs + 1):
            *parts, mask_b = (np.asarray(part)[0] for part in result.parts[i : i + outputs + 1])
            made.append([part[: mask_b.sum()] for part in parts])
    return made


def _from_all(own: list[np.ndarray], counts_SxW: np.ndarray, workers: Workers) -> list[np.ndarray]:
    """The outputs of all processes, in the order of the samples."""
    same(plans_of_the_prediction=digest(counts_SxW))
    process = np.repeat(np.tile(workers.process_W, len(counts_SxW)), counts_SxW.ravel())  # of each sample
    rows_P = np.bincount(process, minlength=processes.count()).tolist()
    order = np.argsort(np.argsort(process, kind="stable"))  # of each sample in those of process 0, then 1, ...
    return [np.concatenate(processes.gather_rows(array, rows_P))[order] for array in own]


def _split(session: Session, batch: int, shares_W: np.ndarray) -> Plan:
    limits = session.engine.limits()
    if session.engine.workers.elastic:  # members that have come later may price their microbatches otherwise
        return Plan(largest_remainder(shares_W, limits, batch))
    free = replace(limits, minimum_W=np.zeros_like(limits.minimum_W))
    return Plan(solve(np.zeros(limits.workers), 1 / shares_W, free, batch).counts_W)
