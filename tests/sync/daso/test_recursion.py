"""DASO in one process on simulated devices follows the paper's recursion, as corrected, computed in NumPy."""

import jax
import numpy as np
import optax
import pytest
from daso_reference import Reference
from daso_setups import SAMPLES, flat, node_parts, per_node, quadratic, tanh_net, trainer

EVEN, UNEVEN = ([2, 2, 2, 2], [2, 2]), ([4, 1, 2, 1], [2, 1, 1])  # counts of the workers, workers of the nodes
BLENDS = "delta", "paper", "as published"
FAST = {(quadratic, blend, "uneven") for blend in BLENDS[:2]}  # every value once
FAST |= {(tanh_net, "delta", "even"), (quadratic, "as published", "even")}


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    ("problem", "blend", "counts", "sizes"),
    [
        pytest.param(
            problem, blend, *nodes, id=f"{problem.__name__}-{blend}-{name}",
            marks=() if (problem, blend, name) in FAST else pytest.mark.slow,
        )
        for problem in (quadratic, tanh_net) for blend in BLENDS for name, nodes in (("even", EVEN), ("uneven", UNEVEN))
        if (blend, name) != ("as published", "uneven")  # assumes equal nodes
    ],
)  # fmt: skip
def test_every_phase_equals_the_reference(problem, blend, counts, sizes):
    loss_fn, data, params, gradient = problem()
    # A loss that can never improve by 90%: after the first epoch the skip changes every third one, 4 -> 2 -> 1 -> 8.
    faithful = blend == "as published"
    options = {"warm_up": 1, "cool_down": 1, "stability": 0.9}
    options |= {"faithful": True} if faithful else {"blend": blend}
    skips = [(0, 0), (4, 1), (4, 1), (4, 1), (2, 1), (2, 1), (2, 1), (1, 1), (1, 1), (1, 1), (8, 2), (0, 0)]
    reference = Reference(gradient, len(sizes), 0.1, momentum=0.5, blend=blend, faithful=faithful).start(flat(params))
    expected = []
    for epoch, (skip, wait) in enumerate(skips):
        if skip == 0 and epoch and not faithful:
            reference.average_optimizer()
        reference.epoch(node_parts(epoch, counts, sizes), skip, wait)
        expected.append([x.copy() for x in reference.x])
    with trainer(loss_fn, counts, sizes, optax.sgd(0.1, momentum=0.5), **options) as made:
        states, schedules = [], []

        def keep(record, state):
            if state.cursor % SAMPLES == 0:
                states.append(jax.tree.map(np.array, state.params))
                schedules.append((made.sync.schedule.skip, made.sync.schedule.wait))

        made.fit(made.init(params), data, epochs=len(skips), hooks=[keep])
    assert schedules[:-1] == skips[1:]
    for epoch, (theirs, ours) in enumerate(zip(expected, states, strict=True)):
        for j, own in enumerate(per_node(ours, len(sizes))):
            np.testing.assert_allclose(own, theirs[j], rtol=1e-9, err_msg=f"epoch {epoch}, node {j}")
