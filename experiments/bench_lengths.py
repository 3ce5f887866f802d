"""Sequences of unequal length: how much of what the bucketing allows is reached.

    python experiments/bench_lengths.py [--speeds 1 0.5] [--samples 1536] [--rounds 5] [--json FILE]

Lengths are log-uniform from 8 to 512 tokens, the model is a small transformer, the workers are fake CPU devices.

fill           tokens / padded tokens of the buckets
reached        tokens/s of whole epochs in the order of the sampler, over those that the bucketing allows: every bucket
               at the rate of full steps of this bucket alone, sum of samples_k / rate_k seconds an epoch
of_ideal       with simulated speeds: tokens/s over fill x what all workers compute without ever waiting
over_padded    tokens/s over those of the same samples, all padded to 512
recompiles     programs compiled after the warm-up

All of them run in turns, from the same batches in memory; ratios are medians over the rounds.
"""

from __future__ import annotations

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=2")

import json
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import optax
from benches.flags import JsonFile, Numbers, from_flags
from flax import nnx

import hetjax
from hetjax import Example, zoo
from hetjax.devices.compile import compiles

VOCAB, SHORTEST, LONGEST = 128, 8, 512


def loss_fn(model: Any, example: Any, rngs: Any) -> Example:
    score = zoo.next_token(model(example["tokens"], rngs=rngs), example["targets"], example["weights"])
    return Example(score.loss, score.weight, {})


def sequences(samples: int) -> list[dict[str, np.ndarray]]:
    """Random tokens, of log-uniform length."""
    rng = np.random.default_rng(0)
    sizes = np.exp(rng.uniform(np.log(SHORTEST), np.log(LONGEST + 1), samples)).astype(int)
    both = [rng.integers(0, VOCAB, size + 1).astype(np.int32) for size in sizes]
    return [{"tokens": tokens[:-1], "targets": tokens[1:]} for tokens in both]


def batches_of(source: hetjax.Bucketed, batch: int) -> tuple[list[Any], list[Any]]:
    """The steps of the first epoch: their spans and their rows."""
    order = source.sampler(batch)
    spans = [order.step(0)]
    while spans[-1].stop < len(source):
        spans.append(order.step(spans[-1].stop))
    return spans, [source.rows(order.indices(0, span.start, span.stop)) for span in spans]


class Run:
    """Steps of one source in a loop of our own, timed."""

    def __init__(self, model: hetjax.FlaxModel, source: hetjax.Bucketed, batch: int, speeds: Sequence[float] | None):
        self.source, self.batch = source, batch
        self.spans, self.rows = batches_of(source, batch)
        rungs = sorted({-(-batch // 16), -(-batch // 4), -(-batch // 2)})  # few, as every bucket compiles them
        engine = hetjax.Chunked(rungs=rungs)
        self.step = hetjax.Step(model, optax.sgd(0.01), batch_size=batch, speeds=speeds, engine=engine)
        first, *further = source.samples(lambda size: np.zeros(1, np.int64))
        self.state = self.step.open(self.step.init(model.params), first, further=further)

    def seconds(self, chosen: Sequence[int]) -> float:
        """Run these steps, one after the other."""
        began = time.perf_counter()
        for number in chosen:
            self.state, _ = self.step(self.state, self.rows[number])
        self.step.flush()
        return time.perf_counter() - began

    def full(self) -> list[list[Any]]:
        """The full steps of each bucket; the largest one where there is none."""
        found = []
        for bucket in range(len(self.source.lengths)):
            mine = [span for span in self.spans if span.bucket == bucket]
            most = max(span.batch for span in mine)
            found.append([span for span in mine if span.batch == most])
        return found

    def allowed(self) -> float:
        """Seconds of an epoch if every sample took its share of a full step of its bucket, measured alone."""
        total = 0.0
        for bucket, spans in enumerate(self.full()):
            chosen = [self.spans.index(span) for span in spans]
            samples = sum(span.batch for span in spans)
            total += self.seconds(chosen) * int((self.source.bucket_N == bucket).sum()) / samples
        return total


def measure(
    samples: int, batch: int, lengths: Sequence[int], speeds: Sequence[float] | None, rounds: int, width: int = 64
) -> dict[str, Any]:
    """Run all of them in turns and compare."""
    model = hetjax.from_nnx(
        zoo.Transformer(LONGEST, VOCAB, width=width, depth=1, heads=4, dropout=0.0, rngs=nnx.Rngs(0)), loss_fn
    )
    data = sequences(samples)
    mixed = Run(model, hetjax.Bucketed(data, lengths, mask="weights"), batch, speeds)
    padded = Run(model, hetjax.Bucketed(data, (LONGEST,), mask="weights"), batch, speeds)
    tokens = int(mixed.source.size_N.sum())
    everything, few = range(len(mixed.spans)), range(max(1, len(padded.spans) // 4))
    mixed.seconds(everything)
    padded.seconds(few)
    before = compiles()
    share = sum(padded.spans[number].batch for number in few) / samples
    seconds: dict[str, list[float]] = {"mixed": [], "allowed": [], "padded": []}
    for turn in range(rounds):
        runs = [
            ("mixed", lambda: mixed.seconds(everything)),
            ("allowed", mixed.allowed),
            ("padded", lambda: padded.seconds(few) / share),
        ]
        for name, run in runs[turn % 3 :] + runs[: turn % 3]:  # each goes first in turn
            seconds[name].append(run())
    recompiled = compiles() - before
    mixed_R = np.array(seconds["mixed"])
    result = {
        "lengths": mixed.source.lengths[::-1],
        "steps": len(mixed.spans),
        "fill": mixed.source.fill,
        "tokens_per_s": float(np.median(tokens / mixed_R)),
        "allowed_tokens_per_s": float(np.median(tokens / np.array(seconds["allowed"]))),
        "padded_tokens_per_s": float(np.median(tokens / np.array(seconds["padded"]))),
        "reached": float(np.median(np.array(seconds["allowed"]) / mixed_R)),
        "reached_by_round": (np.array(seconds["allowed"]) / mixed_R).round(3).tolist(),
        "over_padded": float(np.median(np.array(seconds["padded"]) / mixed_R)),
        "recompiles": recompiled,
        "workers": len(jax.devices()),
        "speeds": speeds,
    }
    if mixed.step.simulation is not None:
        padded_tokens = sum(mixed.source.lengths[span.bucket] * span.batch for span in mixed.spans)
        ideal = mixed.step.simulation.ideal() * mixed.source.lengths[0]  # padded tokens per second
        result["of_ideal"] = float(np.median(padded_tokens / mixed_R)) / ideal
    mixed.step.close()
    padded.step.close()
    return result


def main(
    samples: int = 1536,
    batch: int = 64,
    lengths: tuple[int, ...] = (16, 32, 64, 128, 256, 512),
    speeds: Numbers = None,
    rounds: int = 5,
    width: int = 64,
    json_file: JsonFile = None,
) -> None:
    """Measure how much of what the bucketing allows is reached.

    Args:
        samples: number of sequences.
        batch: samples of a step.
        lengths: lengths of the buckets.
        speeds: simulated speeds, one per worker. Default: real speeds.
        rounds: number of times that each run takes its turn.
        width: width of the transformer.
        json_file: write the results to this file, too (--json FILE).
    """
    text = json.dumps(measure(samples, batch, lengths, speeds, rounds, width), indent=1)
    print(text)
    if json_file is not None:
        json_file.write_text(text)


if __name__ == "__main__":
    from_flags(main)
