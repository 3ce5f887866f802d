"""Decentralized SGD against the recursion in NumPy, its communication, and resumed runs."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from holder import Holder
from mixing_matrix import mixing_matrix
from problems import RandomPlans, problem

from hetjax import Chunked, NonFiniteError, Trainer
from hetjax.devices.workers import Workers
from hetjax.engines.clocks import LocalResult
from hetjax.planning.controllers.base import Plan
from hetjax.reduce.base import own_slots
from hetjax.reduce.layout import Layout, StepSums
from hetjax.reduce.transports import ReduceOptions
from hetjax.sampling.order import Sampler, Span
from hetjax.state import State
from hetjax.sync import AllReduce, Decentralized
from hetjax.sync.base import SyncContext, UpdateRule
from hetjax.sync.neighbors import NeighborMessages
from hetjax.sync.topology import complete, matcha, ring

SAMPLES, BATCH, SIZE = 60, 20, 3


class Counts:
    """A controller with fixed counts."""

    name = "counts"

    def __init__(self, counts):
        self.counts_W = np.array(counts)

    def plan(self, batch, limits, epoch=0):
        assert batch == self.counts_W.sum()
        return Plan(self.counts_W)

    def observe(self, seen):
        pass

    def state_dict(self):
        return {}


def squares(params, batch, keys):
    return 0.5 * (batch["a"] @ params["x"] - batch["t"]) ** 2


def quadratic(seed=0, dtype=np.float64):
    """Least squares whose targets drift along the data set, so that workers have different solutions."""
    rng = np.random.default_rng(seed)
    a = rng.normal(size=(SAMPLES, SIZE))
    return {"a": a.astype(dtype), "t": (a @ [1.0, -2, 0.5] + np.linspace(-1, 3, SAMPLES)).astype(dtype)}


def stationary(matrix, counts_W, faithful):
    """Weights pi, and the W' that keeps them: W' = W min(1, pi_j / pi_i) with b / B, or 1 / (8 N) if that is less."""
    workers = len(counts_W)
    share_W = np.full(workers, 1 / workers)
    if not faithful and np.allclose(matrix, matrix.T):
        share_W = np.maximum(np.array(counts_W) / np.sum(counts_W), 1 / (8 * workers))
        share_W /= share_W.sum()
    if np.allclose(matrix, 1 / workers):
        return share_W, np.tile(share_W, (workers, 1))
    weighted = matrix * np.minimum(1, share_W / share_W[:, None])
    np.fill_diagonal(weighted, 0)
    return share_W, weighted + np.diag(1 - weighted.sum(axis=1))


def by_hand(data, matrices, counts_SxW, rate, momentum=0.0, seed=0, faithful=False, symmetric=True):
    """x_i <- sum_j W'_ij x_j - rate m_i, m_i <- momentum m_i + g_i(x_i), worker by worker in float64."""
    workers = len(counts_SxW[0])
    x_WxP, m_WxP, cursor = np.zeros((workers, SIZE)), np.zeros((workers, SIZE)), 0
    sampler = Sampler(SAMPLES, BATCH, seed)
    for matrix, counts_W in zip(matrices, counts_SxW, strict=True):
        step = sampler.step(cursor)
        index = sampler.indices(step.epoch, step.start, step.stop)
        share_W, matrix = stationary(matrix, counts_W, faithful or not symmetric)
        grad_WxP = np.zeros_like(x_WxP)
        for i, mine in enumerate(np.split(index, np.cumsum(counts_W)[:-1])):
            a, t = data["a"][mine].astype(np.float64), data["t"][mine].astype(np.float64)
            total = a.T @ (a @ x_WxP[i] - t)
            if len(mine):
                grad_WxP[i] = total / len(mine) if faithful else total / (share_W[i] * step.batch)
        m_WxP = momentum * m_WxP + grad_WxP
        x_WxP = matrix @ x_WxP - rate * m_WxP
        cursor += step.batch
    return x_WxP


