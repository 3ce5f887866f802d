"""Any allocation equals one big batch: gradients, loss and updates, for every engine and number of workers."""

import itertools
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from holder import Holder
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from problems import RandomPlans, distance, part_of_data, problem, reference_run

from hetjax.adapters.contract import Objective
from hetjax.data.prefetch import Rows
from hetjax.devices.workers import Workers
from hetjax.engines import Chunked, EngineContext, Looped, Masked, Program
from hetjax.engines.clocks import Clocks
from hetjax.engines.local import layout_of, train_sums
from hetjax.reduce import layout as layouts
from hetjax.reduce.base import own_slots
from hetjax.reduce.layout import Layout
from hetjax.reduce.transports import ReduceOptions, make_reduce
from hetjax.reduce.update import Update
from hetjax.sampling.order import Span
from hetjax.trainer import Trainer

BATCH = 24
MODELS = ("mlp", "cnn", "transformer")
ENGINES = ("chunked", "looped", "masked")
TRANSPORTS = ("mesh", "host")
WORKERS = (1, 2, 3, 4, 8)
OF_THREE = [("mlp", 3, engine) for engine in ENGINES]
QUICK = {
    ("mlp", 1, "chunked"), ("mlp", 8, "chunked"), ("cnn", 3, "masked"), ("transformer", 2, "looped"),
}  # fmt: skip


@dataclass(frozen=True)
class GivenUpdate:
    """A rule whose update is this function of the core and the sums."""

    finish: object

    def update(self):
        return Update(self.finish)


def slow_unless(quick, cases):
    """The cases as parameters; all but the quick ones are slow."""
    return [pytest.param(*case, marks=[] if case in quick else pytest.mark.slow) for case in cases]


def _keep_gradient(core, sums):
    params, state, _ = core
    return params, state, jax.tree.map(lambda g: g / sums.weight, sums.grads)


def _momentum(core, sums):
    """SGD with momentum written out: m = 0.9 m + g, p = p - 0.1 m."""
    params, state, moved = core
    moved = jax.tree.map(lambda m, g: 0.9 * m + g / sums.weight, moved, sums.grads)
    return jax.tree.map(lambda p, m: p - 0.1 * m, params, moved), state, moved


@dataclass
class Bench:
    """One engine with both transports, compiled once for many allocations."""

    engine: object
    clocks: Clocks
    reduces: dict
    layout: Layout
    problem: object

    def gradient(self, counts: np.ndarray, transport: str, batch, start=0, finish=_keep_gradient):
        step = Span(0, start, start + int(counts.sum()))
        reduce = self.reduces[transport, finish]
        packed = self.engine.pack(Rows(batch, start), step, counts, seed=7)
        results = self.clocks.wait(self.engine.start(reduce.replicas(), packed))
        reduce.step(results, [own_slots(result.seconds, result.rows, 0, False) for result in results], step)
        return reduce.report(), reduce.core[2]


@contextmanager
def bench(model: str, engine: str, workers: int, finishes=(_keep_gradient, _momentum)) -> Iterator[Bench]:
    made = problem(model, seed=3)
    devices = Workers.of(jax.devices()[:workers])
    row = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), made.data)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), made.params)
    objective = Objective(made.loss_fn)
    layout, _ = layout_of(objective, shapes, None, row, 2, train=True)
    program = Program(train_sums(objective, layout), layout.sizes, layout.dtype, shapes, None, row)
    clocks = Clocks(devices)
    specs = {"chunked": Chunked(rungs=[5, 24]), "looped": Looped(micro=5), "masked": Masked()}
    built = specs[engine].build(EngineContext(program, devices, clocks, batch=BATCH, capacity=BATCH))
    core = (made.params, None, jax.tree.map(jnp.zeros_like, made.params))
    reduces = {
        (t, finish): Holder(make_reduce(ReduceOptions(t), devices, layout, GivenUpdate(finish), core))
        for t in TRANSPORTS
        for finish in finishes
    }
    yield Bench(built, clocks, reduces, layout, made)
    built.close()
    clocks.close()


