"""NNX style: an nnx.Optimizer in place of optax, and model and optimizer updated in place."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import plain_flax
import pytest
from flax import linen, nnx

import hetjax

RNG = np.random.default_rng(0)
DATA = {"x": RNG.normal(size=(40, 3)).astype(np.float32), "y": RNG.normal(size=40).astype(np.float32)}


def square(model, example):
    return jnp.square(model(example["x"])[0] - example["y"])


def make(rngs):
    return nnx.Sequential(nnx.Linear(3, 4, rngs=rngs), jnp.tanh, nnx.LoRA(4, 2, 1, rngs=rngs, base_module=nnx.Linear(4, 1, rngs=rngs)))  # fmt: skip  # noqa: E501


@pytest.mark.parametrize("wrt", [nnx.Param, nnx.LoRAParam])
def test_model_and_optimizer_are_updated_in_place_and_go_on(wrt):
    """Twice two steps through hetjax are four steps of nnx.Optimizer."""
    network, tx = make(nnx.Rngs(0)), optax.adam(1e-2)
    optimizer = nnx.Optimizer(network, tx, wrt=wrt)
    expected, _ = plain_flax.train_plain(network, tx, square, DATA, wrt=wrt, steps=2)
    model = hetjax.from_nnx(network, square)
    state, _ = plain_flax.train_hetjax(model, optimizer, DATA, steps=2)
    model.update(network, state, optimizer)
    plain_flax.assert_same_model(network, expected)
    assert int(optimizer.step[...]) == 2

    again, _ = plain_flax.train_hetjax(hetjax.from_nnx(network, square), optimizer, DATA, steps=2)
    assert int(jax.tree.leaves(again.opt_state)[0]) == 4  # Adam's count of steps goes on
    assert (again.step, again.cursor) == (4, 4 * plain_flax.BATCH)
    model.update(network, again, optimizer)
    assert int(optimizer.step[...]) == 4

    reference = make(nnx.Rngs(0))
    holder = nnx.Optimizer(reference, tx, wrt=wrt)
    for batch in [*plain_flax.batches(DATA, 2)] * 2:
        mean = lambda m, batch=batch: jnp.mean((m(batch["x"])[:, 0] - batch["y"]) ** 2)
        holder.update(reference, nnx.grad(mean, argnums=nnx.DiffState(0, wrt))(reference))
    plain_flax.assert_same_model(network, reference)
    own, others = (jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(x))) for x in (optimizer, holder))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), own["opt_state"], others["opt_state"])  # fmt: skip  # noqa: E501


def test_a_continued_optimizer_goes_on_with_the_keys_of_its_steps():
    """Twice two steps with dropout are four, to the bit."""
    noisy = lambda model, example, rngs: jnp.square(model(example["x"])[0] * jax.random.normal(rngs()) - example["y"])
    ends = []
    for parts in ((4,), (2, 2)):
        network = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
        optimizer, losses = nnx.Optimizer(network, optax.sgd(0.1), wrt=nnx.Param), []
        for steps in parts:
            model = hetjax.from_nnx(network, noisy)
            state, more = plain_flax.train_hetjax(model, optimizer, DATA, steps=steps)
            model.update(network, state, optimizer)
            losses += more
        ends.append((losses, np.asarray(network.kernel[...]).tolist(), int(optimizer.step[...])))
    assert ends[0] == ends[1]


@pytest.mark.parametrize("options", [{}, {"controller": "dbs", "partition": "proportional"}])
def test_fit_goes_on_in_the_epoch_of_a_continued_optimizer(options):
    """3 steps of 16 are an epoch of 40 samples; shards are cut anew at its start."""
    network, seen = nnx.Linear(3, 1, rngs=nnx.Rngs(0)), []
    optimizer = nnx.Optimizer(network, optax.sgd(0.1), wrt=nnx.Param)
    note = lambda record, state: seen.append((record.step, record.epoch, int(record.counts_W.sum())))
    for steps in (4, 2):
        model = hetjax.from_nnx(network, square)
        with hetjax.Trainer(model, optimizer, batch_size=16, devices=jax.devices()[:2], **options) as trainer:
            state, _ = trainer.fit(trainer.init(model.params), DATA, steps=steps, hooks=[note])
        model.update(network, state, optimizer)
    assert [step for step, _, _ in seen] == [1, 2, 3, 4, 5, 6]
    if options:
        assert [epoch for _, epoch, _ in seen] == [0, 0, 0, 1, 1, 1]
    else:
        assert [rows for _, _, rows in seen] == [16, 16, 8] * 2
    assert int(optimizer.step[...]) == 6


def test_a_loader_by_number_goes_on_at_the_step_of_a_continued_optimizer():
    network, asked = nnx.Linear(3, 1, rngs=nnx.Rngs(0)), []
    optimizer = nnx.Optimizer(network, optax.sgd(0.1), wrt=nnx.Param)
    optimizer.step[...] = jnp.uint32(3)
    model = hetjax.from_nnx(network, square)
    batch_of = lambda number: DATA | {"y": np.full(40, number, np.float32)} if number < 5 else None
    with hetjax.Step(model, optimizer, batch_size=40, devices=jax.devices()[:1]) as step:
        state = step.init(model.params)
        for batch in step.batches(batch_of):
            state, _ = step(state, batch)
            asked.append(float(batch.at(state.step - 1).rows(0, 1)["y"][0]))
    assert (asked, state.step) == ([3.0, 4.0], 5)


def test_an_optimizer_of_other_parameters_is_refused_at_the_beginning():
    """It would silently train less: the model trains only its LoRA parameters."""
    network = make(nnx.Rngs(0))
    optimizer = nnx.Optimizer(network, optax.adam(0.1), wrt=nnx.Param)
    model = hetjax.from_nnx(network, square, wrt=nnx.LoRAParam)
    with (
        hetjax.Step(model, optimizer, batch_size=8, devices=jax.devices()[:1]) as step,
        pytest.raises(ValueError, match=r"does not fit the parameters that are trained.* trains less than it says"),
    ):
        step.init(model.params)


def test_a_live_state_is_copied_with_its_statistics():
    network = nnx.Sequential(nnx.Linear(3, 4, rngs=nnx.Rngs(0)), hetjax.BatchNorm(4, group=4), nnx.Linear(4, 1, rngs=nnx.Rngs(1)))  # fmt: skip  # noqa: E501
    model = hetjax.from_nnx(network, square)
    with hetjax.Step(model, optax.sgd(0.1), batch_size=40, devices=jax.devices()[:2]) as step:
        state, _ = step(step.init(model.params, model.model_state), DATA)
        model.update(network, state)
        kernel = np.asarray(network.layers[0].kernel[...])
        assert not np.array_equal(kernel, model.params["layers"][0]["kernel"][...])
        np.testing.assert_array_equal(network.layers[1].mean[...], state.model_state["layers"][1]["mean"][...])
        step(state, DATA)
        step.flush()
    np.testing.assert_array_equal(kernel, network.layers[0].kernel[...])


def test_what_does_not_fit_is_rejected():
    network = make(nnx.Rngs(0))
    model = hetjax.from_nnx(network, square)
    adam, other = (nnx.Optimizer(network, tx, wrt=nnx.Param) for tx in (optax.adam(0.1), optax.sgd(0.1, 0.9)))
    with hetjax.Trainer(model, adam, batch_size=8, sync="decentralized", devices=jax.devices()[:2]) as trainer:
        state = trainer.init(model.params)
        with pytest.raises(ValueError, match="does not fit the parameters"):
            model.update(network, state, other)
        with pytest.raises(TypeError, match="NNX module, got Dense"):
            model.update(linen.Dense(1), state)
        state, _ = trainer.fit(state, DATA, steps=1)
        with pytest.raises(ValueError, match=r"trainer\.answer"):
            model.update(network, state)
        model.update(network, trainer.answer(state), adam)