def trained(data, sync, workers, steps, controller, optimizer=None, state=None, **options):
    options = {"batch_size": BATCH, "engine": Chunked(rungs=[4, BATCH]), **options}
    with Trainer(
        squares,
        optimizer or optax.sgd(0.05),
        controller=controller,
        sync=sync,
        devices=jax.devices()[:workers],
        **options,
    ) as trainer:
        state = trainer.init({"x": jnp.zeros(SIZE, data["a"].dtype)}) if state is None else state
        state, history = trainer.fit(state, data, steps=steps)
        return state, history, trainer.answer(state)


CUSTOM = np.array([[0.5, 0.3, 0.2, 0], [0.1, 0.6, 0.1, 0.2], [0.4, 0, 0.5, 0.1], [0, 0.1, 0.2, 0.7]])  # not symmetric


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    ("topology", "every", "counts", "faithful", "momentum"),
    [
        # every topology once in the fast tests
        pytest.param("ring", 1, [5, 5, 5, 5], False, 0.0, marks=pytest.mark.slow),
        ("ring", 2, [9, 6, 4, 1], False, 0.9),
        pytest.param("ring", 3, [9, 6, 4, 1], True, 0.0, marks=pytest.mark.slow),
        pytest.param("complete", 1, [9, 6, 4, 1], False, 0.9, marks=pytest.mark.slow),
        ("complete", 2, [12, 0, 7, 1], True, 0.9),
        (CUSTOM, 1, [10, 0, 10, 0], False, 0.9),
        pytest.param(CUSTOM, 3, [9, 6, 4, 1], False, 0.0, marks=pytest.mark.slow),
    ],
)
def test_recursion_in_float64(topology, every, counts, faithful, momentum):
    data, steps = quadratic(), 14
    sync = Decentralized(topology, every, faithful=faithful)
    state, history, answer = trained(data, sync, 4, steps, Counts(counts), optax.sgd(0.05, momentum))
    matrix = {"ring": ring, "complete": complete}[topology](4) if isinstance(topology, str) else topology
    matrices = [matrix if k % every == 0 else np.eye(4) for k in range(steps)]
    symmetric = np.array_equal(matrix, matrix.T)
    expected_WxP = by_hand(data, matrices, history.counts, 0.05, momentum, faithful=faithful, symmetric=symmetric)
    share_W, _ = stationary(matrix, history.counts[-1], faithful)
    assert state.replicas == 4
    np.testing.assert_allclose(np.asarray(state.params["x"]), expected_WxP, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(np.asarray(answer.params["x"]), share_W @ expected_WxP, rtol=1e-9, atol=1e-9)
    assert history.recompiles_after_warmup == 0


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("workers", [5, pytest.param(8, marks=pytest.mark.slow)])
def test_recursion_with_matcha_and_random_plans(workers):
    data, steps, seed = quadratic(1), 20, 11
    sync = Decentralized("ring", 2, matcha_budget=0.4)
    state, history, _ = trained(data, sync, workers, steps, RandomPlans(2), seed=seed)
    mixing = matcha(ring(workers), 0.4)
    drawn = [mixing.active(seed, k) for k in range(steps)]
    matrices = [mixing_matrix(mixing, drawn[k]) if k % 2 == 0 else np.eye(workers) for k in range(steps)]
    assert len({tuple(active) for active in drawn[::2]}) > 2
    expected_WxP = by_hand(data, matrices, history.counts, 0.05, seed=seed)
    np.testing.assert_allclose(np.asarray(state.params["x"]), expected_WxP, rtol=1e-9, atol=1e-9)
    assert history.recompiles_after_warmup == 0


@pytest.mark.parametrize("engine", [pytest.param("chunked", marks=pytest.mark.slow), "looped", "masked"])
def test_every_engine_in_float32(engine):
    data = quadratic(dtype=np.float32)
    engine = Chunked(rungs=[4, BATCH]) if engine == "chunked" else engine
    options = {"engine": engine, "capacity": BATCH}
    state, history, _ = trained(data, Decentralized(mix_every=2), 4, 12, Counts([9, 6, 4, 1]), **options)
    matrices = [ring(4) if k % 2 == 0 else np.eye(4) for k in range(12)]
    expected_WxP = by_hand(data, matrices, history.counts, 0.05)
    np.testing.assert_allclose(np.asarray(state.params["x"]), expected_WxP, rtol=1e-5, atol=1e-5)


# -- the reduce alone --


def opened(sync, workers, params, optimizer, state=None, **rule):
    """The reduce of a sync for these parameters, and the layout of their sums."""
    layout = Layout.of(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params), (), ())
    context = SyncContext(
        Workers.of(jax.devices()[:workers]),
        layout,
        UpdateRule(optimizer, None, rule.get("ema_decay")),
        ReduceOptions(),
        10,
    )
    ema = None if rule.get("ema_decay") is None else params
    return Holder(sync.open(context, state or State(params, None, optimizer.init(params), ema))), layout


