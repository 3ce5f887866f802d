"""Steps of samples of unequal length: one bucket each, every sample once per epoch, and one integer to resume from."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetjax.sampling.buckets import BucketSampler
from hetjax.sampling.order import Sampler


def spans(sampler, cursor, end):
    found = []
    while cursor < end:
        found.append(sampler.step(cursor))
        cursor += found[-1].batch
    return found


@given(
    bucket_N=st.lists(st.integers(0, 3), min_size=1, max_size=120),
    batch_K=st.lists(st.integers(1, 20), min_size=4, max_size=4),
    seed=st.integers(0, 99),
    shuffle=st.booleans(),
)
def test_every_sample_once_per_epoch_in_steps_of_one_bucket(bucket_N, batch_K, seed, shuffle):
    sampler, bucket_N = BucketSampler(bucket_N, batch_K, seed, shuffle), np.array(bucket_N)
    steps = spans(sampler, 0, 2 * sampler.size)
    for epoch in (0, 1):
        mine = [step for step in steps if step.epoch == epoch]
        indices = [sampler.indices(epoch, step.start, step.stop) for step in mine]
        assert np.array_equal(np.sort(np.concatenate(indices)), np.arange(sampler.size))
        assert all((bucket_N[index] == step.bucket).all() for index, step in zip(indices, mine, strict=True))
        for bucket, batch in enumerate(batch_K):  # only the last step of a bucket may be short
            sizes = [step.batch for step in mine if step.bucket == bucket]
            assert all(size == batch for size in sizes[:-1])
            assert not sizes or sizes[-1] <= batch
        assert len(mine) == sampler.steps_per_epoch()


@given(bucket_N=st.lists(st.integers(0, 2), min_size=2, max_size=60), at=st.integers(0, 30), steps=st.integers(1, 40))
def test_the_cursor_alone_determines_what_follows(bucket_N, at, steps):
    make = lambda: BucketSampler(bucket_N, [4, 3, 5], 7)
    whole = spans(make(), 0, 4 * len(bucket_N))
    cursor = sum(step.batch for step in whole[:at])
    resumed = make()
    assert spans(resumed, cursor, 4 * len(bucket_N)) == whole[at:]
    end = resumed.end_of(cursor, steps)
    assert resumed.steps_between(cursor, end) == steps
    assert spans(resumed, cursor, end)[-1].stop % resumed.size == end % resumed.size


def test_a_step_starts_when_its_last_sample_is_taken():
    sampler = BucketSampler([0, 1, 0, 1, 1, 0, 0, 1, 1], [2, 3], shuffle=False)
    steps = spans(sampler, 0, 9)
    taken = [sampler.indices(0, step.start, step.stop).tolist() for step in steps]
    assert taken == [[0, 2], [1, 3, 4], [5, 6], [7, 8]]
    assert [step.bucket for step in steps] == [0, 1, 0, 1]


def test_epochs_and_seeds_have_orders_of_their_own():
    bucket_N = np.arange(300) % 3
    orders = [BucketSampler(bucket_N, [8] * 3, s).indices(e, 0, 300) for s, e in [(0, 0), (0, 1), (1, 0)]]
    assert all((orders[a] == orders[b]).mean() < 0.1 for a in range(3) for b in range(a))


def test_another_grouping_cannot_go_on_inside_an_epoch():
    sampler = BucketSampler([0, 0, 1, 1], [2, 2])
    saved = sampler.state_dict(2)
    BucketSampler([0, 0, 1, 1], [2, 2]).load_state_dict(saved, 2)
    BucketSampler([0, 0, 1, 1], [1, 2]).load_state_dict(saved, 4)
    with pytest.raises(ValueError, match="other buckets"):
        BucketSampler([0, 0, 1, 1], [1, 2]).load_state_dict(saved, 2)
    with pytest.raises(ValueError, match="other buckets"):
        sampler.load_state_dict(Sampler(4, 2).state_dict(2), 2)
    with pytest.raises(ValueError, match="'buckets'"):
        Sampler(4, 2).load_state_dict(saved, 2)
    with pytest.raises(ValueError, match="4 samples"):
        BucketSampler([0, 0, 1], [2, 2]).load_state_dict(saved, 2)


def test_buckets_without_a_batch_are_refused():
    with pytest.raises(ValueError, match="one batch of at least 1 per bucket"):
        BucketSampler([0, 2], [4, 4])
