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


def test_a_metric_does_not_take_the_place_of_the_loss():
    def loss_fn(params, batch, keys):
        return hetjax.Example(losses(params, batch), metrics={"loss": losses(params, batch)})

    assert "A metric is named 'loss', the name of the mean of loss_b" in refusal(loss_fn)


def test_a_stateful_loss_without_state_sums_is_refused():
    message = refusal(lambda params, state, batch, keys, mask: losses(params, batch), model_state={"n": jnp.zeros(())})
    assert "must return two values" in message


NETWORK = nnx.Sequential(nnx.Linear(3, 4, rngs=nnx.Rngs(0)), hetjax.BatchNorm(4, group=4, rngs=nnx.Rngs(0)))
MODEL = hetjax.from_nnx(NETWORK, lambda network, example: jnp.sum(network(example["x"]) ** 2))


@pytest.mark.parametrize(
    ("loss_fn", "init", "message"),
    [
        (NETWORK, (PARAMS,), "loss_fn is a Flax model: give hetjax.from_nnx(model, example_loss)"),
        (MODEL, (NETWORK,), "params is a Flax model: give model.params"),
        (losses, (PARAMS,), "called as loss_fn(params, batch, keys), but takes (params, batch). keys has a random key"),
        (MODEL.loss_fn, (MODEL.params,), "Give its model state to init"),
        (lambda params, batch, keys: losses(params, batch), (PARAMS, {"mean": 0.0}), "Give init no model_state"),
    ],
)
def test_a_loss_that_cannot_be_called_as_agreed_is_refused_before_anything_compiles(loss_fn, init, message):
    with pytest.raises(TypeError) as refused:
        hetjax.Step(loss_fn, optax.sgd(0.1), batch_size=8).init(*init)
    assert message in str(refused.value)


def test_the_model_state_of_an_adapter_is_the_default():
    step = hetjax.Step(MODEL, optax.sgd(0.1), batch_size=8)
    assert jax.tree.leaves(step.init(MODEL.params).model_state) == jax.tree.leaves(MODEL.model_state)


def notes_of(loss_fn, **options):
    """The notes of the error of a step or of an evaluation."""
    batch = {name: rows[:8] for name, rows in DATA.items()}
    with hetjax.Step(loss_fn, optax.sgd(0.1), batch_size=8, devices=jax.devices()[:1], **options) as step:
        try:
            state, _ = step(step.init(getattr(loss_fn, "params", PARAMS)), batch)
            step.evaluate(state, [batch])
        except (KeyError, AttributeError) as error:
            return error.__notes__
    raise AssertionError("no error")


def test_a_missing_field_is_answered_with_those_there_are():
    assert "The data have the fields 'x', 'y'." in notes_of(lambda params, batch, keys: batch["image"])


def test_random_numbers_in_an_evaluation_are_explained():
    noisy = lambda network, example, rngs: jnp.sum(network(example["x"]) + jax.random.normal(rngs.noise()))
    model = hetjax.from_nnx(nnx.Linear(3, 1, rngs=nnx.Rngs(0)), noisy)
    (note,) = [note for note in notes_of(model) if "evaluation" in note]
    assert note == "In evaluation the third argument of the loss (rngs or keys) is None."