def step(reduce, layout, grads, counts):
    """One step from the workers' gradient sums and counts."""
    results = []
    for device, grad, count in zip(reduce.workers.own, grads, counts, strict=True):
        zero = np.zeros(())
        parts = layout.pack(StepSums(grad, (), zero, zero + count, zero + count, {}))
        results.append(LocalResult(tuple(jax.device_put(part[None], device) for part in parts), count, 0.0, 0.0))
    reduce.step(results, [own_slots(None, count, 0, False) for count in counts], Span(0, 0, sum(counts)))


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("counts", [pytest.param([5, 5, 5, 5], marks=pytest.mark.slow), [11, 6, 2, 1]])
@pytest.mark.parametrize("faithful", [False, True])
def test_complete_mixing_converges_to_the_solution_of_allreduce(counts, faithful):
    """Every worker's samples have their own solution.

    With a falling learning rate the mean of the workers converges to the solution of all samples. The published method
    converges to another one if counts are unequal, since it weighs all workers equally.
    """
    rng = np.random.default_rng(5)
    a, owner = rng.normal(size=(20, SIZE)), np.repeat(np.arange(4), counts)
    t = a @ [1.0, -2, 0.5] + np.array([-2.0, 0.5, 3, 6])[owner]
    alike = np.sqrt(1 / np.array(counts))[owner] if faithful else np.ones(20)
    expected = np.linalg.lstsq(a * alike[:, None], t * alike, rcond=None)[0]

    def run(sync, steps):
        reduce, layout = opened(sync, 4, {"x": jnp.zeros(SIZE)}, optax.sgd(lambda k: 0.2 / (1 + k / 10)))
        for _ in range(steps):
            x_WxP = np.broadcast_to(np.asarray(reduce.state(0, 0).params["x"]), (4, SIZE))
            grads = [{"x": a[owner == i].T @ (a[owner == i] @ x_WxP[i] - t[owner == i])} for i in range(4)]
            step(reduce, layout, grads, counts)
        return np.asarray(sync.answer(reduce.state(0, 0)).params["x"])

    apart = [np.abs(run(Decentralized("complete", faithful=faithful), steps) - expected).max() for steps in (20, 300)]
    assert apart[1] < 0.04
    assert apart[1] < apart[0] / 3
    reduced = run(AllReduce(), 200)
    np.testing.assert_allclose(reduced, np.linalg.lstsq(a, t, rcond=None)[0], atol=5e-3)
    if faithful and counts[0] > 5:
        assert np.abs(reduced - expected).max() > 0.3  # the published method converges elsewhere


