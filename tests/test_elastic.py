"""Members of an elastic fleet come and go; the run stays the same."""

import jax
import numpy as np
import optax
import pytest
from elastic_fleet import Fleet, Killed

import hetjax

STEPS, BATCH, SAMPLES = 12, 24, 96
RNG = np.random.default_rng(0)
DATA = {"x": RNG.normal(size=(SAMPLES, 8)).astype(np.float32), "y": RNG.normal(size=SAMPLES).astype(np.float32)}


def loss_fn(params, batch, keys):
    hidden = jax.numpy.tanh(batch["x"] @ params["w"] + params["b"])
    return (hidden @ params["v"] - batch["y"]) ** 2


def params():
    rng = np.random.default_rng(1)
    return {name: rng.normal(size=shape).astype(np.float32) * 0.3
            for name, shape in (("w", (8, 16)), ("b", (16,)), ("v", (16,)))}  # fmt: skip


def trainer(devices, **options):
    options = {"engine": hetjax.Chunked(rungs=[4, 8]), "seed": 3} | options
    return hetjax.Trainer(loss_fn, optax.sgd(0.05, momentum=0.9), batch_size=BATCH, devices=devices, **options)


@pytest.fixture(scope="module")
def undisturbed():
    with trainer(jax.devices()[:1]) as alone:
        state, history = alone.fit(alone.init(params()), DATA, steps=STEPS)
        return jax.tree.map(np.asarray, state), history.losses


def member(link, hook=None, **options):
    device = jax.devices()[link.number % 8]
    with trainer([device], **options) as each:
        hooks = [] if hook is None else [lambda record, state: hook(link, record, each)]
        state, history = each.fit(each.init(params()), DATA, steps=STEPS, hooks=hooks)
        return jax.tree.map(np.asarray, state), history, each.step.recovery.events


def check(result, undisturbed, steps=STEPS):
    state, history, _ = result
    there, losses = undisturbed
    assert [record.step for record in history.records] == list(range(STEPS - steps + 1, STEPS + 1))
    np.testing.assert_allclose(history.losses, losses[-steps:], rtol=1e-5)
    for a, b in zip(jax.tree.leaves(state.core), jax.tree.leaves(there.core), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    assert (state.step, state.cursor) == (there.step, there.cursor)


@pytest.mark.parametrize("update", ["sharded", "replicated"])
def test_undisturbed(undisturbed, update):
    with Fleet(lambda link: member(link, update=update), 3) as fleet:
        results = fleet.end()
    for result in results.values():
        check(result, undisturbed)


@pytest.mark.parametrize("update", ["sharded", "replicated"])
@pytest.mark.parametrize("victim", [0, 2])
def test_a_lost_member(undisturbed, update, victim):
    def hook(link, record, each):
        if link.number == victim and record.step == 5:
            raise Killed

    with Fleet(lambda link: member(link, hook, update=update), 3) as fleet:
        results = fleet.end()
    assert sorted(results) == [number for number in range(3) if number != victim]
    for result in results.values():
        check(result, undisturbed)
