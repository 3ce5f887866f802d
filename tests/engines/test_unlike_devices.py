"""Workers of two kinds, such as a CPU and a GPU: fake devices that report different kinds."""

import jax
import numpy as np
import optax
import pytest
from problems import Problem, RandomPlans, distance, reference_run
from tiny_problem import loss_fn, source

from hetjax import Chunked, Example, Trainer
from hetjax.devices import workers
from hetjax.engines import chunked
from hetjax.engines.ladder import Ladder
from hetjax.planning.controllers.base import Plan
from hetjax.reduce import transports

PARAMS = {"w": np.zeros(5, np.float32), "b": np.zeros((), np.float32)}
LINEAR = Problem(lambda params, batch, keys: Example(loss_fn(params, batch, keys)), PARAMS, source())


@pytest.fixture
def two_kinds(monkeypatch):
    for module in (workers, chunked):
        monkeypatch.setattr(module, "device_kind", lambda device: f"kind {device.id % 2}")


def test_workers_of_two_kinds_train_like_one_worker(two_kinds):
    optimizer = optax.sgd(0.01, momentum=0.9)
    params, losses = reference_run(LINEAR, optimizer, 24, steps=5)
    with Trainer(
        LINEAR.loss_fn,
        optimizer,
        batch_size=24,
        controller=RandomPlans(1),
        devices=jax.devices()[:3],
        engine=Chunked(rungs=[4, 24]),
    ) as trainer:
        state, history = trainer.fit(trainer.init(PARAMS), LINEAR.data, steps=5)
        ladders = trainer.step.engine.ladders
    assert (history.engine, history.transport) == ("chunked", "host")
    assert set(ladders) == {"kind 0", "kind 1"}
    assert distance(state.params, params) <= 1e-5  # the parameters start at zero
    np.testing.assert_allclose(history.losses, losses, rtol=1e-5)


def test_a_worker_without_samples_adds_nothing_to_the_sum(two_kinds, monkeypatch):
    """No zeros are made for it, and no program runs; its slots arrive all the same."""

    class Some(RandomPlans):
        def plan(self, batch, limits, epoch=0):
            return Plan(np.array([batch - 8, 0, 8]))

    added, compiled = [], transports.HubReduce._compiled

    def counted(self, core):
        start, add, finish = compiled(self, core)
        return start, lambda *given: (added.append(int(given[-1])), add(*given))[1], finish

    monkeypatch.setattr(transports.HubReduce, "_compiled", counted)
    monkeypatch.setattr(transports, "zero_parts", None)
    optimizer = optax.sgd(0.01, momentum=0.9)
    params, losses = reference_run(LINEAR, optimizer, 24, steps=4)
    with Trainer(
        LINEAR.loss_fn, optimizer, batch_size=24, controller=Some(1), devices=jax.devices()[:3],
        engine=Chunked(rungs=[4, 24]),
    ) as trainer:  # fmt: skip
        state, history = trainer.fit(trainer.init(PARAMS), LINEAR.data, steps=4)
    assert added == [2] * 4
    assert distance(state.params, params) <= 1e-5
    np.testing.assert_allclose(history.losses, losses, rtol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"engine": "looped"}, "which XLA cannot compile for devices of several kinds"),
        ({"transport": "mesh"}, "The transport 'mesh' needs devices of one kind"),
    ],
)
def test_one_program_over_two_kinds_is_rejected(options, message, two_kinds):
    with (
        pytest.raises(ValueError, match=message),
        Trainer(LINEAR.loss_fn, optax.sgd(0.1), batch_size=24, devices=jax.devices()[:2], **options) as trainer,
    ):
        trainer.fit(trainer.init(PARAMS), LINEAR.data, steps=1)


def test_the_first_plan_follows_speeds_that_differ_clearly(two_kinds, monkeypatch):
    """By a factor of two or more; below, counts are equal until the first timings."""
    for slower, unlike in ((9.0, True), (1.5, False)):
        pace = {"kind 0": 900.0, "kind 1": 900.0 / slower}
        monkeypatch.setattr(Ladder, "pace", lambda ladder, pace=pace: pace[device_kind_of(ladder)])
        with Trainer(
            LINEAR.loss_fn, optax.sgd(0.01), batch_size=40, devices=jax.devices()[:2], engine=Chunked(rungs=[1, 8])
        ) as trainer:
            _, history = trainer.fit(trainer.init(PARAMS), LINEAR.data, steps=1)
        counts_W = history.records[0].counts_W
        assert (counts_W[0] > 4 * counts_W[1] > 0) if unlike else (counts_W == 20).all()


def device_kind_of(ladder):
    return f"kind {ladder.devices[0].id % 2}"