def exchanged(monkeypatch, sync, workers, steps):
    """Of each step: what parameters move, as {(sender, receiver): elements}, and the elements of all means."""
    params = {"large": jnp.zeros((200, 100)), "small": jnp.zeros(7), "one": jnp.zeros(())}
    reduce, layout = opened(sync, workers, params, optax.adam(0.1))
    moved, mean = [], NeighborMessages.mean
    size = lambda arrays: sum(x.size for x in arrays)

    def copy(messages, own, sources_w):
        pairs = [(sender, i) for i, sources in enumerate(sources_w) for sender, _ in sources]
        moved[-1][0].update({(sender, i): size(own[sender]) for sender, i in pairs})
        return copied(messages, own, sources_w)

    def averaged(messages, own, share_W):
        moved[-1][1].append(size(own[0]))
        return mean(messages, own, share_W)

    copied = NeighborMessages.copy
    monkeypatch.setattr(NeighborMessages, "copy", copy)
    monkeypatch.setattr(NeighborMessages, "mean", averaged)
    for _ in range(steps):
        moved.append(({}, []))
        step(reduce, layout, [params] * workers, [1] * workers)
    monkeypatch.undo()
    return moved


def test_only_neighbors_exchange_parameters_and_only_in_mixing_steps(monkeypatch):
    size, on_ring = 20008, {(i, (i + d) % 5) for i in range(5) for d in (1, -1)}
    mixing, local, again = exchanged(monkeypatch, Decentralized("ring", 2), 5, 3)
    assert mixing == again == (dict.fromkeys(on_ring, size), [])
    assert local == ({}, [])
    assert exchanged(monkeypatch, Decentralized("complete"), 5, 1) == [({}, [size])]
    drawn = exchanged(monkeypatch, Decentralized("ring", matcha_budget=0.5), 5, 6)
    assert all(set(moved) <= on_ring for moved, _ in drawn)
    assert len({len(moved) for moved, _ in drawn}) > 1  # only the links that were drawn


@pytest.mark.parametrize("topology", ["ring", CUSTOM])
def test_a_large_leaf_is_not_overwritten_while_neighbors_read_it(topology):
    """On CPU devices neighbors read large leaves in place, while the update of their owner would reuse the memory.

    Steps follow each other without a wait, so that updates of several workers run at the same time.
    """
    rng, steps, optimizer = np.random.default_rng(8), 8, optax.sgd(0.1, momentum=0.9)
    random = lambda: {"large": rng.normal(size=(4, 512, 513)), "edge": rng.normal(size=(4, 2**14)),
                      "small": rng.normal(size=(4, 5))}  # fmt: skip
    narrow = lambda tree: jax.tree.map(lambda x: x.astype(np.float32), tree)
    start, grads_S = narrow(random()), [narrow(random()) for _ in range(steps)]
    state = State(start, None, optimizer.init(start), None, 0, 0, 4)
    one = jax.tree.map(lambda x: x[0], start)
    reduce, layout = opened(Decentralized(topology), 4, one, optimizer, state)
    for grads in grads_S:
        step(reduce, layout, [jax.tree.map(lambda x, i=i: x[i], grads) for i in range(4)], [1] * 4)
    matrix = ring(4) if isinstance(topology, str) else topology
    for name, x in start.items():
        x, m = x.astype(np.float64), 0.0
        for grads in grads_S:
            m = 0.9 * m + grads[name]
            x = np.einsum("ij,j...->i...", matrix, x) - 0.1 * m
        np.testing.assert_allclose(np.asarray(reduce.state(0, 0).params[name]), x, rtol=1e-4, atol=1e-5, err_msg=name)


