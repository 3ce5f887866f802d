"""What a loss function may return; anything else is refused with a remedy."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import hetjax

DATA = {"x": np.ones((16, 3), np.float32), "y": np.zeros(16, np.int32)}
PARAMS = {"w": jnp.zeros((3, 2))}


def losses(params, batch):
    return optax.softmax_cross_entropy_with_integer_labels(batch["x"] @ params["w"], batch["y"])


def refusal(loss_fn, params=PARAMS, model_state=None):
    with (
        hetjax.Trainer(loss_fn, optax.sgd(0.1), batch_size=8, devices=jax.devices()[:2]) as trainer,
        pytest.raises((TypeError, ValueError)) as refused,
    ):
        trainer.fit(trainer.init(params, model_state), DATA, steps=1)
    return str(refused.value)


def test_a_loss_with_auxiliary_values_is_refused():
    message = refusal(lambda params, batch, keys: (losses(params, batch), {"accuracy": 1.0}))
    assert "returned a tuple of 2" in message
    assert "hetjax.Example(loss, metrics={'accuracy': correct})" in message


@pytest.mark.parametrize("returned", [lambda loss: (loss, {"a": loss}), lambda loss: {"loss": loss}, lambda loss: None])
def test_values_that_are_not_a_loss_are_refused_for_flax_models(returned):
    network = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    loss = lambda model, example, rngs: returned(jnp.sum(model(example["x"])))
    model = hetjax.from_nnx(network, loss)
    assert "hetjax.Example(loss, metrics=" in refusal(model.loss_fn, model.params)


def test_a_mean_over_the_batch_is_refused():
    message = refusal(lambda params, batch, keys: losses(params, batch).mean())
    assert "it has shape ()" in message
    assert "without .mean()" in message


def test_a_loss_with_further_axes_is_refused():
    message = refusal(lambda params, batch, keys: losses(params, batch)[:, None])
    assert "it has shape (2, 1)" in message
    assert "other axes of each example" in message


def test_metrics_that_are_not_arrays_are_refused():
    message = refusal(lambda params, batch, keys: hetjax.Example(losses(params, batch), metrics={"a": {"b": 1}}))
    assert "Metric 'a' should be an array of one value per example, not a dict" in message


def test_a_stateful_loss_without_state_sums_is_refused():
    message = refusal(lambda params, state, batch, keys, mask: losses(params, batch), model_state={"n": jnp.zeros(())})
    assert "must return two values" in message
