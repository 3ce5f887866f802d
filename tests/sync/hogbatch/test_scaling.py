"""Gradients scaled by batch size: every sample has the same weight, with momentum, weight decay, or Adam."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from async_problem import packed_sums

from hetjax.reduce.layout import Layout
from hetjax.sync.base import UpdateRule
from hetjax.sync.hogbatch.immediate import SharedModel
from hetjax.sync.hogbatch.scaling import is_homogeneous, scale_by_batch

REFERENCE, RATE, MOMENTUM = 256, 0.5, 0.9
BATCHES = [16, 256, 16, 256, 64, 1024]


def params_after(optimizer, batches, zero_batches=0):
    """Parameters after batches, the k-th with the gradient e_k for each sample, and then batches of zero gradients."""
    size = len(batches)
    layout = Layout.of({"w": jax.ShapeDtypeStruct((size,), np.float32)}, (), ())
    params = {"w": jnp.zeros(size)}
    core = params, None, optimizer.init(params), None
    shared = SharedModel(layout, UpdateRule(optimizer, None, None), core, jax.devices()[0])
    tail = [(np.zeros(size), batch) for batch in (16, 256) * (zero_batches // 2)]
    for gradient_K, batch in [*zip(np.eye(size), batches, strict=True), *tail]:
        shared.apply(packed_sums(layout, batch * gradient_K, batch), batch / REFERENCE)
    return np.asarray(shared.snapshot.core[0]["w"])


def test_with_momentum_every_sample_has_the_same_weight():
    """The trace m = 0.9 m + s g gives the gradient of a batch the weight lr s (1 + 0.9 + 0.81 + ...) = 10 lr s.

    With s = b / reference that is 10 lr / reference for each of its b samples. Scaling updates instead, with batches of
    16 and 256 in turn, would give samples weights of 14.6 to 1.
    """
    per_sample_K = params_after(optax.sgd(RATE, MOMENTUM), BATCHES, zero_batches=300) / BATCHES
    np.testing.assert_allclose(per_sample_K, -RATE / (1 - MOMENTUM) / REFERENCE, rtol=1e-5)


def test_without_momentum_an_update_is_scaled_by_its_batch():
    np.testing.assert_allclose(params_after(optax.sgd(RATE), BATCHES), -RATE * np.array(BATCHES) / REFERENCE, rtol=1e-6)


@pytest.mark.parametrize("momentum", [None, MOMENTUM])
def test_weight_decay_is_scaled_by_batch_too(momentum):
    """A quarter of the reference batch decays weights by a quarter."""
    optimizer = optax.chain(optax.add_decayed_weights(0.1), optax.sgd(0.01, momentum))
    homogeneous, params = {"w": True}, {"w": jnp.ones(1)}
    once, _ = optimizer.update({"w": jnp.ones(1)}, optimizer.init(params), params)
    part, _ = scale_by_batch(optimizer, homogeneous, 0.25, 1.0).update(
        {"w": jnp.ones(1)}, optimizer.init(params), params
    )
    np.testing.assert_allclose(part["w"], 0.25 * once["w"], rtol=1e-6)


@pytest.mark.parametrize("batch", [16, 64])
def test_with_equal_batches_adam_makes_scaled_updates(batch):
    plain, scale = optax.adamw(0.1), batch / REFERENCE
    params, grads = {"w": jnp.ones(3)}, {"w": jnp.array([1.0, -2.0, 0.5])}
    part, state, whole = scale_by_batch(plain, {"w": False}, scale, 1.0), plain.init(params), plain.init(params)
    for _ in range(5):
        found, state = part.update(grads, state, params)
        expected, whole = plain.update(grads, whole, params)
        np.testing.assert_allclose(found["w"], scale * expected["w"], rtol=1e-5)


MASK = {"a": True, "b": False}
WARM_UP = optax.linear_schedule(0.0, 0.1, 1000)


@pytest.mark.parametrize(
    ("optimizer", "homogeneous"),
    [
        (optax.sgd(0.1), True),
        (optax.sgd(WARM_UP, 0.9, nesterov=True), True),
        (optax.chain(optax.clip_by_global_norm(0.1), optax.add_decayed_weights(0.1, MASK), optax.sgd(0.1, 0.9)), True),
        (optax.lars(0.1, weight_decay=0.1), True),
        (optax.lamb(0.1, weight_decay=0.1), True),
        (optax.set_to_zero(), True),
        (optax.adam(0.1), False),
        (optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(WARM_UP, weight_decay=0.1, mask=MASK)), False),
        (optax.lion(0.1), False),
        (optax.rmsprop(0.1, momentum=0.9), False),
        (optax.multi_transform({"x": optax.sgd(0.1), "y": optax.adam(0.1)}, {"a": "x", "b": "y"}), MASK),
    ],
)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_which_optimizers_are_homogeneous(optimizer, homogeneous, dtype):
    params = {"a": jax.ShapeDtypeStruct((4, 3), dtype), "b": jax.ShapeDtypeStruct((), dtype)}
    found = is_homogeneous(optimizer, params)
    assert found == (homogeneous if isinstance(homogeneous, dict) else dict.fromkeys("ab", homogeneous))
