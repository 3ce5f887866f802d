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
