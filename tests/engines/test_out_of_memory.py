"""A worker that runs out of memory in a step runs it again in smaller microbatches, and training goes on."""

import jax
import numpy as np
import optax
import pytest
from problems import RandomPlans, distance
from sample_log import check_epochs, log_samples, samples_of
from tiny_problem import BATCH, SAMPLES, loss_fn, source, trainer_for

from hetjax import Chunked, Looped, Step
from hetjax.devices.compile import compiles
from hetjax.devices.workers import Workers
from hetjax.engines import ChunkedEngine
from hetjax.planning.controllers.base import Plan

PARAMS = {"w": np.zeros(5, np.float32), "b": np.zeros((), np.float32)}
EXHAUSTED = "RESOURCE_EXHAUSTED: Out of memory allocating 17179869184 bytes."


class TooLarge:
    """Sums of a program that fails while it runs, after it was dispatched."""

    def block_until_ready(self):
        raise jax.errors.JaxRuntimeError(EXHAUSTED)


def exhaust(engine, worker, rows, late=False, message=EXHAUSTED):
    """Make the programs of one worker fail for more than `rows` rows; returns the rungs that it will run."""
    calls, device = [], engine.devices[worker]

    def limited(rung, real):
        def run(*arguments):
            calls.append(rung)
            if rung <= rows:
                return real(*arguments)
            if late:
                return (TooLarge(),)
            raise jax.errors.JaxRuntimeError(message)

        return run

    for rung, programs in next(iter(engine.ladders.values())).programs.items():
        programs[device] = limited(rung, programs[device])
    return calls


class FixedPlans(RandomPlans):
    """Counts 4, 8 and 4; keeps what it saw of every step."""

    def __init__(self):
        self.seen, self.limits = [], []

    def plan(self, batch, limits, epoch=0):
        self.limits.append(limits)
        return Plan(np.array([4, 8, 4]))

    def observe(self, seen):
        self.seen.append(seen)


def train(fault=None, steps=5, **options):
    """A few steps on three workers, of which the second may run out of memory from the second step on."""
    options = {"controller": FixedPlans(), "engine": Chunked(rungs=[2, 4, 8]), **options}
    devices, data, calls = jax.devices()[:3], source(), []
    with Step(
        log_samples(loss_fn, SAMPLES), optax.sgd(0.05, momentum=0.9), batch_size=BATCH, devices=devices, **options
    ) as step:
        state, records = step.init(PARAMS), []
        for number in range(steps):
            batch = {name: values[number * BATCH : (number + 1) * BATCH] for name, values in data.items()}
            state, record = step(state, batch)
            records.append(record)
            if number == 0 and fault is not None:
                records.append(step.flush())
                if isinstance(step.engine, ChunkedEngine):
                    calls = exhaust(step.engine, 1, **fault)
                else:
                    exhaust_spmd(step.engine, **fault)
        records.append(step.flush())
        return step.export(state).params, [record for record in records if record is not None], calls


def warnings(caplog):
    return [record.getMessage() for record in caplog.records if "ran out of memory" in record.getMessage()]


@pytest.fixture(scope="module")
def unlimited():
    """Parameters and losses without a fault."""
    params, records, _ = train()
    return params, [record.loss for record in records]


@pytest.mark.parametrize(
    ("fault", "failed", "limits"),
    [({"rows": 4}, [8], [4]), ({"rows": 4, "late": True}, [8], [4]), ({"rows": 3}, [8, 4], [4, 2])],
)
def test_the_step_is_run_again_with_the_same_samples(fault, failed, limits, unlimited, caplog):
    params, losses = unlimited
    found, again, calls = train(fault)
    assert distance(found, params) <= 1e-6
    np.testing.assert_allclose([record.loss for record in again], losses, rtol=1e-6)
    assert [samples_of(r.metrics, BATCH) for r in again] == [list(range(i * BATCH, (i + 1) * BATCH)) for i in range(5)]
    assert [rung for rung in calls if rung > fault["rows"]] == failed  # later steps keep to the limit
    assert [message[: message.index(" It runs")] for message in warnings(caplog)] == [
        f"Worker 1 ({jax.devices()[1]}) ran out of memory with a microbatch of {rung} rows." for rung in failed
    ]
    assert all(
        f"at most {limit} rows at a time" in message for limit, message in zip(limits, warnings(caplog), strict=True)
    )


