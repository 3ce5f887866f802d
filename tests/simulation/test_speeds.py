"""Simulated speeds: the duration of a phase, with injected time."""

import numpy as np
import pytest

from hetjax.simulation import speeds as simulate
from hetjax.simulation.speeds import Simulation, as_simulation, constant


class FakeTime:
    """A clock that advances only by sleeping or computing."""

    def __init__(self):
        self.now = 100.0

    def perf_counter(self):
        return self.now

    def sleep(self, seconds):
        assert seconds > 0
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    clock = FakeTime()
    monkeypatch.setattr(simulate, "time", clock)
    return clock


def phase(simulation, clock, worker, rows, real):
    """Duration of a local phase whose computation takes `real` seconds."""
    began = clock.now
    clock.now += real
    simulation.hold(worker, rows, began)
    return clock.now - began


def test_row_time_is_that_of_the_slowest_worker_plus_half():
    simulation = Simulation(constant([1, 0.5]))
    simulation.calibrate(np.array([10, 20, 0]), np.array([0.1, 0.4, 9.9]))
    assert simulation.row_time == pytest.approx(1.5 * 0.02)
    assert simulation.ideal() == pytest.approx((1 + 0.5) / 0.03)


def test_a_phase_lasts_the_longer_of_simulated_and_real_time(clock):
    simulation = Simulation(constant([1, 0.25], startup=[0.0, 0.2]), row_time=0.01)
    assert phase(simulation, clock, 0, rows=10, real=0.02) == pytest.approx(0.1)
    assert phase(simulation, clock, 1, rows=10, real=0.02) == pytest.approx(0.2 + 0.4)
    assert simulation.overruns == 0
    assert phase(simulation, clock, 0, rows=10, real=0.3) == pytest.approx(0.3)
    assert (simulation.overruns, simulation.phases) == (1, 3)


def test_more_than_two_percent_of_overruns_give_a_warning(clock):
    simulation = Simulation(constant([1]), row_time=0.01)
    for _ in range(98):
        phase(simulation, clock, 0, rows=10, real=0.02)
    for _ in range(2):
        phase(simulation, clock, 0, rows=10, real=0.5)
    assert simulation.verdict() is None
    phase(simulation, clock, 0, rows=10, real=0.5)
    assert "3 of 101 local phases took longer than simulated" in simulation.verdict()


def test_speeds_follow_the_trace(clock):
    trace = lambda step: (np.array([1.0 if step < 5 else 0.5]), np.zeros(1))
    simulation = Simulation(trace, row_time=0.01)
    assert phase(simulation, clock, 0, rows=10, real=0.0) == pytest.approx(0.1)
    simulation.step = 5
    assert phase(simulation, clock, 0, rows=10, real=0.0) == pytest.approx(0.2)
    assert simulation.ideal() == pytest.approx(50)


@pytest.mark.parametrize(
    ("speeds", "startup", "words"),
    [
        ([1, -1], 0.0, "positive"),
        ([1, np.nan], 0.0, "positive"),
        ([1], [-0.1], "seconds, zero or more"),
        ([1], [1e300], "seconds, zero or more and at most 3600"),
        ([1, 1], [0, 0, 0], "one number per worker"),
        ([[1]], 0.0, "one number"),
    ],
)
def test_impossible_speeds_are_refused(speeds, startup, words):
    with pytest.raises(ValueError, match=words):
        constant(speeds, startup)


@pytest.mark.parametrize("row_time", [0.0, -1.0, np.nan, np.inf])
def test_an_impossible_row_time_is_refused(row_time):
    with pytest.raises(ValueError, match=r"row_time is .*: expected seconds above 0"):
        Simulation(constant([1]), row_time=row_time)


def test_a_row_that_takes_over_an_hour_is_refused(clock):
    with pytest.raises(ValueError, match=r"Worker 1 has the simulated speed 0\.5"):
        Simulation(constant([1, 0.5]), row_time=3000.0)
    simulation = Simulation(constant([1, 1e-300]))
    with pytest.raises(ValueError, match=r"simulated speed 1e-300\. .* more than 3600 s"):
        simulation.calibrate(np.array([10, 10]), np.array([0.1, 0.1]))
    simulation = Simulation(lambda step: (np.array([1.0 if step < 5 else 1e-300]), np.zeros(1)), row_time=0.01)
    phase(simulation, clock, 0, rows=10, real=0.0)
    simulation.step = 5
    with pytest.raises(ValueError, match="simulated speed 1e-300"):
        phase(simulation, clock, 0, rows=10, real=0.0)


def test_rows_of_a_tiny_model_last_long_enough_to_be_seen():
    """Given as numbers: a local phase that is shorter than noise would show no speed."""
    simulation = as_simulation([1, 0.25], 2)
    simulation.calibrate(np.array([256, 256]), np.array([1e-4, 1e-4]))
    assert simulation.row_time == 1e-4
    simulation.calibrate(np.array([256, 256]), np.array([0.256, 0.256]))
    assert simulation.row_time == pytest.approx(1.5e-3)
    own = Simulation(constant([1, 1]))
    assert as_simulation(own, 2) is own
    assert own.least == 0