def allocations(workers: int) -> st.SearchStrategy:
    """Counts that sum to at most BATCH and at least 1, with zeros anywhere."""
    return st.lists(st.integers(0, BATCH), min_size=workers, max_size=workers).map(_fit).filter(lambda c: c.sum() > 0)


def _fit(counts: list[int]) -> np.ndarray:
    counts = np.array(counts, np.int64)
    while counts.sum() > BATCH:
        counts = counts // 2
    return counts


def check_any_allocation(made: Bench, workers: int) -> None:
    """Gradient and loss of any allocation, and five momentum steps over random ones, equal those of one device."""

    @settings(max_examples=6, suppress_health_check=list(HealthCheck))
    @given(counts=allocations(workers), start=st.sampled_from([0, 13]))
    def check(counts, start):
        total = int(counts.sum())
        batch = jax.tree.map(lambda x: x[start : start + total], made.problem.data)
        loss, grads = part_of_data(made.problem, 7, start, start + total)
        for transport in TRANSPORTS:
            report, gradient = made.gradient(counts, transport, batch, start)
            assert report.count == total
            assert abs(report.loss - float(loss)) <= 1e-5 * abs(float(loss))
            assert distance(gradient, grads) <= 1e-5, (transport, counts)

    check()
    rng, params = np.random.default_rng(workers), jax.tree.map(np.asarray, made.problem.params)
    moved = jax.tree.map(np.zeros_like, params)
    for start in (0, 13, 5, 30, 40):
        counts = rng.multinomial(BATCH, rng.dirichlet(np.full(workers, 0.5)))
        batch = jax.tree.map(lambda x, start=start: x[start : start + BATCH], made.problem.data)
        for transport in TRANSPORTS:
            made.gradient(counts, transport, batch, start, _momentum)
        _, grads = part_of_data(replace(made.problem, params=params), 7, start, start + BATCH)
        moved = jax.tree.map(lambda m, g: 0.9 * m + np.asarray(g), moved, grads)
        params = jax.tree.map(lambda p, m: p - 0.1 * m, params, moved)
    first = made.problem.params
    for transport in TRANSPORTS:
        now = made.reduces[transport, _momentum].core[0]
        assert distance(jax.tree.map(np.subtract, now, first), jax.tree.map(np.subtract, params, first)) <= 1e-5


@pytest.fixture(scope="module", params=ENGINES)
def of_three(request):
    """Three workers, compiled once for the tests below."""
    with bench("mlp", request.param, 3) as made:
        yield made


def test_any_allocation_to_three_workers_gives_the_gradient_of_the_whole_batch(of_three):
    check_any_allocation(of_three, 3)


def test_garbage_in_padding_and_on_idle_workers_never_reaches_a_gradient(of_three):
    for garbage, counts in itertools.product((np.nan, np.inf), ([9, 0, 5], [6, 0, 0])):
        valid = sum(counts)
        image = of_three.problem.data["image"][:BATCH].copy()
        image[valid:] = garbage
        batch = {"image": image, "label": of_three.problem.data["label"][:BATCH]}
        _, grads = part_of_data(of_three.problem, 7, 0, valid)
        for transport in TRANSPORTS:
            report, gradient = of_three.gradient(np.array(counts), transport, batch)
            assert not report.nonfinite_W.any()
            assert np.isfinite(report.loss)
            assert distance(gradient, grads) <= 1e-5


@pytest.mark.parametrize(
    ("model", "workers", "engine"),
    slow_unless(QUICK, [case for case in itertools.product(MODELS, WORKERS, ENGINES) if case not in OF_THREE]),
)
def test_any_allocation_gives_the_gradient_of_the_whole_batch(model, workers, engine):
    with bench(model, engine, workers) as made:
        check_any_allocation(made, workers)


@pytest.mark.parametrize("engine", ["chunked", *(pytest.param(name, marks=pytest.mark.slow) for name in ENGINES[1:])])
def test_large_gradients_travel_in_separate_parts_of_one_all_reduce(engine, monkeypatch):
    """As those of real models do: here 64 elements are large."""
    monkeypatch.setattr(layouts, "_LARGE", 64)
    with bench("mlp", engine, 2) as made:
        assert len(made.layout.sizes) > 2
        check_any_allocation(made, 2)
        program = made.reduces["mesh", _keep_gradient]._run.as_text()
    assert len(re.findall(r"all-reduce(?:-start)?\(", program)) == 1


