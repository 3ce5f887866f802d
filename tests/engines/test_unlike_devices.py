"""Workers of two kinds, as a CPU and a GPU would be: fake devices that are told apart."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from problems import RandomPlans, distance, problem, reference_run

from hetjax import Chunked, Trainer
from hetjax.devices import workers
from hetjax.engines import chunked
from hetjax.reduce.layout import Layout


@pytest.fixture
def two_kinds(monkeypatch):
    for module in (workers, chunked):
        monkeypatch.setattr(module, "device_kind", lambda device: f"kind {device.id % 2}")


def test_unlike_devices_train_as_one_does(two_kinds):
    made, optimizer = problem("mlp", seed=5), optax.sgd(0.1, momentum=0.9)
    params, losses = reference_run(made, optimizer, 24, steps=5)
    with Trainer(
        made.loss_fn,
        optimizer,
        batch_size=24,
        controller=RandomPlans(1),
        devices=jax.devices()[:3],
        engine=Chunked(rungs=[4, 24]),
    ) as trainer:
        state, history = trainer.fit(trainer.init(made.params), made.data, steps=5)
        ladders = trainer.step.engine.ladders
    assert (history.engine, history.transport) == ("chunked", "hub")
    assert set(ladders) == {"kind 0", "kind 1"}
    assert distance(jax.tree.map(np.subtract, state.params, made.params),
                    jax.tree.map(np.subtract, params, made.params)) <= 1e-5  # fmt: skip
    np.testing.assert_allclose(history.losses, losses, rtol=1e-5)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"engine": "looped"}, "which XLA refuses over unlike devices"),
        ({"transport": "psum"}, "The psum transport needs devices of one kind"),
    ],
)
def test_one_program_over_unlike_devices_is_refused(options, words, two_kinds):
    made = problem("mlp")
    with (
        Trainer(made.loss_fn, optax.sgd(0.1), batch_size=24, devices=jax.devices()[:2], **options) as trainer,
        pytest.raises(ValueError, match=words),
    ):
        trainer.fit(trainer.init(made.params), made.data, steps=1)


@pytest.mark.parametrize(
    ("parameters", "sums"), [(jnp.bfloat16, jnp.float32), (jnp.float32, jnp.float32), (jnp.float64, jnp.float64)]
)
def test_sums_are_kept_in_float32_or_wider(parameters, sums, float64):
    grads = {"w": jax.ShapeDtypeStruct((3,), parameters)}
    assert Layout.of(grads, (), ()).dtype == sums
