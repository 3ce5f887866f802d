"""The ladder: rungs that do not fit are dropped, more rungs join when they pay."""

import logging
import threading

import jax
import numpy as np
import pytest
from problems import problem

from hetjax.adapters.contract import Objective
from hetjax.data.prefetch import Rows
from hetjax.devices import memory
from hetjax.devices.workers import Workers
from hetjax.engines import ChunkedEngine, Program
from hetjax.engines.clocks import Clocks
from hetjax.engines.ladder import Ladder
from hetjax.engines.local import layout_of, train_sums
from hetjax.sampling.order import Span


def program_for(made):
    row = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), made.data)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), made.params)
    layout, _ = layout_of(Objective(made.loss_fn), shapes, None, row, 2, train=True)
    return Program(train_sums(Objective(made.loss_fn), layout), layout.sizes, layout.dtype, shapes, None, row)


def chunked(workers=2, **options):
    devices = Workers.of(jax.devices()[:workers])
    clocks = Clocks(devices)
    options = {"capacity_W": np.full(workers, 64), **options}
    return ChunkedEngine(program_for(problem("mlp")), devices, clocks, **options)


def test_rungs_that_need_more_memory_than_there_is_are_left_out(monkeypatch, caplog):
    lead = jax.devices()[0]
    (small,) = chunked(rungs=[8]).ladders.values()
    (large,) = chunked(rungs=[64]).ladders.values()
    needs = [memory.needed(small.programs[8][lead]), memory.needed(large.programs[64][lead])]
    assert needs[0] < needs[1]
    monkeypatch.setattr(memory, "available", lambda device: sum(needs) // 2)
    with caplog.at_level(logging.WARNING, "hetjax"):
        engine = chunked(rungs=[8, 64])
    (ladder,) = engine.ladders.values()
    assert sorted(ladder.programs) == [8]
    assert "A chunk of 64 rows is left out of the ladder" in caplog.text
    assert engine.rows_of(0, 64) == 64  # covered by eight small chunks


def test_rungs_that_run_out_of_memory_on_trial_are_left_out(monkeypatch, caplog):
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
    assert max(ladder.programs) == max(r for r in ladder.wanted)
    assert 40 < max(ladder.programs) < 60  # the next smaller candidate took its place
    assert "a trial run ran out of memory" in caplog.text


def test_when_nothing_fits_the_error_says_so(monkeypatch):
    monkeypatch.setattr(memory, "available", lambda device: 10)
    with pytest.raises(ValueError, match="Not even a chunk of 4 rows fits"):
        chunked(rungs=[4, 8])


def test_an_error_that_is_not_about_memory_is_not_swallowed(monkeypatch):
    def broken(self, rung):
        raise TypeError("a mistake in the model")

    monkeypatch.setattr(ChunkedEngine, "_arguments", lambda self, rows, device: broken(self, rows))
    with pytest.raises(TypeError, match="a mistake in the model"):
        chunked()


def test_prices_are_those_of_chunks_in_a_row(monkeypatch):
    """On a fake clock, where the device takes 100 us a row, adding takes 20 us and every wait takes 200 us more."""
    now = [0.0]

    def takes(seconds):
        def run(*_):
            now[0] += seconds

        return run

    monkeypatch.setattr("hetjax.engines.ladder.time.perf_counter", lambda: now[0])
    monkeypatch.setattr("hetjax.engines.ladder.jax.block_until_ready", takes(2e-4))
    ladder = object.__new__(Ladder)
    ladder.devices, ladder.join, ladder.priced_by_rows = ("cpu",), {"cpu": takes(2e-5)}, False
    ladder.arguments = lambda rows, device: ()
    ladder.programs = {rung: {"cpu": takes(1e-4 * rung)} for rung in (4, 16, 512)}
    found = ladder.measure([4, 16, 512])
    for rung, price in found.prices.items():
        assert price == pytest.approx(1e-4 * rung, rel=0.05)
    assert found.joint == pytest.approx(2e-5)


def test_prices_do_not_depend_on_the_moment_they_were_taken_in(monkeypatch):
    """A machine of another speed in every round, and a lucky moment for one rung: seconds = 3 + rows all the same."""
    ladder = next(iter(chunked(1, rungs=[4, 8, 16]).ladders.values()))
    asked: list[int] = []

    def chain(self, rung, arguments, chunks, adding=False):
        asked.append(rung)
        turn = (len(asked) - 4) // 4  # after one chunk of each rung, rounds of the rungs and one more case
        lucky = 0.1 if turn == 1 and rung == 8 else 1.0
        return lucky * (1.0 + 0.5 * (turn % 3)) * chunks * (3 + rung + adding)

    monkeypatch.setattr(Ladder, "_chain", chain)
    prices, joint = ladder._prices([4, 8, 16])
    unit = prices[4] / 7
    np.testing.assert_allclose([prices[8] / unit, prices[16] / unit, joint / unit], [11, 19, 1], rtol=1e-9)


def test_a_rung_joins_when_it_pays_at_the_present_counts(monkeypatch):
    wide = lambda self, rungs: ({rung: 1e-3 + 1e-4 * rung for rung in rungs}, 1e-3)  # injected: a wide model's prices
    monkeypatch.setattr(Ladder, "_prices", wide)
    engine = chunked(capacity_W=np.full(2, 100))
    (ladder,) = engine.ladders.values()
    assert len(ladder.programs) == 4
    counts = np.array([44, 56])
    before = engine.limits().work(counts)
    for _ in range(150):  # steps with settled counts
        engine.grow(counts)
        if engine.growing is not None:
            engine.growing.result(timeout=60)
    assert 4 < len(ladder.programs) < len(ladder.wanted)
    assert set(ladder.programs) == set(ladder.list.prices)
    assert engine.limits().work(counts).sum() < 0.97 * before.sum()
    engine.close()


def test_max_rows_may_differ_from_worker_to_worker():
    engine = chunked(capacity_W=np.array([64, 64]), max_rows_W=np.array([64, 16]))
    packed = engine.pack(Rows(problem("mlp").data, 0), Span(0, 0, 64), np.array([32, 32]), 0)
    assert max(chunk.rung for chunk in packed[1]) <= 16
    limits = engine.limits()
    assert len(limits.stairs) == 2
    assert (np.diff(limits.stairs[1]) >= 0).all()


def test_a_worker_that_does_not_come_is_named():
    workers = Workers.of(jax.devices()[:2])
    clocks = Clocks(workers, wait_limit=0.2)
    release = threading.Event()
    futures = clocks.start([lambda: "here", lambda: release.wait(20)])
    with pytest.raises(TimeoutError, match=r"Worker 1 \(.*1.*\) did not finish its local phase within"):
        clocks.wait(futures)
    release.set()
    clocks.close()
