"""What nodes agree on: all-reduce in blocking phases, the right fixed point otherwise, and bfloat16 on the wire."""

import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from daso_reference import Reference
from daso_setups import BATCH, SAMPLES, Driven, Fixed, flat, node_parts, per_node, quadratic, tanh_net, trainer
from problems import distance

from hetjax import Chunked, Trainer
from hetjax.devices.workers import Workers
from hetjax.presets import choose
from hetjax.sync.allreduce import AllReduce
from hetjax.sync.daso import Daso
from hetjax.sync.daso.averaging import blend_weights
from hetjax.sync.daso.exchange import NodeMessage, from_words
from hetjax.sync.daso.node import in_one_process
from hetjax.sync.daso.reduce import DasoReduce

COUNTS, SIZES = [4, 1, 2, 1], [2, 1, 1]


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    "optimizer",
    [
        optax.chain(optax.clip_by_global_norm(0.5), optax.adam(optax.cosine_decay_schedule(0.1, 20))),
        pytest.param(
            optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(optax.cosine_decay_schedule(0.2, 20), momentum=0.9)),
            marks=pytest.mark.slow,
        ),
        pytest.param(optax.lion(1e-2), marks=pytest.mark.slow),
    ],
    ids=["clipped adam with a schedule", "clipped momentum", "lion"],
)
def test_blocking_phases_are_allreduce(optimizer):
    loss_fn, data, params, _ = tanh_net()
    runs = []
    for sync in (AllReduce(), Daso(nodes=SIZES, warm_up=3)):
        with trainer(loss_fn, COUNTS, SIZES, optimizer, sync) as made:
            state, history = made.fit(made.init(params), data, epochs=3)
            runs.append((flat(made.answer(state).params), history.losses))
    np.testing.assert_allclose(runs[1][0], runs[0][0], rtol=1e-10)
    np.testing.assert_allclose(runs[1][1], runs[0][1], rtol=1e-10)


