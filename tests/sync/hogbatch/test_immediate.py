"""The shared model and the staleness bound: no update is lost, snapshots stay valid, the bound always holds."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from async_problem import FakeModel, packed_sums
from hypothesis import given
from hypothesis import strategies as st

from hetjax.reduce.layout import Layout
from hetjax.sampling.ranges import Range
from hetjax.sync.base import UpdateRule
from hetjax.sync.hogbatch.family import home_device
from hetjax.sync.hogbatch.immediate import Immediate, SharedModel
from hetjax.sync.hogbatch.method import WorkItem

SHAPE = {"w": jax.ShapeDtypeStruct((3,), np.float32)}
LAYOUT = Layout.of(SHAPE, (), ())


def sums(gradient, weight=1.0):
    return packed_sums(LAYOUT, np.full(3, gradient), weight)


def model(optimizer=None):
    optimizer = optimizer or optax.sgd(1.0)
    params = {"w": jnp.zeros(3)}
    return SharedModel(
        LAYOUT, UpdateRule(optimizer, None, None), (params, None, optimizer.init(params), None), jax.devices()[0]
    )


def test_an_update_is_a_delta_on_the_newest_model():
    shared = model()
    before = shared.snapshot
    assert shared.apply(sums(-2.0), 0.5)[0] == 1
    assert shared.apply(sums(-6.0, weight=3.0), 1.0)[0] == 2  # a mean gradient of -2
    np.testing.assert_array_equal(shared.snapshot.core[0]["w"], 3.0)
    np.testing.assert_array_equal(before.core[0]["w"], 0.0)  # a snapshot never changes
    assert (before.version, shared.snapshot.version) == (0, 2)


@pytest.mark.parametrize(("scale", "rate"), [(0.5, 1.0), (1.0, 0.5)])
def test_updates_of_an_optimizer_that_normalizes_gradients_are_scaled_too(scale, rate):
    """Adam's first update is lr for any gradient; scaled by a half it is half of that."""
    shared = model(optax.adam(0.1))
    shared.apply(sums(123.0), scale, rate)
    np.testing.assert_allclose(shared.snapshot.core[0]["w"], -0.05, rtol=1e-4)


def test_a_nonfinite_gradient_changes_nothing():
    shared = model()
    shared.apply(sums(np.nan), 1.0)
    np.testing.assert_array_equal(shared.snapshot.core[0]["w"], 0.0)


def test_a_failed_copy_of_sums_never_reaches_the_model(monkeypatch):
    """A copy between devices may fail after device_put has returned."""

    class FailedCopy:
        def block_until_ready(self):
            raise RuntimeError("copy failed")

    shared = model()
    monkeypatch.setattr(jax, "device_put", lambda *_: (FailedCopy(),))
    with pytest.raises(RuntimeError, match="copy failed"):
        shared.receive(sums(-1.0))
    assert shared.snapshot.version == 0


def test_concurrent_updates_are_applied_once_and_snapshots_are_never_torn():
    """Every update adds one to each parameter, so a snapshot of version v must hold v three times."""
    shared, threads, each = model(), 8, 60
    versions, torn, stop = [], [], threading.Event()

    def write():
        for _ in range(each):
            versions.append(shared.apply(sums(-1.0), 1.0)[0])

    def read():
        while not stop.is_set():
            seen = shared.snapshot
            if not np.array_equal(np.asarray(seen.core[0]["w"]), np.full(3, seen.version)):
                torn.append(seen)

    reader = threading.Thread(target=read)
    writers = [threading.Thread(target=write) for _ in range(threads)]
    for thread in [reader, *writers]:
        thread.start()
    for thread in writers:
        thread.join()
    stop.set()
    reader.join()
    assert not torn
    assert sorted(versions) == list(range(1, threads * each + 1))
    np.testing.assert_array_equal(shared.snapshot.core[0]["w"], float(threads * each))


@pytest.mark.parametrize("worker", [0, 3])
def test_the_shared_model_lives_on_a_cpu(worker):
    device = jax.devices()[worker]
    assert home_device((device,)) is device


@given(st.integers(2, 6), st.integers(0, 5), st.lists(st.integers(0, 5), min_size=10, max_size=80))
def test_the_staleness_bound_holds_in_any_order_of_events_without_deadlock(workers, bound, events):
    method = Immediate(FakeModel(), [None] * workers, np.ones(workers), np.zeros(workers), bound=bound)
    in_flight = {}
    for worker in (event % workers for event in events):
        if worker in in_flight:
            assert method.commit(in_flight.pop(worker), None).staleness <= bound
        elif method.may_start(in_flight.values()):
            in_flight[worker] = WorkItem(worker, Range(0, 0, 1), 1, 1.0, 1.0, 0.0, method.version)
        else:
            assert in_flight  # a worker only waits for another one
