"""A resumed run is the uninterrupted one: the same losses, every sample once an epoch, on whatever workers."""

import json

import jax
import numpy as np
import pytest
from problems import RandomPlans
from sample_log import check_epochs
from tiny_problem import BATCH, SAMPLES, trainer_for

from hetjax import checkpoint


class RandomWithMemory(RandomPlans):
    def state_dict(self):
        return {"controller": self.name}

    def load_state_dict(self, state):
        pass


def run(folder, workers, steps, *, save_steps=None, **options):
    """So many steps into the folder's checkpoints, from the last one on; the records and the last state."""
    trainer, source, state = trainer_for(jax.devices()[:workers], **options)
    with trainer:
        if (found := checkpoint.restore_latest(folder, state, trainer)) is not None:
            state = found.state
        with checkpoint.Saver(folder, trainer, steps=save_steps) as saver:
            state, history = trainer.fit(state, source, steps=steps, hooks=[saver])
            if save_steps is None:
                saver.save(history.records[-1], state)
    return history.records, jax.tree.map(np.asarray, state)


def told(records):
    return [(record.metrics, int(record.counts_W.sum())) for record in records]


@pytest.mark.slow
def test_fifty_steps_after_a_random_stop_on_other_numbers_of_workers(tmp_path):
    seed = 3
    print("seed", seed)
    rng = np.random.default_rng(seed)
    whole, last = run(tmp_path / "whole", 1, 75)
    stops = np.sort(rng.choice(np.arange(2, 25), 2, replace=False))
    parts = [(3, int(stops[0])), (2, int(stops[1] - stops[0])), (4, 75 - int(stops[1]))]
    records = []
    for number, (workers, steps) in enumerate(parts):
        more, state = run(tmp_path / "parts", workers, steps, controller=RandomWithMemory(number))
        records += more
    assert [record.step for record in records] == list(range(1, 76))
    np.testing.assert_allclose([r.loss for r in records], [r.loss for r in whole], rtol=1e-4)
    assert check_epochs(told(records), SAMPLES) == check_epochs(told(whole), SAMPLES) == 7
    for mine, theirs in zip(jax.tree.leaves(state.core), jax.tree.leaves(last.core), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_shards_go_on_inside_an_epoch(tmp_path):
    """On as many workers the run is the same; on others the samples left are shared out anew, each once."""
    options = {"partition": "proportional", "controller": "equal"}
    whole, _ = run(tmp_path / "whole", 3, 23, **options)
    first, _ = run(tmp_path / "parts", 3, 13, **options)
    second, _ = run(tmp_path / "parts", 3, 4, **options)
    np.testing.assert_allclose([r.loss for r in first + second], [r.loss for r in whole[:17]], rtol=1e-4)
    third, _ = run(tmp_path / "parts", 2, 6, **{**options, "controller": "dbs"})
    assert check_epochs(told(first + second + third), SAMPLES) == 2
    assert third[0].counts_W.shape == (2,)


def test_the_last_checkpoint_before_a_crash_is_enough(tmp_path):
    """Of a run that is killed after step 17 with a checkpoint every 5 steps, 2 steps are done again, and alike."""
    first, _ = run(tmp_path, 2, 17, save_steps=5)
    assert checkpoint.latest(tmp_path).name == "step_00000015"
    second, _ = run(tmp_path, 3, 10)
    np.testing.assert_allclose([r.loss for r in second[:2]], [r.loss for r in first[15:]], rtol=1e-4)
    assert check_epochs(told(first[:15] + second), SAMPLES) == 2


def test_the_controller_goes_on_with_what_it_had_learned(tmp_path):
    run(tmp_path, 2, 12, controller="balanced")
    trainer, _, fresh = trainer_for(jax.devices()[:2], controller="balanced")
    checkpoint.restore_latest(tmp_path, fresh, trainer)
    run_json = json.loads((tmp_path / "step_00000012" / "run.json").read_text())
    assert trainer.controller.state_dict() == run_json["trainer"]["controller"]
    assert trainer.controller.counts_W.sum() == BATCH
    trainer, _, fresh = trainer_for(jax.devices()[:2], controller="proportional")  # another one starts afresh
    checkpoint.restore_latest(tmp_path, fresh, trainer)
    assert trainer.controller.counts_W is None


def test_another_batch_size_seed_or_data_set_is_refused(tmp_path):
    run(tmp_path, 1, 3)
    before = sorted(path.name for path in tmp_path.rglob("*"))
    for other, word in (({"batch_size": 32}, "batch_size=16 and cannot go on with 32"), ({"seed": 1}, "seed=0")):
        trainer, _, fresh = trainer_for(jax.devices()[:1], **other)
        with pytest.raises(ValueError, match=word):
            checkpoint.restore_latest(tmp_path, fresh, trainer)
    trainer, source, fresh = trainer_for(jax.devices()[:1])
    found = checkpoint.restore_latest(tmp_path, fresh, trainer)
    fewer = {name: values[:-1] for name, values in source.items()}
    with pytest.raises(ValueError, match="begun on 150 samples and there are 149 now"):
        trainer.fit(found.state, fewer, steps=1)
    assert sorted(path.name for path in tmp_path.rglob("*")) == before


def test_asked_for_by_one_a_checkpoint_is_taken_after_the_next_step(tmp_path):
    trainer, source, state = trainer_for(jax.devices()[:2])
    with trainer, checkpoint.Saver(tmp_path, trainer) as saver:

        def ask(record, state):
            if record.step == 4:
                trainer.ask_to_save()

        _, history = trainer.fit(state, source, steps=9, hooks=[saver, ask])
    assert [record.step for record in history.records if record.save] == [5]
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000005"]


def test_saving_compiles_nothing(tmp_path):
    trainer, source, state = trainer_for(jax.devices()[:2])
    with trainer, checkpoint.Saver(tmp_path, trainer, steps=1) as saver:
        _, history = trainer.fit(state, source, steps=5, hooks=[saver])
    assert history.recompiles_after_warmup == 0