def test_model_state_moving_average_and_optimizer_are_averaged():
    """As with all-reduce in blocking phases; otherwise equal after an epoch, momentum only before a blocking one."""
    _, data, params, _ = quadratic()
    data, params = {"c": data["c"].astype(np.float32)}, params.astype(np.float32)

    def loss_fn(params, state, batch, keys, mask_b):
        seen = jnp.where(mask_b[:, None], batch["c"], 0)
        return jnp.sum((params - batch["c"]) ** 2, axis=-1), (seen.sum(0), mask_b.sum())

    def run(sync, epochs):
        held = []
        with Trainer(
            loss_fn, optax.adam(0.1), batch_size=BATCH, controller=Fixed(COUNTS), sync=sync, ema_decay=0.9,
            devices=jax.devices()[:4], engine=Chunked(rungs=[8]),
        ) as made:  # fmt: skip
            state, _ = made.fit(
                made.init(params, np.zeros(3, np.float32)), data, epochs=epochs,
                hooks=[lambda record, state: held.append(jax.tree.map(np.array, state.core))],
            )  # fmt: skip
            return jax.tree.map(np.asarray, made.answer(state)), held[5::6]

    expected, _ = run(AllReduce(), 2)
    blocked, _ = run(Daso(nodes=SIZES, warm_up=2), 2)
    for ours, theirs in zip(blocked.core, expected.core, strict=True):
        assert distance(ours, theirs) < 1e-5
    apart = lambda tree: max(np.ptp(leaf, axis=0).max() for leaf in jax.tree.leaves(tree))
    _, (cycling, before_blocking, blocking) = run(Daso(nodes=SIZES, warm_up=0, cool_down=1), 3)
    for core in (cycling, before_blocking, blocking):
        assert apart((core[0], core[1], core[3])) < 1e-6
    assert apart(cycling[2]) > 1e-3
    assert apart((before_blocking[2], blocking[2])) < 1e-6


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    ("options", "skip", "wait", "expected", "within"),
    [
        ({"overlap": False}, 8, 0, 0.8878, 1e-3),
        ({"blend": "delta"}, 4, 1, 0.8878, 0.012),  # exchanges fall within a round, and are stale by a step
        ({"blend": "paper"}, 4, 1, 0.95, 0.012),  # undoes two thirds of steps 1 and 5 of a round: of nodes 0 and 1
    ],
)
def test_fixed_point_with_unequal_steps_and_unequal_data(options, skip, wait, expected, within):
    """Node j holds samples at c_j = j and takes k_j = 8, 4, 2, 2 steps in a round of 8, as a fast node does.

    Every sample counts alike, so the optimum is (8 x 0 + 4 x 1 + 2 x 2 + 2 x 3) / 16 = .875. Weights by batch per step,
    all equal here, end at sum_j a_j c_j / sum_j a_j with a_j = 1 - .99^k_j, .888; by samples since the last at .417.
    The package follows the reference, whose fixed point is found by running it for long.
    """
    made, center = np.array([8, 4, 2, 2]), np.arange(4.0)
    a = 1 - 0.99**made
    assert round(float(a @ center / a.sum()), 4) == 0.8878
    assert round(float((a * made) @ center / (a @ made)), 3) == 0.417
    active = [(step % 8 + 1) * made // 8 > step % 8 * made // 8 for step in range(641)]
    parts = [[np.full(int(on), j) for j, on in enumerate(active_N)] for active_N in active]
    gradient = lambda x, rows: ((x - center[rows[0]]), 0.0)
    blend, start, steps = options.get("blend", "delta"), np.array([0.88]), 41
    reference = Reference(gradient, 4, 0.01, blend=blend).start(start)
    reference.epoch(parts[:steps], skip, wait, complete=False)
    nodes = Driven(start, optax.sgd(0.01), samples=4000, warm_up=0, cool_down=0, wire="full", **options)
    nodes.sync.schedule.skip = skip
    for active_N in active[:steps]:
        nodes.step([(x - c, 1) if on else (0 * x, 0) for x, c, on in zip(nodes.x, center, active_N, strict=True)])
    np.testing.assert_allclose(nodes.x, reference.x, rtol=1e-9)
    limit = Reference(gradient, 4, 0.01, blend=blend).start(start)
    limit.epoch(parts, skip, wait, complete=False)
    assert np.mean(limit.x) == pytest.approx(expected, abs=within)


@pytest.mark.parametrize(("skip", "wait", "effective"), [(8, 2, 7 / 8), (4, 1, 5 / 6), (2, 1, 2 / 3), (1, 1, 0.6)])
def test_the_papers_blend_undoes_progress(skip, wait, effective):
    """Four equal nodes with constant gradients: the progress of the mean per step."""
    slope = lambda x, rows: (np.ones_like(x), 0.0)
    steps = [[np.zeros(1, int)] * 4] * 401
    for blend, expected in (("paper", effective), ("delta", 1.0)):
        reference = Reference(slope, 4, 1.0, blend=blend).start(np.zeros(1))
        reference.epoch(steps, skip, wait)
        assert -reference.x[0][0] / 401 == pytest.approx(expected, abs=0.01)


def test_blend_weights():
    assert blend_weights("paper", 1, 4) == pytest.approx((1 / 3, 2 / 3, 0))
    assert blend_weights("paper", 2, 4) == pytest.approx((1 / 2, 1 / 2, 0))
    assert blend_weights("delta", 2, 4) == (1, 1, 1)


def bfloat16(x):
    return np.asarray(x, np.float32).astype(ml_dtypes.bfloat16).astype(np.float32)


def test_differences_are_sent_in_bfloat16_and_parameters_keep_their_precision():
    """In NumPy: differences to the last mean are rounded, and their mean once more."""
    rng = np.random.default_rng(5)
    nodes = Driven(np.zeros(7, np.float32), optax.sgd(0.3), samples=400, warm_up=0, cool_down=0)
    x, before, sent = [np.zeros(7, np.float32) for _ in range(4)], np.zeros(7, np.float32), None
    weight = np.array([1, 2, 3, 2], np.float32)
    for step in range(12):
        gradient = rng.normal(size=(4, 7)).astype(np.float32)
        nodes.step([(g * n, n) for g, n in zip(gradient, [1, 2, 3, 2], strict=True)])
        x = [v - np.float32(0.3) * g for v, g in zip(x, gradient, strict=True)]
        if step % 4 == 0:
            sent = [v.copy() for v in x]
        if step % 4 == 1:
            moved = sum(w * bfloat16(v - before) for w, v in zip(weight / 8, sent, strict=True))
            before = before + bfloat16(moved)
            x = [v + before - s for v, s in zip(x, sent, strict=True)]
        np.testing.assert_allclose(nodes.x, x, rtol=1e-5, atol=1e-6)
    assert not np.array_equal(x[0], bfloat16(x[0]))


def test_a_node_with_nonfinite_gradients_is_not_updated():
    zero = np.zeros(2, np.float32)
    nodes = Driven(zero, optax.sgd(0.1), samples=400, warm_up=0, cool_down=0, wire="full")
    nodes.step([(np.full(2, np.nan), 1)] + [(np.ones(2), 1)] * 3)
    assert nodes.reduce.report().nonfinite_W.tolist() == [True, False, False, False]
    np.testing.assert_allclose(nodes.x, [[0, 0]] + [[-0.1, -0.1]] * 3)
    blocking = Driven(zero, optax.sgd(0.1), samples=400, warm_up=1)
    blocking.step([(np.full(2, np.nan), 1)] + [(np.ones(2), 1)] * 3)
    np.testing.assert_array_equal(blocking.x, np.zeros((4, 2)))


@pytest.mark.parametrize("engine", ["looped", "masked"])
def test_other_engines_use_the_parameters_of_each_node(engine):
    loss_fn, data, params, gradient = quadratic()
    data, params = {"c": data["c"].astype(np.float32)}, params.astype(np.float32)
    reference = Reference(gradient, 2, 0.1).start(flat(params))
    for epoch in range(2):
        reference.epoch(node_parts(epoch, [2, 2, 2, 2], [2, 2]), 4, 1)
    with Trainer(
        loss_fn, optax.sgd(0.1), batch_size=BATCH, controller=Fixed([2, 2, 2, 2]), engine=engine, capacity=BATCH,
        sync=Daso(nodes=2, warm_up=0, cool_down=0, wire="full"), devices=jax.devices()[:4],
    ) as made:  # fmt: skip
        state, _ = made.fit(made.init(params), data, epochs=2)
    np.testing.assert_allclose(made.answer(state).params, reference.x[0], rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("blend", ["delta", "paper"])
def test_a_run_resumed_after_any_step_is_the_same_run(blend):
    """Through the host, as with a checkpoint: in every phase, and with a pending exchange."""
    loss_fn, data, params, _ = tanh_net()
    data, params = jax.tree.map(lambda x: x.astype(np.float32), (data, params))
    options = {"warm_up": 1, "cool_down": 1, "stability": 0.9, "max_skip": 4, "blend": blend, "wire": "bfloat16"}
    epochs, pending = 6, []
    with trainer(loss_fn, [6, 2], [1, 1], optax.adam(0.05), **options) as made:
        fresh = made.init(params)
        whole, history = made.fit(fresh, data, epochs=epochs)
        for stop_after in (1, 5, 14, 29) if blend == "delta" else (1, 14):  # the first in the warm-up
            made.sync = Daso(nodes=[1, 1], **options)
            stop = lambda record, state, last=stop_after: made.stop() if record.step == last + 1 else None
            half, first = made.fit(fresh, data, epochs=epochs, hooks=[stop])
            saved, half = json.loads(json.dumps(made.state_dict(half))), jax.tree.map(np.array, half)
            pending.append("sent" in half.more)
            made.sync = Daso(nodes=[1, 1], **options)
            rest, second = made.fit(made.load_state_dict(saved, half), data, stop_at=epochs * SAMPLES)
            np.testing.assert_array_equal(first.losses + second.losses, history.losses, err_msg=f"after {half.step}")
            jax.tree.map(np.testing.assert_array_equal, rest.core, whole.core)
    assert any(pending)
    assert blend == "paper" or not all(pending)


@pytest.mark.parametrize("steps", [1, 3])
def test_another_number_of_nodes_continues_from_the_answer(steps):
    """Weighted by 5, 2 and 1 samples per step. After the first step an exchange is pending, which is dropped."""
    loss_fn, data, params, gradient = quadratic()
    data, params = {"c": data["c"].astype(np.float32)}, params.astype(np.float32)
    with trainer(loss_fn, COUNTS, SIZES, warm_up=0, cool_down=0) as made:
        state, _ = made.fit(made.init(params), data, steps=steps)  # the nodes differ
        assert ("sent" in state.more) == (steps == 1)
        own = per_node(state.params, 3)
        expected = (5 * own[0] + 2 * own[1] + 1 * own[2]) / 8  # 4 + 1, 2 and 1 samples per step
        assert np.abs(expected - np.mean(own, axis=0)).max() > 1e-3
        np.testing.assert_allclose(flat(made.answer(state).params), expected, rtol=1e-5)
        _, loss = gradient(expected, np.arange(SAMPLES))
        assert made.evaluate(state, data)["loss"] == pytest.approx(loss / SAMPLES, rel=1e-5)
        saved = made.state_dict(state)
    state = jax.tree.map(np.asarray, state)
    with trainer(loss_fn, [4, 4], [1, 1], sync=AllReduce()) as made:
        np.testing.assert_allclose(flat(made.load_state_dict(saved, state).params), expected, rtol=1e-5)
    with trainer(loss_fn, [4, 4], [1, 1], optax.sgd(0.0), warm_up=0, cool_down=0) as made:
        other, _ = made.fit(made.load_state_dict(saved, state), data, steps=1)
    assert other.replicas == 2
    for mine in per_node(other.params, 2):
        np.testing.assert_allclose(mine, expected, rtol=1e-5)


@pytest.mark.parametrize(("faithful", "mean", "count"), [(False, -5 / 3, 2), (True, -2, 3)])
def test_unequal_steps_are_averaged_with_their_counters(faithful, mean, count):
    """Nodes with 1 and 2 samples per step take 3 steps and 1: by hand, (1 x 3 + 2 x 1) / 3; as published all have equal
    weights and the first counter is taken."""
    options = {"warm_up": 0, "cool_down": 0, "wire": "full", "faithful": faithful}
    nodes = Driven(np.zeros(2, np.float32), optax.sgd(lambda count: 1.0), samples=400, nodes=2, **options)
    nodes.sync.schedule.begin_at(0, 1)  # the next exchange comes after these steps
    one = np.ones(2, np.float32)
    nodes.step([(one, 1), (2 * one, 2)])
    for _ in range(2):
        nodes.step([(one, 1), (0 * one, 0)])
    np.testing.assert_allclose(nodes.x, [[-3, -3], [-1, -1]])
    answer = nodes.sync.answer(nodes.reduce.state(3, 12))
    np.testing.assert_allclose(answer.params, [mean, mean], rtol=1e-6)
    assert [int(leaf) for leaf in jax.tree.leaves(answer.opt_state)] == [count]


@pytest.mark.parametrize(("epochs", "fifth"), [(4, 0), (5, 1), (14, 2), (20, 4), (100, 4)])
def test_default_warm_up_and_cool_down_are_a_fifth_of_the_epochs_at_most_four(epochs, fifth):
    nodes = Driven(np.zeros(2, np.float32), optax.sgd(0.1), samples=8, nodes=2, epochs=epochs)
    schedule = nodes.sync.schedule
    assert (schedule.warm_up, schedule.cool_down, schedule.total) == (fifth, fifth, epochs)
    assert [schedule.blocking(epoch) for epoch in range(epochs)] == (
        [True] * fifth + [False] * (epochs - 2 * fifth) + [True] * fifth
    )


def test_a_pending_exchange_is_resumed_with_its_own_weights():
    """Sent with 1, 2, 3, 2 samples per step, which then change; received two steps later, by hand."""
    zero = np.zeros(2, np.float32)
    nodes = Driven(zero, optax.sgd(1.0), samples=400, warm_up=0, cool_down=0, wire="full", wait="paper")
    nodes.sync.schedule.wait = 2
    sent = -np.arange(4.0)[:, None] * np.ones(2)
    nodes.step([(-x * n, n) for x, n in zip(sent, [1, 2, 3, 2], strict=True)])
    nodes.step([(zero, n) for n in [3, 1, 1, 3]])
    nodes.reopen()
    np.testing.assert_allclose(nodes.x, sent)
    nodes.step([(zero, 2)] * 4)
    mean = -(1 * 0 + 2 * 1 + 3 * 2 + 2 * 3) / 8
    np.testing.assert_allclose(nodes.x, np.full((4, 2), mean), rtol=1e-6)


def test_requests_are_dropped_when_a_run_is_resumed():
    zero = np.zeros(2, np.float32)
    nodes = Driven(zero, optax.sgd(1.0), samples=400, warm_up=0, cool_down=0, wire="full", wait="paper")
    for _ in range(3):  # the first step sends: later requests wait for the next exchange
        nodes.step([(zero, 1)] * 4, stop=True)
    messages = lambda: [NodeMessage.of(from_words(np.asarray(row))) for row in nodes.reduce.state(3, 12).more["notes"]]
    assert [message.stop for message in messages()] == [1, 1, 1, 1]
    nodes.reopen()
    assert [message.stop for message in messages()] == [0, 0, 0, 0]
    assert [message.steps for message in messages()] == [2, 2, 2, 2]


@pytest.mark.parametrize("faithful", [False, True])
def test_which_phase_sends_sixteen_bits(faithful, monkeypatch):
    """Three epochs of six steps, the second one cycling: by default its exchanges are in 16 bits except for the last,
    as published those of the other two."""
    loss_fn, data, params, _ = quadratic()
    data, params = {"c": data["c"].astype(np.float32)}, params.astype(np.float32)
    kinds = []
    start = DasoReduce._start
    monkeypatch.setattr(DasoReduce, "_start", lambda self, kind, *rest: kinds.append(kind) or start(self, kind, *rest))
    options = {"warm_up": 1, "cool_down": 1, "faithful": faithful, "wire": "bfloat16"}
    with trainer(loss_fn, [4, 4], [1, 1], **options) as made:
        made.fit(made.init(params), data, epochs=3)
    blocking, cycling = ["compressed" if faithful else "total"] * 6, ["mean"] * 3 if faithful else ["compressed"] * 2
    more = [] if faithful else ["mean"]  # the last exchange of the epoch
    assert kinds == [*blocking, *cycling, *more, *blocking]


def test_gradients_in_sixteen_bits_are_close_to_those_in_full_and_half_the_bytes():
    rows = {"c": np.random.default_rng(3).normal(size=(SAMPLES, 20_000)).astype(np.float32)}
    spread = lambda params, batch, keys: 0.5 * ((params - batch["c"]) ** 2).sum(axis=-1)
    ends, sizes = [], []
    for wire in ("full", "bfloat16"):
        with trainer(spread, [4, 4], [1, 1], warm_up=2, gradient_wire=wire) as made:
            state, _ = made.fit(made.init(np.zeros(20_000, np.float32)), rows, epochs=2)
            ends.append(flat(made.answer(state).params))
            sizes.append(sum(record.bytes for record in made.sync.reduce.journal))
    assert not np.array_equal(*ends)
    np.testing.assert_allclose(ends[1], ends[0], atol=0.01 * np.abs(ends[0]).max())
    assert sizes[1] < 0.51 * sizes[0]


def test_as_published_nodes_are_equal():
    assert (Daso(faithful=True).between, Daso().between) == ("equal", "balanced")
    with pytest.raises(ValueError, match="between='equal'"):
        Daso(faithful=True, between="balanced")
    loss_fn, data, params, _ = quadratic()
    with (
        trainer(loss_fn, [4, 2, 2], [2, 1], faithful=True) as made,
        pytest.raises(ValueError, match="assumes equal nodes"),
    ):
        made.fit(made.init(params), data, epochs=1)
    assert choose("daso", faithful=True).controller.name == "equal"
    assert choose("daso").controller.name == "balanced"


def test_as_published_with_any_optimizer_and_bfloat16():
    """Blocking phases send parameters too: the base of their differences is known from the first step on."""
    loss_fn, data, params, _ = tanh_net()
    data, params = jax.tree.map(lambda x: x.astype(np.float32), (data, params))
    ends = []
    for wire in ("bfloat16", "full"):
        options = {"warm_up": 1, "cool_down": 1, "faithful": True, "wire": wire}
        with trainer(loss_fn, [4, 4], [1, 1], optax.adam(0.02), **options) as made:
            state, _ = made.fit(made.init(params), data, epochs=3)
            ends.append(flat(made.answer(state).params))
    moved = np.abs(ends[1] - flat(params)).max()
    np.testing.assert_allclose(*ends, atol=0.02 * moved)
    assert not np.array_equal(*ends)


def test_epochs_include_their_short_last_step():
    """44 samples in steps of 8: six steps are an epoch, not 48 samples."""
    loss_fn, data, params, _ = quadratic()
    data, params = {"c": data["c"].astype(np.float32)}, params.astype(np.float32)
    with trainer(loss_fn, [4, 4], [1, 1]) as made:
        state, _ = made.fit(made.init(params), data, steps=6)
        assert made.sync.schedule.total == 1
        made.fit(state, data, steps=6)
        assert made.sync.schedule.total == 2


def test_one_worker_is_one_node():
    assert in_one_process(Workers.of(jax.devices()[:1]), None).nodes == 1
    assert in_one_process(Workers.of(jax.devices()[:3]), None).nodes == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nodes": 9}, "9 nodes cannot be made of 4 workers"),
        ({"nodes": [3, 3]}, "4 workers"),
        ({"blend": "half"}, "paper, delta"),
        ({"wire": "int8"}, "bfloat16, full"),
    ],
)
def test_invalid_options_are_rejected(options, message):
    with pytest.raises(ValueError, match=message):
        in_one_process(Workers.of(jax.devices()[:4]), Daso(**options).nodes)
