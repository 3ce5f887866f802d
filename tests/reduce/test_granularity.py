"""How finely an optimizer can be sliced, however small the part that mixes parameters."""

import jax
import numpy as np
import optax
import pytest

from hetjax.reduce.granularity import granularity

PARAMS = {
    "w": jax.ShapeDtypeStruct((6, 8), np.float32),
    "b": jax.ShapeDtypeStruct((8,), np.float32),
    "v": jax.ShapeDtypeStruct((8, 4), np.float32),
}
matrices = lambda params: jax.tree.map(lambda p: p.ndim > 1, params)
decayed = lambda **more: optax.adamw(1e-3, weight_decay=1e-5, **more)

EXPECTED = {
    "momentum": (optax.sgd(0.05, momentum=0.9), "elements"),
    "adamw": (decayed(), "elements"),
    "adamw, masked by shapes": (decayed(mask=matrices), "leaves"),
    "adamw, masked by a tree": (decayed(mask={"w": True, "b": False, "v": True}), "elements"),
    "masked decay before sgd": (optax.chain(optax.add_decayed_weights(1e-5, matrices), optax.sgd(1e-3)), "leaves"),
    "masked decay, accumulated": (optax.MultiSteps(decayed(mask=matrices), 3), "leaves"),
    "lion": (optax.lion(1e-3), "elements"),
    "adafactor": (optax.adafactor(1e-2, min_dim_size_to_factor=4), "leaves"),
    "lamb": (optax.lamb(1e-2), "leaves"),
    "muon": (optax.contrib.muon(1e-2), "leaves"),
    "frozen leaves": (
        optax.multi_transform(
            {"trained": optax.adam(1e-2), "frozen": optax.set_to_zero()},
            {"w": "trained", "b": "frozen", "v": "trained"},
        ),
        "elements",
    ),
    "clip by the global norm": (optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2)), "whole"),
    "prodigy, which sums over its way": (optax.contrib.prodigy(), "whole"),
}


@pytest.mark.parametrize(("optimizer", "expected"), EXPECTED.values(), ids=EXPECTED)
def test_the_finest_slices_on_which_an_optimizer_does_the_same(optimizer, expected):
    assert granularity(optimizer, PARAMS) == expected
