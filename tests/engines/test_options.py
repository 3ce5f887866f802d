"""The constructors reject invalid options with a message that names them."""

import jax
import optax
import pytest

import hetjax
from hetjax import Chunked, Trainer
from hetjax.planning.controllers import Balanced


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *[("quantum", value) for value in (0, -2, 1.5, True)],
        *[("controller", value) for value in (5, Balanced, object())],
    ],
)
def test_an_invalid_option_is_rejected(option, value):
    with pytest.raises((ValueError, TypeError), match=f"^{option} is .*: "):
        Trainer(lambda params, batch, keys: batch["x"], optax.sgd(0.1), batch_size=8, **{option: value})


@pytest.mark.parametrize("rungs", [[-1], [0, 4], [1.5], ["4"], [True], [[4], 8], 4])
def test_invalid_rungs_are_rejected(rungs):
    with pytest.raises((ValueError, TypeError), match=r"^rungs is .*: "):
        Chunked(rungs=rungs)


def test_memory_is_one_number_or_one_per_worker():
    step = lambda memory: hetjax.Step(
        lambda p, b, k: b["x"], optax.sgd(0.1), batch_size=8, devices=jax.devices()[:2], memory=memory
    )
    assert [worker.memory for worker in step([2**40, 5]).workers.members] == [2**40, 5]
    assert [worker.memory for worker in step(7).workers.members] == [7, 7]
    with pytest.raises(ValueError, match="memory lists 3 numbers for 2 workers"):
        step([1, 2, 3])
