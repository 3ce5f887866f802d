"""The ladder: rungs that do not fit into memory are dropped, others join when they pay."""

import logging
import threading

import jax
import numpy as np
import pytest
from tiny_problem import loss_fn, source

from hetjax.adapters.contract import Objective
from hetjax.data.prefetch import Rows
from hetjax.devices import memory
from hetjax.devices.workers import Workers
from hetjax.engines import ChunkedEngine, Program
from hetjax.engines.clocks import Clocks
from hetjax.engines.ladder import Ladder
from hetjax.engines.local import layout_of, train_sums
from hetjax.sampling.order import Span

MEASURED_PRICES = True


def chunked(workers=2, **options):
    """A chunked engine for a linear model."""
    shape = lambda *size: jax.ShapeDtypeStruct(size, np.float32)
    params, row = {"w": shape(5), "b": shape()}, {"x": shape(5), "y": shape()}
    layout, _ = layout_of(Objective(loss_fn), params, None, row, 2, train=True)
    program = Program(train_sums(Objective(loss_fn), layout), layout.sizes, layout.dtype, params, None, row)
    devices = Workers.of(jax.devices()[:workers])
    return ChunkedEngine(program, devices, Clocks(devices), **{"capacity_W": np.full(workers, 64), **options})


def test_rungs_that_need_more_memory_than_available_are_dropped(monkeypatch, caplog):
    lead = jax.devices()[0]
    (both,) = chunked(rungs=[8, 64]).ladders.values()
    needs = [memory.needed(both.programs[rung][lead]) for rung in (8, 64)]
    assert needs[0] < needs[1]
    monkeypatch.setattr(memory, "available", lambda device: sum(needs) // 2)
    with caplog.at_level(logging.WARNING, "hetjax"):
        engine = chunked(rungs=[8, 64])
    (ladder,) = engine.ladders.values()
    assert sorted(ladder.programs) == [8]
    assert "A microbatch of 64 rows is dropped from the ladder" in caplog.text
    assert engine.rows_of(0, 64) == 64  # covered by eight small chunks


def test_a_rung_has_to_fit_beside_the_sums_of_the_chunks_before_it(monkeypatch):
    lead = jax.devices()[0]
    (both,) = (plain := chunked(rungs=[8, 64])).ladders.values()
    sums = memory.size(plain.program.zeros())
    need = memory.needed(both.programs[64][lead]) + sums
    for room, rungs in ((need, [8, 64]), (need - 1, [8])):
        monkeypatch.setattr(memory, "available", lambda device, room=room: room)
        (ladder,) = chunked(rungs=[8, 64]).ladders.values()
        assert sorted(ladder.programs) == rungs


def test_rungs_that_run_out_of_memory_in_a_trial_run_are_dropped(monkeypatch, caplog):
    plain = Ladder.compile

    def compile(self, rung):
        programs = plain(self, rung)
        if rung < 60:
            return programs

        def too_large(*_):
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

        return dict.fromkeys(programs, too_large)

    monkeypatch.setattr(Ladder, "compile", compile)
    engine = chunked()
    (ladder,) = engine.ladders.values()
    assert max(ladder.programs) == max(ladder.wanted) < 60  # the next smaller candidate replaced the largest
    assert "a trial run ran out of memory" in caplog.text


def exhaust_in_a_row(monkeypatch, rows):
    """Run out of memory with more than `rows` rows where chunks are priced, after the first one by itself."""
    plain, alone = Ladder._chain, set()

    def chain(self, rung, arguments, chunks, adding=False):
        if rung > rows and rung in alone:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")
        alone.add(rung)
        return plain(self, rung, arguments, chunks, adding)

    monkeypatch.setattr(Ladder, "_chain", chain)


def test_rungs_that_run_out_of_memory_in_a_row_are_dropped(monkeypatch, caplog):
    """They fit one at a time: when prices are measured, and when a rung joins later."""
    exhaust_in_a_row(monkeypatch, 16)
    engine = chunked(1, rungs=[8, 16, 64])
    (ladder,) = engine.ladders.values()
    assert sorted(ladder.programs) == sorted(ladder.price_list.prices) == ladder.wanted == [8, 16]
    assert "A microbatch of 64 rows is dropped from the ladder" in caplog.text
    assert engine.rows_of(0, 64) == 64
    exhaust_in_a_row(monkeypatch, 8)
    ladder.wanted = [8, 12, 16]
    ladder.add(12, ladder.compile(12))
    assert sorted(ladder.programs) == sorted(ladder.price_list.prices) == [8, 16]
    exhaust_in_a_row(monkeypatch, 0)
    with pytest.raises(ValueError, match="Not even a microbatch of 8 rows fits"):
        chunked(1, rungs=[8, 16])


def test_an_error_names_the_smallest_rung_if_nothing_fits(monkeypatch):
    monkeypatch.setattr(memory, "available", lambda device: 10)
    with pytest.raises(ValueError, match="Not even a microbatch of 4 rows fits"):
        chunked(rungs=[4, 8])


def test_an_error_that_is_not_about_memory_is_not_swallowed(monkeypatch):
    def broken(self, rows, device):
        raise TypeError("a mistake in the model")

    monkeypatch.setattr(ChunkedEngine, "_arguments", broken)
    with pytest.raises(TypeError, match="a mistake in the model"):
        chunked()


def test_prices_are_those_of_chunks_in_a_row(monkeypatch):
    """On a fake clock: the device takes 100 us per row, adding takes 20 us, and every wait takes 200 us more."""
    now = [0.0]

    def takes(seconds):
        def run(*_):
            now[0] += seconds

        return run

    monkeypatch.setattr("hetjax.engines.ladder.time.perf_counter", lambda: now[0])
    monkeypatch.setattr("hetjax.engines.ladder.jax.block_until_ready", takes(2e-4))
    ladder = object.__new__(Ladder)
    ladder.devices, ladder.adders, ladder.priced_by_rows = ("cpu",), {"cpu": takes(2e-5)}, False
    ladder.arguments = lambda rows, device: ()
    ladder.programs = {rung: {"cpu": takes(1e-4 * rung)} for rung in (4, 16, 512)}
    found = ladder.measure([4, 16, 512])
    for rung, price in found.prices.items():
        assert price == pytest.approx(1e-4 * rung, rel=0.05)
    assert found.joint == pytest.approx(2e-5)


def test_prices_do_not_depend_on_the_load_of_the_machine(monkeypatch):
    """The machine's speed changes every round, with one fast outlier for one rung; seconds = 3 + rows regardless."""
    ladder = next(iter(chunked(1, rungs=[4, 8, 16]).ladders.values()))
    calls = 0

    def chain(self, rung, arguments, chunks, adding=False):
        nonlocal calls
        calls += 1
        round_ = (calls - 4) // 4  # after one chunk of each rung, rounds of the rungs and of adding
        outlier = 0.1 if round_ == 1 and rung == 8 else 1.0
        return outlier * (1.0 + 0.5 * (round_ % 3)) * chunks * (3 + rung + adding)

    monkeypatch.setattr(Ladder, "_chain", chain)
    prices, joint = ladder._prices([4, 8, 16])
    unit = prices[4] / 7
    np.testing.assert_allclose([prices[8] / unit, prices[16] / unit, joint / unit], [11, 19, 1], rtol=1e-9)


def test_rungs_join_while_they_save_work_at_the_current_counts(monkeypatch):
    wide = lambda self, rungs: ({rung: 1e-3 + 1e-4 * rung for rung in rungs}, 1e-3)  # injected: a wide model's prices
    monkeypatch.setattr(Ladder, "_prices", wide)
    engine = chunked(capacity_W=np.full(2, 100))
    (ladder,) = engine.ladders.values()
    first, counts = set(ladder.programs), np.array([44, 56])
    assert len(first) == 4
    before = engine.limits().work(counts)
    for _ in range(150):  # steps with settled counts
        engine.grow(counts)
        if engine.growing is not None:
            engine.growing.result(timeout=60)
    assert first < set(ladder.programs) < set(ladder.wanted)
    assert set(ladder.programs) == set(ladder.price_list.prices)
    assert engine.limits().work(counts).sum() < 0.97 * before.sum()  # more than one rung's least saving, 1%
    assert ladder.next_rung(counts.tolist(), [100, 100]) is None
    engine.close()


def test_a_kind_of_device_without_samples_needs_no_further_rung():
    engine = chunked(capacity_W=np.array([64, 64]))
    (ladder,) = engine.ladders.values()
    assert ladder.next_rung([0, 0], [64, 64]) is None
    engine.close()


def test_max_rows_may_differ_between_workers():
    engine = chunked(capacity_W=np.array([64, 64]), max_rows_W=np.array([64, 16]))
    rows = {name: values for name, values in source().items() if name in ("x", "y")}
    packed = engine.pack(Rows(rows, 0), Span(0, 0, 64), np.array([32, 32]), 0)
    assert max(chunk.rung for chunk in packed[1]) <= 16
    limits = engine.limits()
    assert len(limits.stairs) == 2
    assert (np.diff(limits.stairs[1]) >= 0).all()


def test_a_worker_that_hangs_is_named():
    clocks = Clocks(Workers.of(jax.devices()[:2]), wait_limit=0.0)
    release = threading.Event()
    futures = clocks.start([lambda: "done", lambda: release.wait(20)])
    futures[0].result(timeout=20)
    with pytest.raises(TimeoutError, match=r"Worker 1 \(.*1.*\) did not finish its local phase within"):
        clocks.wait(futures)
    release.set()
    clocks.close()