def test_a_worker_without_samples_only_mixes():
    """By hand: of 2, 4 and 0 samples the shares are 1/3, 2/3 and 1/24 over 25/24, so that workers at 1, 4 and 7 meet at
    3.16 and then move by 0.1 times sum / 6 / share."""
    state = State({"x": jnp.array([[1.0], [4.0], [7.0]])}, None, optax.sgd(0.1).init({}), None, 0, 0, 3)
    reduce, layout = opened(Decentralized("complete"), 3, {"x": jnp.zeros(1)}, optax.sgd(0.1), state)
    step(reduce, layout, [{"x": np.full(1, 2.0)}, {"x": np.full(1, 8.0)}, {"x": np.zeros(1)}], [2, 4, 0])
    expected = [3.16 - 0.1 * 2 / 6 / 0.32, 3.16 - 0.1 * 8 / 6 / 0.64, 3.16]
    np.testing.assert_allclose(np.asarray(reduce.state(0, 0).params["x"]).ravel(), expected, rtol=1e-6)
    assert reduce.report().count == 6


def test_no_worker_is_updated_if_a_gradient_is_not_finite():
    state = State({"x": jnp.array([[1.0], [4.0], [7.0]])}, None, optax.sgd(0.1).init({}), None, 0, 0, 3)
    reduce, layout = opened(Decentralized("complete"), 3, {"x": jnp.zeros(1)}, optax.sgd(0.1), state)
    step(reduce, layout, [{"x": np.ones(1)}, {"x": np.full(1, np.nan)}, {"x": np.ones(1)}], [2, 2, 2])
    assert reduce.report().nonfinite_W.tolist() == [False, True, False]
    np.testing.assert_array_equal(np.asarray(reduce.state(0, 0).params["x"]).ravel(), [1, 4, 7])


def test_the_answer_averages_floats_and_keeps_counters():
    reduce, layout = opened(Decentralized(), 4, {"x": jnp.ones(2)}, optax.adam(0.1), ema_decay=0.5)
    for k in range(3):
        step(reduce, layout, [{"x": np.array([1.0, i - k])} for i in range(4)], [1, 2, 3, 4])
    held, answer = reduce.state(3, 30), Decentralized().answer(reduce.state(3, 30))
    assert (answer.replicas, answer.step, answer.cursor) == (0, 3, 30)
    assert int(answer.opt_state[0].count) == 3
    for of in (lambda s: s.params["x"], lambda s: s.ema["x"], lambda s: s.opt_state[0].mu["x"]):
        np.testing.assert_allclose(
            np.asarray(of(answer)), np.array([1, 2, 3, 4]) / 10 @ np.asarray(of(held)), rtol=1e-6
        )


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("budget", [None, 0.5])
def test_stationary_weights_bear_a_learning_rate_that_weighted_gradients_do_not(budget):
    """A ring with batches 4:2:1:1 and curvature 1 is stable up to a rate of 0.9; with gradients weighted by N b / B,
    the form for a W that is not symmetric, up to 0.5. The answer is the solution of all samples, which the published
    form misses."""
    target_W, counts = np.array([-1.0, 2.0, 5.0, 3.0]), [8, 4, 2, 2]

    def run(faithful, rate, steps):
        sync = Decentralized("ring", matcha_budget=budget, faithful=faithful)
        reduce, layout = opened(sync, 4, {"x": jnp.zeros(1)}, optax.sgd(rate))
        for _ in range(steps):
            x_W = np.asarray(reduce.state(0, 0).params["x"])[:, 0]
            away = [{"x": np.array([n * (x - t)])} for n, x, t in zip(counts, x_W, target_W, strict=True)]
            step(reduce, layout, away, counts)
        return float(sync.answer(reduce.state(0, 0)).params["x"][0])

    assert abs(run(False, 0.8, 100)) < 10  # stable, at a distance that falls with the rate
    everything = np.average(target_W, weights=counts)
    assert run(False, 0.04, 200) == pytest.approx(everything, abs=0.1)
    assert run(True, 0.04, 200) == pytest.approx(target_W.mean(), abs=0.1)


# -- resumed runs --


def on_host(state):
    return jax.tree.map(np.asarray, state)