def test_later_plans_see_the_new_limits_and_other_workers_keep_theirs():
    controller = FixedPlans()
    train({"rows": 4}, controller=controller)
    before, after = controller.limits[0], controller.limits[-1]
    np.testing.assert_array_equal(after.capacity_W, before.capacity_W)
    eight_W = np.full(3, 8)
    assert before.work(eight_W).tolist() == pytest.approx([8.0] * 3)  # one chunk of eight rows
    assert after.work(eight_W).tolist() == pytest.approx([8.0, 80 / 9, 8.0])  # two of four


def test_the_time_of_a_step_that_was_run_again_is_not_learned():
    controller = FixedPlans()
    train({"rows": 4}, controller=controller)
    times = np.array([seen.times_W for seen in controller.seen])
    assert np.isnan(times[1, 1])
    assert np.isfinite(times[1, [0, 2]]).all()
    assert np.isfinite(times[3:]).all()


def test_two_epochs_of_the_balanced_controller_equal_those_without_the_fault(caplog):
    runs = []
    for rows in (None, 4):
        trainer, data, state = trainer_for(jax.devices()[:3], controller="balanced")

        def fault(record, state, rows=rows, trainer=trainer):
            if rows is not None and record.step == 1:
                exhaust(trainer.step.engine, 1, rows)

        with trainer:
            runs.append(trainer.fit(state, data, epochs=2, hooks=[fault]))
    (plain, _), (state, history) = runs
    assert distance(state.params, plain.params) <= 1e-6
    assert check_epochs([(record.metrics, int(record.counts_W.sum())) for record in history.records], SAMPLES) == 2
    assert len(warnings(caplog)) <= 1  # none if every plan gave this worker at most four samples


def test_evaluation_goes_on_too(caplog):
    data = {name: values[:BATCH] for name, values in source().items()}
    with Step(
        loss_fn, optax.sgd(0.05), batch_size=BATCH, devices=jax.devices()[:1], engine=Chunked(rungs=[4, 16])
    ) as step:
        state = step.init(PARAMS)
        expected = step.evaluate(state, [data])
        (session,) = step.sessions._evaluation.values()
        calls = exhaust(session.engine, 0, 4)
        assert step.evaluate(state, [data])["loss"] == pytest.approx(expected["loss"], rel=1e-6)
    assert calls == [16, 4, 4, 4, 4]


def test_a_sentence_says_that_not_even_the_smallest_microbatch_fits():
    with pytest.raises(
        MemoryError, match=r"Worker 1 \(.*\) ran out of memory with a microbatch of 2 rows, the smallest"
    ):
        train({"rows": 1})


def test_other_errors_end_the_run():
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL: a fault"):
        train({"rows": 4, "message": "INTERNAL: a fault of the device"})


def exhaust_spmd(engine, rows, late=False):
    """Make the program of all workers fail with microbatches of more than `rows` rows."""
    dispatch = engine.dispatch

    def limited(arguments):
        sums_w = dispatch(arguments)
        if getattr(engine, "micro", engine.buffer) <= rows:
            return sums_w
        if not late:
            raise jax.errors.JaxRuntimeError(EXHAUSTED)
        return [sums_w[0], (TooLarge(),), (TooLarge(),)]  # on two workers only

    engine.dispatch = limited


@pytest.mark.parametrize("late", [False, True])
def test_the_looped_engine_is_compiled_again_for_smaller_microbatches(late, unlimited, caplog):
    params, losses = unlimited
    controller = FixedPlans()
    found, records, _ = train({"rows": 2, "late": late}, engine=Looped(micro=8), controller=controller)
    assert distance(found, params) <= 1e-6
    np.testing.assert_allclose([record.loss for record in records], losses, rtol=1e-6)
    assert [samples_of(r.metrics, BATCH) for r in records] == [list(range(i * 16, (i + 1) * 16)) for i in range(5)]
    assert [message.split(".")[0] for message in warnings(caplog)] == [
        f"The looped engine ran out of memory with microbatches of {micro} rows" for micro in (8, 4)
    ]
    before, after = controller.limits[0], controller.limits[-1]
    three_W = np.full(3, 3)
    assert (before.work(three_W).tolist(), after.work(three_W).tolist()) == ([8] * 3, [4] * 3)  # rows of padded loops
    again = np.array([np.isnan(seen.times_W).any() for seen in controller.seen])
    assert again.tolist() == [True, True, False, False, False]  # the first step warms up


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        (Looped(micro=2), "The looped engine ran out of memory with microbatches of 1 rows, and smaller ones are imp"),
        ("masked", "The masked engine ran out of memory with a buffer of 12 rows per worker, which it computes at"),
    ],
)
def test_engines_of_one_program_say_what_to_do_if_they_cannot_shrink(engine, message):
    with pytest.raises(MemoryError, match=message):
        train({"rows": 0}, engine=engine)


