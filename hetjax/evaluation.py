"""Evaluation: mean loss and metrics over batches, split among the workers like the training steps.

mean = sum over all samples of value_b / sum over all samples of weight_b
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from hetjax.data.batches import as_batch, sample_of
from hetjax.engines.session import Session
from hetjax.pipeline import Pipeline
from hetjax.planning.allocation import solve
from hetjax.planning.controllers.base import Plan
from hetjax.reduce.layout import Means, Value
from hetjax.sampling.order import Span

Tree = Any


def mean_over(
    batches: Iterable[Any], open_pipeline: Callable[[Tree], Pipeline], limit: int, shares_W: np.ndarray
) -> dict[str, Value]:
    """Return the mean loss and metrics over all samples of the batches.

    Args:
        batches: any batches that a step takes, each with at most `limit` samples.
        open_pipeline: makes a pipeline whose update changes nothing, for rows like the sample it is given.
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
            pipeline = open_pipeline(sample_of(batch))
        span = Span(0, position, position + len(batch))
        position = span.stop
        finished = pipeline.submit(batch, span, _split(pipeline.session, len(batch), shares_W))
        means = means if finished is None else means.plus(finished[1])
    if pipeline is None:
        raise ValueError("There is nothing to evaluate: the batches are empty.")
    finished = pipeline.flush()
    means = means if finished is None else means.plus(finished[1])
    return {"loss": means.loss, **means.metrics}


def _split(session: Session, batch: int, shares_W: np.ndarray) -> Plan:
    limits = session.engine.limits()
    free = replace(limits, minimum_W=np.zeros_like(limits.minimum_W))
    return Plan(solve(np.zeros(limits.workers), 1 / shares_W, free, batch).counts_W)