@pytest.mark.parametrize("budget", [pytest.param(None, marks=pytest.mark.slow), 0.5])
def test_a_resumed_run_is_the_same_to_the_bit(budget):
    data, sync = quadratic(dtype=np.float32), Decentralized("ring", 2, budget)
    run = lambda steps, state=None: trained(
        data, sync, 4, steps, Counts([9, 6, 4, 1]), optax.adam(0.01), state, ema_decay=0.9,
        engine=Chunked(rungs=[BATCH]),  # with several rungs measured prices decide which chunks are added up
    )[0]  # fmt: skip
    whole = on_host(run(13))
    half = on_host(run(7))
    rest = on_host(run(6, half))
    jax.tree.map(np.testing.assert_array_equal, whole, rest)
    assert np.ptp(whole.params["x"], axis=0).max() > 1e-3  # the workers differ


def test_another_number_of_workers_starts_from_the_answer():
    data = quadratic(dtype=np.float32)
    state, _, answer = trained(data, Decentralized(), 4, 7, Counts([9, 6, 4, 1]))
    plain = lambda at: trained(data, Decentralized(), 2, 3, Counts([10, 10]), state=at)[0]
    jax.tree.map(np.testing.assert_array_equal, on_host(plain(on_host(state))), on_host(plain(on_host(answer))))
    reduced = lambda at: trained(data, AllReduce(), 2, 3, Counts([10, 10]), state=at)[0]
    jax.tree.map(np.testing.assert_array_equal, on_host(reduced(on_host(state))), on_host(reduced(on_host(answer))))


# -- in the trainer --


@pytest.mark.slow
def test_a_model_learns_and_its_mean_is_evaluated():
    made = problem("mlp", samples=200)
    with Trainer(
        made.loss_fn, optax.adam(1e-2), batch_size=40, controller=RandomPlans(0), sync="decentralized",
        devices=jax.devices()[:4], engine=Chunked(rungs=[8, 40]), ema_decay=0.5,
    ) as trainer:  # fmt: skip
        state, history = trainer.fit(trainer.init(made.params), made.data, steps=60)
        tested = trainer.evaluate(state, made.data)
        averaged = trainer.evaluate(jax.tree.map(jnp.copy, trainer.answer(state)), made.data)
    assert np.mean(history.losses[-5:]) < 0.8 * history.losses[0]  # random labels: there is no more to learn
    assert tested == averaged
    assert tested["loss"] < 0.8 * history.losses[0]
    assert history.recompiles_after_warmup == 0
    assert history.transport == "neighbors"


def test_running_statistics_of_a_worker_without_samples_are_kept():
    """Each worker has its own running averages; a step without samples does not pull them to zero."""

    def loss_fn(params, state, batch, keys, mask_b):
        total = jnp.where(mask_b, batch["t"], 0.0).sum()
        return (params["x"] * batch["t"]) ** 2, ({"mean": total}, mask_b.sum())

    with Trainer(
        loss_fn, optax.sgd(0.0), batch_size=BATCH, controller=Counts([10, 10, 0, 0]), sync="decentralized",
        devices=jax.devices()[:4], engine=Chunked(rungs=[BATCH]),
    ) as trainer:  # fmt: skip
        state = trainer.init({"x": jnp.ones(())}, {"mean": jnp.full((), 5.0)})
        state, _ = trainer.fit(state, {"t": np.full(SAMPLES, 3.0, np.float32)}, steps=1)
    np.testing.assert_allclose(np.asarray(state.model_state["mean"]), [4.8, 4.8, 5, 5], rtol=1e-6)


def test_a_nonfinite_loss_names_the_worker():
    data = quadratic(dtype=np.float32)
    data["t"][:] = np.nan
    with pytest.raises(NonFiniteError, match="worker 0, 1, 2, 3"):
        trained(data, Decentralized(), 4, 3, Counts([9, 6, 4, 1]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mix_every": 0}, "at least 1"),
        ({"mix_every": 1.5}, "whole number"),
        ({"mix_every": True}, "whole number"),
        ({"matcha_budget": 0}, "above 0"),
    ],
)
def test_invalid_options_are_rejected(options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        Decentralized(**options)
