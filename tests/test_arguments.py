"""Checks of single arguments, and memory estimates before anything is allocated."""

import numpy as np
import pytest
from fake_link import act_as

from hetjax.arguments import number, whole
from hetjax.devices import memory
from hetjax.devices.workers import Workers
from hetjax.fleet.agree import same
from hetjax.zoo.tasks import make_task


@pytest.mark.parametrize("value", [1, 7, np.int64(7), np.uint8(7), np.array(7)])
def test_whole_numbers_pass_as_python_ints(value):
    assert whole("steps", value, 1, 7) == int(value)
    assert type(whole("steps", value, 1)) is int


WRONG = [True, np.True_, 1.0, 1.5, "3", None, [3], np.array([3]), float("nan"), 0, 8, -1, 10**30]


@pytest.mark.parametrize("value", WRONG)
def test_other_values_than_integers_in_range_are_refused(value):
    with pytest.raises((TypeError, ValueError), match=r"^steps is .*: expected a whole number of at least 1 and at"):
        whole("steps", value, 1, 7)


@pytest.mark.parametrize("value", [0, 1, 0.5, np.float32(0.5)])
def test_numbers_pass(value):
    assert number("rate", value, least=0) == value


@pytest.mark.parametrize("value", [True, "1", None, [1.0], float("nan"), float("inf"), -0.1, -float("inf")])
def test_other_values_than_finite_numbers_in_range_are_refused(value):
    with pytest.raises((TypeError, ValueError), match=r"^rate is .*: expected a finite number of at least 0\.$"):
        number("rate", value, least=0)


def test_above_is_exclusive():
    with pytest.raises(ValueError, match="clip is 0: expected a finite number above 0"):
        number("clip", 0, above=0)


def test_nan_equals_nan_where_processes_compare_options(monkeypatch):
    nan = float("nan")
    same(clip=nan, nested={"a": [nan, 1]})
    gathered = [{"clip": nan, "seed": 1}, {"clip": nan, "seed": 2}]
    act_as(monkeypatch, 0, gathered=lambda values: gathered)
    with pytest.raises(ValueError, match="Process 1 differs from process 0 in its seed: 2 instead of 1"):
        same(clip=nan, seed=1)


# -- memory, estimated before it is allocated --


@pytest.mark.parametrize("width", [10**9, 10**25])
def test_a_model_beyond_any_memory_is_refused_before_it_is_made(width):
    with pytest.raises(ValueError, match=r"The parameters of the mlp would take .* GiB, and this machine has"):
        make_task("digits", "mlp", hidden=(width, width))


def test_too_many_classes_are_named_as_the_cause(tmp_path):
    file = tmp_path / "data.npz"
    np.savez(file, x=np.zeros((40, 16), np.float32), y=np.arange(40) % 2 * 2_000_000_000)
    with pytest.raises(ValueError, match="renumber the labels, which make 2,000,000,001 classes"):
        make_task(f"npz:{file}", "mlp", hidden=(8, 2000))


def test_parameters_and_their_gradient_must_fit_on_every_worker(monkeypatch):
    workers, params = Workers.of(None), {"w": np.zeros(1000, np.float32)}
    monkeypatch.setattr(memory, "available", lambda *_: 8000)
    memory.check_parameters(params, params, workers)
    monkeypatch.setattr(memory, "available", lambda *_: 7999)
    with pytest.raises(ValueError, match=r"and their gradient .*, but worker 0"):
        memory.check_parameters(params, params, workers)
    monkeypatch.setattr(memory, "available", lambda *_: None)  # unknown
    memory.check_parameters(params, params, workers)


def test_the_rows_of_a_step_must_fit(monkeypatch):
    monkeypatch.setattr(memory, "host", lambda: 4000)
    memory.check_batch(10, {"x": np.zeros(100, np.float32)})
    with pytest.raises(ValueError, match="The 11 samples of a step take"):
        memory.check_batch(11, {"x": np.zeros(100, np.float32)})
