"""The room of a process for optimizer state: the memory of the place where its slice is updated."""

import types

import jax
import numpy as np
import pytest
from fake_link import act_as

from hetjax.devices import memory
from hetjax.devices.workers import Worker, Workers
from hetjax.reduce.placing import room_for_state

PARAMS = {"w": jax.ShapeDtypeStruct((1000,), np.float32)}  # 4 kB: with gradients and a second copy 12
CORE = PARAMS, None, (PARAMS, PARAMS), None  # 8 kB of state, twice during an update
GPU, CPU = (types.SimpleNamespace(platform=platform) for platform in ("gpu", "cpu"))


def fleet(*memory_W, own=(GPU,)):
    members = tuple(Worker(p, "gpu", "gpu:T4", "gpu:0", bytes_) for p, bytes_ in enumerate(memory_W))
    return Workers(members, tuple(own))


@pytest.fixture
def room(monkeypatch):
    """The room of process 0 of two, by device; the other one is on the same host or not, and has room for all."""

    def of(workers, device, *, host=100_000, same_host=True):
        there = lambda name: name if same_host else "another"
        act_as(monkeypatch, 0, gathered=lambda own: [own, 1.0 if isinstance(own, float) else there(own)])
        monkeypatch.setattr(memory, "host", lambda: host)
        return room_for_state(workers, CORE, device).tolist()

    return of


def test_on_a_device_it_is_that_of_the_device(room):
    assert room(fleet(20_000, 10**9), GPU) == [0.5, 1.0]
    assert room(fleet(None, None), GPU) == [1.0, 1.0]
    assert room(fleet(1000, None), GPU) == [0.0, 1.0]


def test_the_first_worker_counts_and_not_the_largest(room):
    members = Worker(0, "gpu", "gpu:T4", "gpu:0", 20_000), Worker(0, "gpu", "gpu:T4", "gpu:1", 10**9)
    assert room(Workers(members, (GPU, GPU)), GPU) == [0.5, 1.0]


def test_on_the_host_small_devices_do_not_bound_it(room):
    assert room(fleet(1000, 1000), CPU) == [1.0, 1.0]


def test_processes_of_one_host_share_its_memory(room):
    host = (20_000 / memory.SAFE_SHARE) * 2
    assert room(fleet(1000, 1000), CPU, host=host)[0] == pytest.approx(0.5)
    assert room(fleet(1000, 1000), CPU, host=host, same_host=False)[0] == 1.0


def test_workers_on_the_cpu_hold_their_parameters_there_too(room):
    host = (20_000 + 12_000) / memory.SAFE_SHARE
    workers = fleet(1000, 1000, own=(CPU, CPU))
    assert room(workers, CPU, host=host, same_host=False)[0] == pytest.approx(0.5)


def test_memory_given_by_the_user_bounds_the_slice_anywhere(room):
    workers = fleet(10**9, 10**9).with_memory(np.array([20_000, 10**9]))
    assert room(workers, GPU) == room(workers, CPU) == [0.5, 1.0]
