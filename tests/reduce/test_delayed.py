"""Delayed updates: nothing keeps running when a run ends, with or without an error."""

import threading
from concurrent.futures import Future
from types import SimpleNamespace

import jax
import optax
import pytest

import hetjax
from hetjax.pipeline import Pipeline
from hetjax.reduce.delayed import Delayed, DelayedCore


class Exchange:
    """A reduce that waits for the others until they are there."""

    name, wire = "host", "float32"

    def __init__(self, error=None):
        self.others, self.ended, self.error = threading.Event(), threading.Event(), error

    def __call__(self, core, parts_w, slots_w, step):
        assert self.others.wait(60)
        self.ended.set()
        if self.error is not None:
            raise self.error
        return core + 1, "tail"

    def replicas(self, core, tail):
        return core


def in_flight(monkeypatch, error=None):
    """An exchange in flight, which ends only if somebody waits for it, and a step whose pipeline has started it."""
    step = hetjax.Step(lambda p, b, k: b["x"] @ p, optax.sgd(0.1), batch_size=8, devices=jax.devices()[:1])
    exchange, result = Exchange(error), Future.result

    def wait_for(future, timeout=None):
        exchange.others.set()
        return result(future, 60)

    monkeypatch.setattr(Future, "result", wait_for)
    delayed = Delayed(exchange)
    pipeline = Pipeline([SimpleNamespace()], delayed, DelayedCore(0), seed=0)
    pipeline.core, _ = delayed(pipeline.core, [], [], None)
    step._pipeline = pipeline
    return exchange, step, pipeline


@pytest.mark.parametrize("end", ["close", "abandon"])
def test_the_end_waits_for_the_exchange_in_flight(end, monkeypatch):
    exchange, step, pipeline = in_flight(monkeypatch)
    (step.close if end == "close" else pipeline.abandon)()
    ended = exchange.ended.is_set()
    exchange.others.set()
    assert ended
    assert pipeline.core.latest() == 1  # the state stays readable
    step.close()


def test_who_is_missing_is_named_once(monkeypatch):
    _, step, _ = in_flight(monkeypatch, TimeoutError("Process 1 sent nothing for 60 s."))
    with pytest.raises(TimeoutError, match="Process 1"):
        step.close()
    step.close()


def test_an_error_is_not_replaced_by_that_of_the_exchange(monkeypatch):
    _, step, _ = in_flight(monkeypatch, TimeoutError("Process 1 sent nothing for 60 s."))

    def loop():
        with step:
            raise KeyError("the user's")

    with pytest.raises(KeyError, match="the user's"):
        loop()
