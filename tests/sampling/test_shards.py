"""Shards and blocks: disjoint, complete, in proportion to the shares, and finished in the same number of steps."""

from __future__ import annotations

import json
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetjax.planning.controllers import Observation, make
from hetjax.planning.controllers.base import Plan
from hetjax.planning.limits import Limits
from hetjax.sampling.order import Sampler
from hetjax.sampling.shards import BlockSampler, ProportionalSampler, proportional_shards


@given(
    st.lists(st.floats(0.0, 10.0), min_size=1, max_size=9), st.integers(0, 500), st.integers(1, 64), st.integers(0, 99)
)
@settings(max_examples=150, deadline=None)
def test_every_sample_exactly_once_in_equal_numbers_of_steps(shares, size, batch, seed):
    share_W = np.array(shares)
    if share_W.sum() == 0:
        share_W += 1.0
    order_D = np.random.default_rng(seed).permutation(size)
    shards = proportional_shards(order_D, share_W, batch)
    workers = len(share_W)
    read = [shards.batch(worker, step) for step in range(shards.steps) for worker in range(workers)]
    assert sorted(np.concatenate(read).tolist()) == list(range(size))
    assert shards.steps == max(-(-size // batch), 1)
    np.testing.assert_array_less(np.abs(shards.sizes_W - size * share_W / share_W.sum()), 1.0 + 1e-9)
    counts_SxW = np.array([shards.counts(step) for step in range(shards.steps)])
    assert [len(x) for x in read] == counts_SxW.ravel().tolist()
    assert np.all(counts_SxW.max(0) - counts_SxW.min(0) <= 1)


def test_shards_follow_new_shares_in_the_next_epoch():
    order_D = np.arange(100)
    assert proportional_shards(order_D, np.ones(4), 10).sizes_W.tolist() == [25, 25, 25, 25]
    later = proportional_shards(order_D[::-1], np.array([4, 3, 2, 1]), 10)
    assert later.sizes_W.tolist() == [40, 30, 20, 10]
    assert later.batch(0, 0).tolist() == [99, 98, 97, 96]
    assert later.counts(3).tolist() == [4, 3, 2, 1]


@pytest.mark.parametrize("shares", [[0.0, 0.0], [1.0, -1.0], [np.nan, 1.0]])
def test_invalid_shares_are_rejected(shares):
    with pytest.raises(ValueError, match="zero or more, not all zero"):
        proportional_shards(np.arange(4), np.array(shares), 2)


@given(
    size=st.integers(1, 300),
    batch=st.integers(1, 60),
    shares=st.lists(st.integers(0, 9), min_size=1, max_size=5).filter(any),
    seed=st.integers(0, 9),
)
def test_proportional_sampler_reads_every_sample_once_and_each_worker_only_its_shard(size, batch, shares, seed):
    sampler = ProportionalSampler(size, batch, seed)
    cursor, own = 0, [set() for _ in shares]
    seen, planned = [], []

    def plan_fn(step_size, epoch):
        planned.append((step_size, epoch))
        return Plan(np.array(shares, np.int64))

    while cursor < size:
        expected = sampler.ahead(cursor) if planned else None
        step, plan = sampler.next(cursor, plan_fn)
        assert expected is None or expected == step
        assert plan.counts_W.sum() == step.batch <= batch + len(shares)
        rows = sampler.indices(step.epoch, step.start, step.stop)
        for worker, (lo, hi) in enumerate(pairwise(plan.bounds_W1)):
            own[worker].update(rows[lo:hi].tolist())
        seen.append(rows)
        cursor += step.batch
    even = -(-size // -(-size // batch))
    assert planned == [(even, 0)]  # one plan per epoch, for a step of even size
    assert len(seen) <= -(-size // batch)
    assert batch < len(shares) or len(seen) == -(-size // batch)
    assert np.array_equal(np.sort(np.concatenate(seen)), np.arange(size))
    assert sum(map(len, own)) == size  # shards are disjoint
    ideal = size * np.array(shares) / sum(shares)
    assert (abs(np.array(list(map(len, own))) - ideal) < 1).all()
    later, _ = sampler.next(size, plan_fn)
    assert (later.epoch, later.start, len(planned)) == (1, 0, 2)


def test_resuming_inside_a_step_is_rejected():
    sampler = ProportionalSampler(100, 30)
    with pytest.raises(ValueError, match="Resume from the end of an epoch"):
        sampler.next(31, lambda batch, epoch: Plan(np.array([1, 2])))


@pytest.mark.parametrize("name", ["dbs", "dp", "edp"])
def test_published_controllers_learn_from_shards(name):
    sampler, controller, limits = ProportionalSampler(1438, 256), make(name), Limits.plain(4, 256)
    speed_W, cursor = np.array([1.0, 1.0, 0.5, 0.25]), 0
    for _ in range(12):  # two epochs
        step, plan = sampler.next(cursor, lambda batch, epoch: controller.plan(batch, limits, epoch))
        times_W = plan.counts_W / speed_W * 1e-3
        controller.observe(Observation(plan.counts_W, limits.work(plan.counts_W), times_W, step.epoch))
        cursor += step.batch
    np.testing.assert_allclose(plan.counts_W / plan.counts_W.sum(), speed_W / speed_W.sum(), atol=0.02)


def refuse(batch, epoch):
    raise AssertionError("fixed blocks use no controller")


@given(
    sizes=st.lists(st.integers(0, 60), min_size=1, max_size=5).filter(any),
    batch=st.integers(1, 60),
    seed=st.integers(0, 9),
)
def test_blocks_are_read_once_per_epoch_by_their_owner(sizes, batch, seed):
    total = sum(sizes)
    blocks = np.split(np.random.default_rng(seed).permutation(total), np.cumsum(sizes)[:-1])
    sampler = BlockSampler(blocks, batch, seed)
    cursor, steps, epochs = 0, 0, [[[] for _ in sizes] for _ in range(2)]
    while cursor < 2 * total:
        step, plan = sampler.next(cursor, refuse)
        assert sampler.ahead(cursor) == step
        assert plan.counts_W.sum() == step.batch > 0
        assert (abs(plan.counts_W - np.array(sizes) * step.batch / total) < len(sizes) + 1).all()
        rows = sampler.indices(step.epoch, step.start, step.stop)
        for worker, (lo, hi) in enumerate(pairwise(plan.bounds_W1)):
            epochs[step.epoch][worker] += rows[lo:hi].tolist()
        cursor, steps = cursor + step.batch, steps + 1
    assert steps <= sampler.steps_between(0, 2 * total)
    assert batch < len(sizes) or steps == sampler.steps_between(0, 2 * total)
    for read in epochs:
        assert [sorted(own) for own in read] == [sorted(block.tolist()) for block in blocks]


def test_block_order_follows_seed_epoch_and_worker_and_resumes_anywhere():
    blocks = [np.arange(40), np.arange(40, 80), np.arange(80, 100)]
    sampler, cursors = BlockSampler(blocks, 10, seed=3), [0]
    read = {}
    for _ in range(20):
        step, plan = sampler.next(cursors[-1], refuse)
        read[cursors[-1]] = (step, plan.counts_W.tolist(), sampler.indices(step.epoch, step.start, step.stop).tolist())
        cursors.append(cursors[-1] + step.batch)
    assert cursors[-1] == 200
    assert {tuple(counts) for _, counts, _ in read.values()} == {(4, 4, 2)}
    for cursor in (0, 50, 110):
        fresh = BlockSampler(blocks, 10, seed=3)
        step, plan = fresh.next(cursor, refuse)
        assert (step, plan.counts_W.tolist(), fresh.indices(step.epoch, step.start, step.stop).tolist()) == read[cursor]
    order = lambda seed, epoch, worker: BlockSampler(blocks, 10, seed)._in_order(worker, epoch) % 40
    first = order(3, 0, 0)
    assert not any(np.array_equal(first, other) for other in (order(4, 0, 0), order(3, 1, 0), order(3, 0, 1)))


@pytest.mark.parametrize("blocks", [[[0, 1], [1, 2]], [[0, 1], [3]], [[0, -1]]])
def test_blocks_that_are_no_partition_are_rejected(blocks):
    with pytest.raises(ValueError, match="in exactly one block"):
        BlockSampler(blocks, 2)


def test_an_empty_list_of_blocks_is_rejected():
    with pytest.raises(ValueError, match="empty"):
        BlockSampler([], 2)


def read_steps(sampler, cursor, steps, shares):
    """Read `steps` steps from the cursor; return the samples of each and the cursor after them."""
    read = []
    for _ in range(steps):
        step, plan = sampler.next(cursor, lambda batch, epoch: Plan(np.array(shares, np.int64)))
        assert plan.counts_W.sum() == step.batch
        assert len(plan.counts_W) == len(shares)
        read.append(sampler.indices(step.epoch, step.start, step.stop).tolist())
        cursor += step.batch
    return read, cursor


def resumed_from(sampler, saved, cursor):
    """Load a state into another sampler by way of JSON, as a checkpoint does."""
    sampler.load_state_dict(json.loads(json.dumps(saved)), cursor)
    return sampler


@given(
    size=st.integers(20, 200),
    batch=st.integers(7, 20),
    workers=st.lists(st.integers(1, 5), min_size=2, max_size=4),
    stops=st.lists(st.integers(1, 4), min_size=3, max_size=3),
    kinds=st.lists(st.sampled_from(["proportional", "blocks"]), min_size=4, max_size=4),
    from_global=st.booleans(),
    seed=st.integers(0, 99),
)
@settings(max_examples=80)
def test_an_epoch_resumed_on_other_workers_reads_every_sample_once(
    size, batch, workers, stops, kinds, from_global, seed
):
    rng = np.random.default_rng(seed)

    def of(kind, number):
        blocks = np.array_split(np.random.default_rng(number).permutation(size), number)
        return ProportionalSampler(size, batch, seed) if kind == "proportional" else BlockSampler(blocks, batch, seed)

    seen, cursor, saved = [], 0, None
    if from_global:
        order = Sampler(size, batch, seed)
        seen, cursor, saved = [order.indices(0, 0, batch).tolist()], min(batch, size), order.state_dict(batch)
    for kind, number, steps in zip(kinds, workers, stops, strict=False):
        if cursor >= size:
            break
        sampler = of(kind, number) if saved is None else resumed_from(of(kind, number), saved, cursor)
        while steps and cursor < size:
            read, cursor = read_steps(sampler, cursor, 1, rng.integers(1, 9, number))
            seen, steps = seen + read, steps - 1
        saved = sampler.state_dict(cursor)
    if cursor < size:
        sampler = resumed_from(of(kinds[-1], 3), saved, cursor)
        while cursor < size:
            read, cursor = read_steps(sampler, cursor, 1, rng.integers(1, 9, 3))
            seen += read
    assert np.array_equal(np.sort(np.concatenate(seen)), np.arange(size))


@pytest.mark.parametrize("stop", [1, 3, 5])
def test_resuming_on_as_many_workers_gives_the_same_steps(stop):
    whole, _ = read_steps(ProportionalSampler(131, 20, seed=4), 0, 14, [3, 2, 2])
    sampler = ProportionalSampler(131, 20, seed=4)
    first, cursor = read_steps(sampler, 0, 7 + stop, [3, 2, 2])
    resumed = resumed_from(ProportionalSampler(131, 20, seed=4), sampler.state_dict(cursor), cursor)
    again, _ = read_steps(resumed, cursor, 7 - stop, [1, 1, 5])  # new shares take effect in the next epoch
    assert first + again == whole
    assert [len(step) for step in again] == [len(step) for step in whole[7 + stop :]]


def test_a_cursor_of_other_data_or_another_order_is_rejected():
    saved = ProportionalSampler(100, 30).state_dict(0)
    with pytest.raises(ValueError, match="begun on 100 samples and there are 90 now"):
        ProportionalSampler(90, 30).load_state_dict(saved, 30)
    with pytest.raises(ValueError, match="begun on 100 samples and there are 90 now"):
        Sampler(90, 30).load_state_dict(saved, 30)
    with pytest.raises(ValueError, match="inside an epoch with partition 'proportional'"):
        Sampler(100, 30).load_state_dict(saved, 30)
    Sampler(100, 30).load_state_dict(saved, 200)  # between epochs all orders agree
