"""The constructors reject invalid options with a message that names them."""

import optax
import pytest

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
