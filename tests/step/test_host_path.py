"""The host path: inputs sent ahead, no wait per microbatch, one read per step, names in traces."""

import threading
from collections import Counter
from contextlib import contextmanager
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import hetjax
from hetjax.engines import chunked, clocks, spmd

ARRAY = type(jnp.zeros(1))
BATCH, WORKERS = 32, 2
DATA = {"x": np.random.default_rng(0).normal(size=(BATCH, 5)).astype(np.float32)}


def loss_fn(params, batch, keys):
    return jnp.square(batch["x"] @ params["w"] - 1)


def open_step(engine, transport="auto"):
    step = hetjax.Step(
        loss_fn, optax.sgd(0.1), batch_size=BATCH, controller="equal", engine=engine, transport=transport,
        devices=jax.devices()[:WORKERS],
    )  # fmt: skip
    state = step.init({"w": jnp.zeros(5)})
    for _ in range(3):
        state, _ = step(state, DATA)
    step.flush()
    return step, state


@contextmanager
def counted(monkeypatch):
    """Count what the host reads from devices, and what it waits for, in all threads."""
    counts, lock, inside = Counter(), threading.Lock(), threading.local()

    def count(owner, name, kind):
        original = getattr(owner, name)

        def counting(x, *args, **kwargs):
            outermost = not getattr(inside, "counted", False)
            if outermost and any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(x)):
                with lock:
                    counts[kind] += 1
            inside.counted = True
            try:
                return original(x, *args, **kwargs)
            finally:
                inside.counted = not outermost

        monkeypatch.setattr(owner, name, counting)

    with monkeypatch.context() as monkeypatch:
        count(np, "asarray", "reads")
        count(np, "array", "reads")
        count(ARRAY, "__float__", "reads")
        count(ARRAY, "__int__", "reads")
        count(ARRAY, "block_until_ready", "waits")
        count(jax, "block_until_ready", "waits")
        count(jax, "device_get", "reads")
        yield counts


ENGINES = {
    "chunked": lambda rows: hetjax.Chunked(rungs=[rows]),
    "looped": lambda rows: hetjax.Looped(micro=rows),
    "masked": lambda rows: "masked",
}


