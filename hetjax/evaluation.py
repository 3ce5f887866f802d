"""Evaluation: mean loss and metrics over batches, split among the workers like the training steps.

mean = sum over all samples of value_b / sum over all samples of weight_b
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from hetjax.data.batches import HostBatch, as_batch
from hetjax.engines.session import Session
from hetjax.pipeline import Finished, Pipeline
from hetjax.planning.allocation import solve
from hetjax.planning.controllers.base import Plan
from hetjax.sampling.order import Span


def mean_over(
    batches: Iterable[Any], open_pipeline: Callable[[HostBatch], Pipeline], limit: int, shares_W: np.ndarray
) -> dict[str, float]:
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
    position, sums = 0, {"loss": 0.0}
    weight = 0.0
    for each in batches:
        batch = as_batch(each, limit)
        if pipeline is None:
            pipeline = open_pipeline(batch)
        span = Span(0, position, position + len(batch), bucket=pipeline.bucket_of(batch))
        position = span.stop
        finished = pipeline.submit(batch, span, _split(pipeline.sessions[span.bucket], len(batch), shares_W))
        weight = _add(sums, weight, finished)
    if pipeline is None:
        raise ValueError("There is nothing to evaluate: the batches are empty.")
    weight = _add(sums, weight, pipeline.flush())
    return {name: value / weight for name, value in sums.items()}


def _split(session: Session, batch: int, shares_W: np.ndarray) -> Plan:
    limits = session.engine.limits()
    free = replace(limits, minimum_W=np.zeros_like(limits.minimum_W))
    return Plan(solve(np.zeros(limits.workers), 1 / shares_W, free, batch).counts_W)


def _add(sums: dict[str, float], weight: float, finished: Finished | None) -> float:
    """Add a finished step to the sums and return the total weight."""
    if finished is None:
        return weight
    _, report = finished
    sums["loss"] += report.loss_sum
    for name, value in report.metric_sums.items():
        sums[name] = sums.get(name, 0.0) + value
    return weight + report.weight
