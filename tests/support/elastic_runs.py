"""A small run for the members of an elastic fleet, the same run undisturbed, and ways to die at a chosen moment."""

import functools

import jax
import numpy as np
import optax
from elastic_fleet import Killed

import hetjax

STEPS, BATCH, SAMPLES = 12, 24, 96
RNG = np.random.default_rng(0)
DATA = {"x": RNG.normal(size=(SAMPLES, 8)).astype(np.float32), "y": RNG.normal(size=SAMPLES).astype(np.float32)}


def loss_fn(params, batch, keys):
    hidden = jax.numpy.tanh(batch["x"] @ params["w"] + params["b"])
    return (hidden @ params["v"] - batch["y"]) ** 2


def predict_fn(params, batch, keys):
    return jax.numpy.tanh(batch["x"] @ params["w"] + params["b"]) @ params["v"]


def params():
    rng = np.random.default_rng(1)
    return {name: rng.normal(size=shape).astype(np.float32) * 0.3
            for name, shape in (("w", (8, 16)), ("b", (16,)), ("v", (16,)))}  # fmt: skip


def trainer(devices, **options):
    options = {"engine": hetjax.Chunked(rungs=[4, 8]), "seed": 3, "predict_fn": predict_fn} | options
    return hetjax.Trainer(loss_fn, optax.sgd(0.05, momentum=0.9), batch_size=BATCH, devices=devices, **options)


def own(link):
    """The device of a member."""
    return [jax.devices()[link.number % 8]]


@functools.cache
def undisturbed():
    """The state and the losses of the run in one process."""
    with trainer(jax.devices()[:1]) as alone:
        state, history = alone.fit(alone.init(params()), DATA, steps=STEPS)
        return jax.tree.map(np.asarray, state), history.losses


def result(each, state, history):
    """What `check` compares."""
    return jax.tree.map(np.asarray, state), history, each.step.recovery.events


def member(link, hook=None, **options):
    with trainer(own(link), **options) as each:
        hooks = [] if hook is None else [lambda record, state: hook(link, record, each)]
        return result(each, *each.fit(each.init(params()), DATA, steps=STEPS, hooks=hooks))


def check(result, there=None, steps=STEPS):
    """The result of a member that made the last `steps` steps is that of the undisturbed run."""
    state, history, _ = result
    whole, losses = there or undisturbed()
    assert [record.step for record in history.records] == list(range(STEPS - steps + 1, STEPS + 1))
    np.testing.assert_allclose(history.losses, losses[-steps:], rtol=1e-5)
    for a, b in zip(jax.tree.leaves(state.core), jax.tree.leaves(whole.core), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    assert (state.step, state.cursor) == (whole.step, whole.cursor)


def killing(link, kills):
    """Let members die as they send their k-th message after a step was reached: {member: (step, k)}."""
    if link.number not in kills:
        return
    (step, k), send, left = kills[link.number], link.send, [None]

    def one(*message):
        if link.step >= step and left[0] is None:
            left[0] = k
        if left[0] == 0:
            raise Killed
        if left[0] is not None:
            left[0] -= 1
        return send(*message)

    link.send = one


def count_down(link, sends):
    """The thread of this member dies as it sends its next but `sends` message."""
    send, left = link.send, [sends]

    def one(*message):
        left[0] -= 1
        if left[0] < 0:
            raise Killed
        return send(*message)

    link.send = one


def dying_in(owner, method, link, sends, when=lambda: True):
    """Let a member die as it sends its next but `sends` message after a method of its objects was called."""
    call, armed = getattr(owner, method), [True]

    def one(*args, **options):
        if armed[0] and when():
            armed[0] = False
            count_down(link, sends)
        return call(*args, **options)

    setattr(owner, method, one)