@pytest.mark.parametrize("accelerator", [False, True])
@pytest.mark.parametrize(
    ("engine", "transport"), [("chunked", "mesh"), ("chunked", "host"), ("looped", "mesh"), ("masked", "mesh")]
)
def test_a_step_reads_one_array_and_waits_as_often_for_many_microbatches_as_for_one(
    engine, transport, accelerator, monkeypatch
):
    monkeypatch.setattr(chunked, "queues", lambda device: accelerator)
    monkeypatch.setattr(spmd, "queues", lambda device: accelerator)
    seen = []
    for rows in (BATCH // WORKERS, 2):  # one microbatch, eight
        step, state = open_step(ENGINES[engine](rows), transport)
        with step, counted(monkeypatch) as counts:
            for _ in range(4):
                state, _ = step(state, DATA)
            step.flush()
        assert counts["reads"] == 4  # the report of each step
        assert counts["waits"] <= 4 * 2 * WORKERS  # a worker's parameters, and its sums
        seen.append(counts["waits"])
    assert accelerator or seen[0] == seen[1]  # an accelerator need not wait for parameters that are ready


@pytest.mark.parametrize(
    ("engine", "owner", "method", "times"),
    [
        ("chunked", chunked.ChunkedEngine, "phase", WORKERS),
        ("looped", spmd.Spmd, "start", 1),  # one program for all workers
        ("masked", spmd.Spmd, "start", 1),
    ],
)
def test_for_an_accelerator_a_local_phase_sends_nothing(engine, owner, method, times, monkeypatch):
    """All its inputs are on the device before the phase begins: a transfer in it would raise, also an explicit one."""
    monkeypatch.setattr(chunked, "queues", lambda device: True)
    monkeypatch.setattr(spmd, "queues", lambda device: True)
    run = getattr(owner, method)
    guarded = []

    def phase(self, *args):
        with jax.transfer_guard_host_to_device("disallow_explicit"):
            guarded.append(1)
            return run(self, *args)

    step, state = open_step(ENGINES[engine](4))
    plain, other = open_step(ENGINES[engine](4))
    monkeypatch.setattr(owner, method, phase)
    with step, plain:
        for _ in range(3):
            state, _ = step(state, DATA)
        step.flush()
        assert len(guarded) == 3 * times
        monkeypatch.setattr(owner, method, run)
        for _ in range(3):
            other, _ = plain(other, DATA)
        np.testing.assert_array_equal(state.params["w"], other.params["w"])


class Parameters:
    """Parameters that become ready after some looks."""

    def __init__(self, looks):
        self.looks, self.waited = looks, False

    def is_ready(self):
        self.looks -= 1
        return self.looks < 0

    def block_until_ready(self):
        self.waited = True


@pytest.mark.parametrize(
    ("queued", "looks", "waited", "began"),
    [
        (False, 9, True, 1),  # a CPU waits first
        (True, 0, False, 1),  # ready before: the first dispatch
        (True, 1, False, 2),  # ready when the first dispatch has returned
        (True, 9, True, 3),  # not ready after all dispatches: wait
    ],
)
def test_a_phase_begins_at_its_first_dispatch_or_when_its_parameters_are_ready(
    queued, looks, waited, began, monkeypatch
):
    ticks = iter(range(1, 9))
    monkeypatch.setattr(clocks, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))  # not for other threads
    parameters = Parameters(looks)
    begin = clocks.Began(parameters, queued)
    begin.dispatched()
    if looks > 1:
        monkeypatch.setattr(clocks, "time", SimpleNamespace(perf_counter=lambda: 3))
    begin.dispatched()
    assert begin.time() == began
    assert parameters.waited == waited


def names(folder):
    (path,) = folder.rglob("*.xplane.pb")
    trace = jax.profiler.ProfileData.from_file(str(path))
    found = [
        (event.name, {key: value for key, value in event.stats if key in ("step_num", "worker")})
        for plane in trace.planes for line in plane.lines for event in line.events
        if event.name.startswith("hetjax.")
    ]  # fmt: skip
    return Counter(name for name, _ in found), found


def test_a_trace_names_every_step_and_phase(tmp_path):
    trainer = hetjax.Trainer(loss_fn, optax.sgd(0.1), batch_size=8, devices=jax.devices()[:WORKERS], strategy="equal")
    hook = hetjax.Profile(tmp_path / "trace", steps=3, warm_up=2)
    with trainer:
        trainer.fit(trainer.init({"w": jnp.zeros(5)}), DATA, epochs=2, hooks=[hook])
    counts, events = names(tmp_path / "trace")
    assert counts.keys() == {f"hetjax.{name}" for name in ["step", "plan", "pack", "local", "wait", "reduce", "report"]}
    steps = sorted(values["step_num"] for name, values in events if name == "hetjax.step")
    assert steps == [3, 4, 5]  # after the records of steps 0 and 1, while step 2 ran
    assert counts["hetjax.report"] == counts["hetjax.reduce"] == 3  # one round trip per step
    workers = {values["worker"] for name, values in events if name == "hetjax.local"}
    assert workers == set(range(WORKERS))


def test_a_run_shorter_than_the_warm_up_says_that_there_is_no_trace(tmp_path, caplog):
    trainer = hetjax.Trainer(loss_fn, optax.sgd(0.1), batch_size=16, devices=jax.devices()[:1])
    with trainer:
        trainer.fit(trainer.init({"w": jnp.zeros(5)}), DATA, epochs=1, hooks=[hetjax.Profile(tmp_path / "trace")])
    assert "the run had 2 steps, and the trace starts after 10" in caplog.text
    assert not (tmp_path / "trace").exists()
