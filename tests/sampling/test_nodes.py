"""The global order split between nodes: every sample once, and the same split on all nodes."""

import json

import numpy as np
import pytest

from hetjax.planning.controllers.base import Plan
from hetjax.sampling.nodes import NodeAllocator, NodeSampler
from hetjax.sampling.order import Sampler


def all_nodes(nodes, rule, size=103, batch=16, quantum=1, blocking=lambda epoch: epoch == 0, rates=None):
    allocators = [NodeAllocator(nodes, rule) for _ in range(nodes)]
    if rates is not None:
        for one in allocators:
            one.counts(batch, 0, quantum)
            one.observe(np.ones(nodes), np.full(nodes, 8.0), 8.0 / np.array(rates, float))
    return [NodeSampler(Sampler(size, batch, seed=3), j, one, blocking, quantum) for j, one in enumerate(allocators)]


def walk(samplers, epochs):
    """All steps of all nodes; checks that the nodes agree on the cursor."""
    size, cursor, steps = samplers[0].size, 0, []
    while cursor < epochs * size:
        parts = [sampler.next(cursor, lambda batch, epoch: Plan(np.array([batch])))[0] for sampler in samplers]
        assert len({(part.epoch, part.whole) for part in parts}) == 1
        assert [part.start for part in parts[1:]] == [part.stop for part in parts[:-1]]
        assert (parts[0].start, parts[-1].stop) == parts[0].whole
        steps.append(parts)
        cursor += parts[0].advance
    assert cursor == epochs * size
    return steps


@pytest.mark.parametrize("rule", ["balanced", "equal", "steps"])
@pytest.mark.parametrize("rates", [None, [4, 2, 1]])
def test_every_sample_is_read_once_per_epoch(rule, rates):
    samplers = all_nodes(3, rule, rates=rates)
    for epoch in range(3):
        seen = [
            samplers[j].indices(part.epoch, part.start, part.stop)
            for parts in walk(samplers, 3)
            for j, part in enumerate(parts)
            if part.epoch == epoch
        ]
        assert sorted(np.concatenate(seen).tolist()) == list(range(103))


def test_balanced_counts_follow_the_rates():
    samplers = all_nodes(2, "balanced", size=1024, batch=32, rates=[3, 1])
    first = walk(samplers, 1)
    assert len(first) == 32
    assert [part.batch for part in first[5]] == [24, 8]


def test_equal_counts_ignore_the_rates():
    steps = walk(all_nodes(2, "equal", size=1024, batch=32, rates=[3, 1]), 1)
    assert {tuple(part.batch for part in parts) for parts in steps} == {(16, 16)}


def test_counts_are_multiples_of_the_quantum():
    steps = walk(all_nodes(2, "balanced", size=1000, batch=32, quantum=8, rates=[5, 2]), 1)
    assert all(part.batch % 8 == 0 for parts in steps for part in parts)


def test_steps_in_proportion_to_speed_by_hand():
    """48 samples at rates 2:1 are 32 and 16, in batches of 4: 8 steps for node 0, every second one with node 1."""
    allocator = NodeAllocator(2, "steps")
    allocator.observe(np.ones(2), np.full(2, 4.0), np.array([1.0, 2.0]))
    assert allocator.unequal_steps(48, 8).tolist() == [[4, 0], [4, 4]] * 4
    assert allocator.unequal_steps(3, 8).tolist() == [[2, 1]]


def test_all_nodes_take_part_in_every_step_of_blocking_epochs():
    steps = walk(all_nodes(2, "steps", size=48, batch=8, rates=[2, 1]), 2)
    by_epoch = [[tuple(p.batch for p in parts) for parts in steps if parts[0].epoch == e] for e in range(2)]
    assert len(by_epoch[0]) == 6
    assert all(min(batches) > 0 for batches in by_epoch[0])
    assert by_epoch[1] == [(4, 0), (4, 4)] * 4


def test_resuming_inside_an_epoch_repeats_and_drops_nothing():
    samplers = all_nodes(2, "steps", size=48, batch=8, rates=[2, 1])
    cursor = 48 + 16  # inside the epoch of unequal steps
    seen = [np.arange(48, cursor) - 48]
    while cursor < 96:
        parts = [sampler.next(cursor, lambda batch, epoch: Plan(np.array([batch])))[0] for sampler in samplers]
        seen += [np.arange(part.start, part.stop) for part in parts]
        cursor += parts[0].advance
    assert sorted(np.concatenate(seen).tolist()) == list(range(48))


def test_predicted_steps_are_mostly_right():
    for rule in ("equal", "steps"):
        sampler = all_nodes(2, rule, size=48, batch=8, rates=[2, 1])[1]
        cursor, right = 0, 0
        for _ in range(10):
            step, _ = sampler.next(cursor, lambda batch, epoch: Plan(np.array([batch])))
            cursor += step.advance
            guess = sampler.ahead(cursor)
            following, _ = sampler.next(cursor, lambda batch, epoch: Plan(np.array([batch])))
            right += guess == following
        assert right >= 8


def test_counts_stay_within_capacity():
    """Without limits, rates 3:1 would give 24 and 8 of 32 samples."""
    samplers = all_nodes(2, "balanced", size=1024, batch=32, rates=[3, 1])
    for sampler in samplers:
        sampler.allocator.limit([20, 40], 32)
    assert [part.batch for part in walk(samplers, 1)[5]] == [20, 12]
    allocator = NodeAllocator(2, "steps")
    allocator.observe(np.ones(2), np.full(2, 4.0), np.array([1.0, 2.0]))
    allocator.limit([2, 8], 8)
    counts_TxN = allocator.unequal_steps(48, 8)
    assert counts_TxN.sum(axis=0).tolist() == [32, 16]
    assert counts_TxN[:, 0].tolist() == [2] * 16
    with pytest.raises(ValueError, match=r"The nodes can take 28 samples a step in all .* batch_size is 32"):
        allocator.limit([20, 8], 32)


def test_state_round_trips_through_json():
    before = NodeAllocator(2, "balanced")
    for _ in range(3):
        before.counts(32, 0, 1)
        before.observe(np.ones(2), np.full(2, 16.0), np.array([1.0, 3.0]))
    after = NodeAllocator(2, "balanced")
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    assert after.counts(32, 0, 1).tolist() == before.counts(32, 0, 1).tolist()
    other = NodeAllocator(3, "balanced")
    other.load_state_dict(before.state_dict())  # another number of nodes: starts from scratch
    assert other.rate_N is None


def test_unknown_rule_is_rejected():
    with pytest.raises(ValueError, match="balanced, equal, steps"):
        NodeAllocator(2, "chance")