STEPS = [
    ("mlp", 2, "host"), ("mlp", 4, "mesh"), ("mlp", 4, "host"), ("cnn", 3, "mesh"), ("cnn", 3, "host"),
    ("transformer", 8, "mesh"), ("transformer", 8, "host"),
]  # fmt: skip
EARLY = {("mlp", 2, "host", "chunked"), ("mlp", 4, "mesh", "looped"), ("mlp", 4, "mesh", "masked")}


@pytest.mark.parametrize(
    ("model", "workers", "transport", "engine"),
    slow_unless(EARLY, [(*case, engine) for case in STEPS for engine in ENGINES]),
)
def test_five_steps_of_momentum_equal_one_device(model, workers, transport, engine):
    made = problem(model, seed=5)
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.1, momentum=0.9))
    params, losses = reference_run(made, optimizer, BATCH, steps=5)
    with Trainer(
        made.loss_fn, optimizer, batch_size=BATCH, controller=RandomPlans(1), transport=transport,
        devices=jax.devices()[:workers], capacity=BATCH,
        engine=Chunked(rungs=[4, 24]) if engine == "chunked" else engine,
    ) as trainer:  # fmt: skip
        state, history = trainer.fit(trainer.init(made.params), made.data, steps=5)
    moved = jax.tree.map(np.subtract, state.params, made.params)
    expected = jax.tree.map(np.subtract, params, made.params)
    assert distance(moved, expected) <= 1e-5
    np.testing.assert_allclose(history.losses, losses, rtol=1e-5)


@pytest.mark.parametrize(
    ("model", "engine", "transport"),
    [
        ("linear", "looped", "host"),
        pytest.param("mlp", "looped", "host", marks=pytest.mark.slow),
        *(pytest.param("transformer", engine, "mesh", marks=pytest.mark.slow) for engine in ENGINES),
    ],
)
def test_five_steps_of_adam_in_float64(model, engine, transport, float64):
    made = problem(model, seed=6, dtype=np.float64)
    params, _ = reference_run(made, optax.adam(1e-2), BATCH, steps=5)
    with Trainer(
        made.loss_fn, optax.adam(1e-2), batch_size=BATCH, controller=RandomPlans(2), transport=transport,
        devices=jax.devices()[:3], capacity=BATCH, engine=Chunked(rungs=[4, 24]) if engine == "chunked" else engine,
    ) as trainer:  # fmt: skip
        state, _ = trainer.fit(trainer.init(made.params), made.data, steps=5)
    moved = jax.tree.map(np.subtract, state.params, made.params)
    assert distance(moved, jax.tree.map(np.subtract, params, made.params)) <= 1e-9


def test_an_extra_sum_over_workers_would_be_noticed(monkeypatch):
    """The mutant: a second psum multiplies by the number of workers. The gradient check must see it."""
    plain = jax.lax.psum
    sums_only = lambda core, sums: (core[0], core[1], sums.grads)
    with bench("mlp", "chunked", 2, []) as made:
        core = (made.problem.params, None, jax.tree.map(jnp.zeros_like, made.problem.params))
        opened = lambda: Holder(
            make_reduce(ReduceOptions("mesh"), made.engine.workers, made.layout, GivenUpdate(sums_only), core)
        )
        with monkeypatch.context() as patch:
            patch.setattr(jax.lax, "psum", lambda x, axis: plain(plain(x, axis), axis))
            mutant = replace(made, reduces={("mesh", sums_only): opened()})
        honest = replace(made, reduces={("mesh", sums_only): opened()})
        batch = jax.tree.map(lambda x: x[:BATCH], made.problem.data)
        _, grads = part_of_data(made.problem, 7, 0, BATCH)
        summed = jax.tree.map(lambda g: g * BATCH, grads)
        counts = np.array([10, 14])
        assert distance(honest.gradient(counts, "mesh", batch, finish=sums_only)[1], summed) <= 1e-5
        assert distance(mutant.gradient(counts, "mesh", batch, finish=sums_only)[1], summed) > 0.5