def test_with_several_processes_only_the_worker_changes_and_not_the_plans(monkeypatch, caplog):
    """All processes agreed on the limits of plans, so they stay; the worker lays its rows out differently."""
    data = {name: values[:BATCH] for name, values in source().items()}
    with Step(
        loss_fn, optax.sgd(0.05), batch_size=BATCH, devices=jax.devices()[:2], engine=Chunked(rungs=[4, 8])
    ) as step:
        state, _ = step(step.init(PARAMS), data)
        step.flush()
        calls, limits = exhaust(step.engine, 1, 4), step.engine.limits()
        monkeypatch.setattr(Workers, "several_processes", True)
        phases = step.local_phases(state, data, [8, 8])
        before = compiles()
        phases()
        phases()
        assert compiles() == before
        monkeypatch.undo()
        assert calls == [8, 4, 4, 4, 4]
        assert [step.engine.rows_of(worker, 5) for worker in (0, 1)] == [8, 8]
        np.testing.assert_array_equal(step.engine.limits().work(np.array([8, 8])), limits.work(np.array([8, 8])))
    assert len(warnings(caplog)) == 1
    assert "Plans still assume the larger ones" in caplog.text


def test_a_limit_below_all_common_microbatches_ends_with_a_sentence(monkeypatch):
    """Another process has not compiled the small microbatches that this worker was kept to."""
    data = {name: values[:BATCH] for name, values in source().items()}
    with Step(
        loss_fn, optax.sgd(0.05), batch_size=BATCH, devices=jax.devices()[:1], engine=Chunked(rungs=[4, 16])
    ) as step:
        state, _ = step(step.init(PARAMS), data)
        step.flush()
        calls = exhaust(step.engine, 0, 4)
        monkeypatch.setattr(Workers, "several_processes", True)
        step.engine._lower(0, 16, MemoryError())
        own = step.engine.offer()
        (kind,) = own["rungs"]
        step.engine.follow(step.workers, [own, own | {"rungs": {kind: [16]}, "capacity": [], "max_rows": []}])
        with pytest.raises(MemoryError, match=r"with a microbatch of 16 rows, the smallest that all processes have"):
            step.local_phases(state, data, [BATCH])()
        monkeypatch.undo()
    assert calls == [16]


def test_another_membership_keeps_the_limits_and_plans_get_to_know_them(monkeypatch):
    """The members of a fleet change: this process, first before, is second now."""
    data = {name: values[:BATCH] for name, values in source().items()}
    with Step(
        loss_fn, optax.sgd(0.05), batch_size=BATCH, devices=jax.devices()[:2], engine=Chunked(rungs=[4, 8])
    ) as step:
        state, _ = step(step.init(PARAMS), data)
        step.flush()
        step.evaluate(state, [data])
        (evaluation,) = step.sessions._evaluation.values()
        others = step.engine.offer()
        monkeypatch.setattr(Workers, "several_processes", True)
        for engine in (step.engine, evaluation.engine):
            engine._lower(1, 8, MemoryError())
        monkeypatch.undo()
        described = step.workers.described()
        workers = step.workers.among([described, described], 1)
        step.engine.follow(workers, [others, step.engine.offer()])
        evaluation.engine.follow(workers)
        for engine in (step.engine, evaluation.engine):
            assert [engine._stairs_W[worker].chunks(8) for worker in range(4)] == [[8], [8], [8], [4, 4]]
        work_W = step.engine.limits().work(np.full(4, 8))
        assert work_W[3] != work_W[2] == work_W[1] == work_W[0]
