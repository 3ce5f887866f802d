"""A plain Flax NNX training loop, one device and the whole batch at once, as the reference of the adapter's tests."""

from __future__ import annotations

from typing import Any

import chex
import jax
import jax.numpy as jnp
import microbatches
import numpy as np
import optax
from flax import nnx

import hetjax

WORKERS, BATCH, STEPS = 4, 20, 4
COUNTS = "fixed:9,6,4,1"  # relative speeds: unequal counts that sum to the batch


def batches(data: Any, steps: int = STEPS, batch: int = BATCH) -> list[Any]:
    """Consecutive batches of the data, wrapping around."""
    rows = len(jax.tree.leaves(data)[0])
    return [jax.tree.map(lambda x, k=k: np.take(x, np.arange(k * batch, (k + 1) * batch) % rows, 0), data)
            for k in range(steps)]  # fmt: skip


def train_plain(model: nnx.Module, optimizer: Any, loss: Any, data: Any, *, wrt: Any = nnx.Param, steps: int = STEPS):
    """nnx.Optimizer on the mean of `loss(model, example)` over the batch; returns the model and its losses."""
    model = nnx.clone(model)
    holder = nnx.Optimizer(model, optimizer, wrt=wrt)

    @nnx.jit
    def step(model, holder, batch):
        def mean(model):
            graph, state = nnx.split(model)
            return jax.vmap(lambda example: loss(nnx.merge(graph, state, copy=True), example))(batch).mean()

        value, grads = nnx.value_and_grad(mean, argnums=nnx.DiffState(0, wrt))(model)
        holder.update(model, grads, value=value)
        return value

    losses = [float(step(model, holder, batch)) for batch in batches(data, steps)]
    return model, losses


def train_hetjax(model: hetjax.FlaxModel, optimizer: Any, data: Any, *, steps: int = STEPS, **options: Any):
    """The same steps, split unequally among the workers; returns the state and the losses."""
    options = {
        "devices": jax.devices()[:WORKERS],
        "controller": COUNTS,
        "engine": hetjax.Chunked(rungs=[10]),
        **options,
    }
    with hetjax.Step(model, optimizer, batch_size=BATCH, **options) as step:
        state, records = step.init(model.params, model.model_state), []
        for batch in batches(data, steps):
            state, record = step(state, batch)
            records.append(record)
        records.append(step.flush())
        return step.export(state), [record.loss for record in records[1:]]


def assert_same_model(got: nnx.Module, expected: nnx.Module, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    """Compare all parameters."""
    plain = lambda model: jax.tree.map(lambda x: jnp.asarray(np.asarray(x, np.float32)), nnx.state(model, nnx.Param))
    chex.assert_trees_all_close(plain(got), plain(expected), rtol=rtol, atol=atol)


def check_equal(network: nnx.Module, loss: Any, data: Any, optimizer: Any = None, *, wrt: Any = None) -> hetjax.State:
    """Train both ways and compare losses and parameters."""
    optimizer = optax.sgd(0.1, 0.9) if optimizer is None else optimizer
    model = hetjax.from_nnx(network, loss, wrt=wrt)
    state, losses = train_hetjax(model, optimizer, data)
    expected, plain_losses = train_plain(network, optimizer, loss, data, wrt=nnx.Param if wrt is None else wrt)
    np.testing.assert_allclose(losses, plain_losses, rtol=1e-5)
    assert_same_model(model.merge(state.params, None), expected, atol=1e-5)
    return state


def check_equal_in_microbatches(network: nnx.Module, loss: Any, data: Any, rows: int = 4) -> hetjax.State:
    """The same for a model with 16-bit gradients, whose rounding follows the microbatches of `rows` rows."""
    optimizer, model = optax.sgd(0.1, 0.9), hetjax.from_nnx(network, loss)
    state, losses = train_hetjax(model, optimizer, data, engine=hetjax.Chunked(rungs=[rows]))
    graph, params = nnx.split(network, nnx.Param)

    def loss_fn(params, batch, keys):
        return jax.vmap(lambda example: loss(nnx.merge(graph, params, copy=True), example))(batch)

    counts_W = [int(count) for count in COUNTS.partition(":")[2].split(",")]
    params, plain_losses = microbatches.train(loss_fn, params, optimizer, batches(data), counts_W, rows)
    np.testing.assert_allclose(losses, plain_losses, rtol=1e-5)
    assert_same_model(model.merge(state.params, None), nnx.merge(graph, params))
    return state
