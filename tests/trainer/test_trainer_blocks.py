"""Training on fixed blocks: every worker reads its own block, and the update is that of all samples of the step."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from hetjax import Chunked, Trainer, make_blocks
from hetjax.sampling.blocks import Blocks
from hetjax.sampling.shards import BlockSampler

RNG = np.random.default_rng(0)
DATA = {"x": RNG.normal(size=(80, 5)).astype(np.float32), "y": RNG.normal(size=80).astype(np.float32)}


def square(params, batch, keys):
    return (batch["x"] @ params["w"] - batch["y"]) ** 2


def blocks_for(rates, samples=80, seed=1):
    data = {"image": np.zeros((samples, 2)), "label": np.arange(samples) % 4}
    return make_blocks(data, rates, "class-balanced", seed=seed)


def trainer_for(blocks, **options):
    workers = options.pop("workers", blocks.workers)
    options = {"controller": "static", "devices": jax.devices()[:workers], "engine": Chunked(rungs=[4, 20]), **options}
    return Trainer(square, optax.sgd(0.05), batch_size=20, partition=blocks, **options)


def test_the_run_is_sgd_in_the_order_of_the_blocks():
    blocks = blocks_for([4, 2, 1, 1])
    with trainer_for(blocks) as trainer:
        state, history = trainer.fit(trainer.init({"w": jnp.zeros(5)}), DATA, epochs=2)
        tested = trainer.evaluate(state, DATA)
    assert {tuple(counts) for counts in history.counts} == {(10, 5, 2, 2), (10, 5, 3, 3)}
    assert history.recompiles_after_warmup == 0
    sampler, w, cursor = BlockSampler(blocks.indices, 20, 0), np.zeros(5), 0
    while cursor < 160:
        step, _ = sampler.next(cursor, None)
        rows = sampler.indices(step.epoch, step.start, step.stop)
        x, y = DATA["x"][rows].astype(np.float64), DATA["y"][rows]
        w -= 0.05 * 2 * x.T @ (x @ w - y) / len(rows)
        cursor += step.batch
    np.testing.assert_allclose(state.params["w"], w, rtol=1e-4, atol=1e-6)
    assert tested["loss"] == pytest.approx(float(np.mean((DATA["x"] @ w - DATA["y"]) ** 2)), rel=1e-4)


def test_a_run_on_blocks_can_be_resumed():
    blocks = blocks_for([2, 1])
    with trainer_for(blocks) as trainer:
        whole, _ = trainer.fit(trainer.init({"w": jnp.zeros(5)}), DATA, steps=7)
    with trainer_for(blocks) as first:
        state, _ = first.fit(first.init({"w": jnp.zeros(5)}), DATA, steps=3)
        saved = first.state_dict(state)
    with trainer_for(blocks) as second:
        state, _ = second.fit(second.load_state_dict(saved, state), DATA, steps=4)
    np.testing.assert_allclose(state.params["w"], whole.params["w"], rtol=1e-6)
    assert state.cursor == whole.cursor


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"workers": 3}, "blocks for 2 workers, but there are 3"),
        ({"controller": "balanced"}, "Use the controller static"),
        ({"quantum": 4}, "not cut into whole groups"),
        ({"sync": "hogbatch"}, "a free worker takes"),
    ],
)
def test_blocks_that_do_not_fit_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        trainer_for(blocks_for([1, 1]), **options)


def test_blocks_of_other_data_and_missing_blocks_are_refused():
    with trainer_for(blocks_for([1, 1], samples=60)) as trainer, pytest.raises(ValueError, match="60 samples"):
        trainer.fit(trainer.init({"w": jnp.zeros(5)}), DATA, steps=1)
    with pytest.raises(ValueError, match="make_blocks"):
        Trainer(square, optax.sgd(0.1), batch_size=20, partition="submodular")


def test_a_block_above_a_workers_capacity_is_refused_before_anything_runs():
    one = Blocks(np.r_[np.zeros(70), np.ones(10)], np.zeros(80), [7, 1])
    with trainer_for(one, capacity=[15, 20]) as trainer, pytest.raises(ValueError, match="The partition returned"):
        trainer.fit(trainer.init({"w": jnp.zeros(5)}), DATA, steps=1)
