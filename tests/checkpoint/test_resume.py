"""A resumed run equals the uninterrupted one: same losses, every sample once per epoch, on any number of workers."""

import json

import jax
import numpy as np
import optax
import pytest
from problems import RandomPlans
from sample_log import check_epochs
from tiny_problem import BATCH, SAMPLES, trainer_for

import hetjax
from hetjax import checkpoint


class SaveableRandomPlans(RandomPlans):
    def state_dict(self):
        return {"controller": self.name}

    def load_state_dict(self, state):
        pass


def run(folder, workers, steps, *, save_steps=None, **options):
    """Train from the folder's last checkpoint on and save; returns the records and the last state."""
    trainer, source, state = trainer_for(jax.devices()[:workers], **options)
    with trainer:
        if (found := checkpoint.restore_latest(folder, state, trainer)) is not None:
            state = found.state
        with checkpoint.Saver(folder, trainer, steps=save_steps) as saver:
            state, history = trainer.fit(state, source, steps=steps, hooks=[saver])
            if save_steps is None:
                saver.save(history.records[-1], state)
    assert history.recompiles_after_warmup == 0  # neither saving nor restoring compiles
    return history.records, jax.tree.map(np.asarray, state)


def samples(records):
    return [(record.metrics, int(record.counts_W.sum())) for record in records]


@pytest.mark.slow
def test_random_stops_and_other_numbers_of_workers(tmp_path):
    seed = 3
    print("seed", seed)
    rng = np.random.default_rng(seed)
    uninterrupted, last = run(tmp_path / "uninterrupted", 1, 75)
    stops = np.sort(rng.choice(np.arange(2, 25), 2, replace=False))
    parts = [(3, int(stops[0])), (2, int(stops[1] - stops[0])), (4, 75 - int(stops[1]))]
    records = []
    for number, (workers, steps) in enumerate(parts):
        more, state = run(tmp_path / "parts", workers, steps, controller=SaveableRandomPlans(number))
        records += more
    assert [record.step for record in records] == list(range(1, 76))
    np.testing.assert_allclose([r.loss for r in records], [r.loss for r in uninterrupted], rtol=1e-4)
    assert check_epochs(samples(records), SAMPLES) == check_epochs(samples(uninterrupted), SAMPLES) == 7
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5), state.core, last.core)


@pytest.mark.slow
def test_shards_continue_within_an_epoch(tmp_path):
    """With the same number of workers the run is the same; otherwise the remaining samples are distributed anew."""
    options = {"partition": "proportional", "controller": "equal"}
    uninterrupted, _ = run(tmp_path / "uninterrupted", 3, 23, **options)
    first, _ = run(tmp_path / "parts", 3, 13, **options)
    second, _ = run(tmp_path / "parts", 3, 4, **options)
    np.testing.assert_allclose([r.loss for r in first + second], [r.loss for r in uninterrupted[:17]], rtol=1e-4)
    third, _ = run(tmp_path / "parts", 2, 6, **{**options, "controller": "dbs"})
    assert check_epochs(samples(first + second + third), SAMPLES) == 2
    assert third[0].counts_W.shape == (2,)


def test_resuming_from_the_last_checkpoint_before_a_crash(tmp_path):
    """A run killed after step 17 with a checkpoint every 5 steps repeats 2 steps, with the same losses."""
    first, _ = run(tmp_path, 2, 17, save_steps=5)
    assert checkpoint.latest(tmp_path).name == "step_00000015"
    second, _ = run(tmp_path, 3, 10)
    np.testing.assert_allclose([r.loss for r in second[:2]], [r.loss for r in first[15:]], rtol=1e-4)
    assert check_epochs(samples(first[:15] + second), SAMPLES) == 2


def test_the_controller_keeps_its_state(tmp_path):
    run(tmp_path, 2, 12, controller="balanced")
    trainer, _, fresh = trainer_for(jax.devices()[:2], controller="balanced")
    checkpoint.restore_latest(tmp_path, fresh, trainer)
    run_json = json.loads((tmp_path / "step_00000012" / "run.json").read_text())
    assert trainer.controller.state_dict() == run_json["trainer"]["controller"]
    assert trainer.controller.counts_W.sum() == BATCH
    trainer, _, fresh = trainer_for(jax.devices()[:2], controller="proportional")  # another controller starts fresh
    checkpoint.restore_latest(tmp_path, fresh, trainer)
    assert trainer.controller.counts_W is None


def test_another_batch_size_seed_or_data_set_is_refused(tmp_path):
    run(tmp_path, 1, 3)
    before = sorted(path.name for path in tmp_path.rglob("*"))
    for options, message in (({"batch_size": 32}, "batch_size=16 and cannot go on with 32"), ({"seed": 1}, "seed=0")):
        trainer, _, fresh = trainer_for(jax.devices()[:1], **options)
        with pytest.raises(ValueError, match=message):
            checkpoint.restore_latest(tmp_path, fresh, trainer)
    trainer, source, fresh = trainer_for(jax.devices()[:1])
    found = checkpoint.restore_latest(tmp_path, fresh, trainer)
    fewer = {name: values[:-1] for name, values in source.items()}
    with pytest.raises(ValueError, match="begun on 150 samples and there are 149 now"):
        trainer.fit(found.state, fewer, steps=1)
    assert sorted(path.name for path in tmp_path.rglob("*")) == before


def test_a_requested_checkpoint_is_saved_after_the_next_step_without_compiling(tmp_path):
    trainer, source, state = trainer_for(jax.devices()[:2])
    with trainer, checkpoint.Saver(tmp_path, trainer) as saver:

        def request(record, state):
            if record.step == 4:
                trainer.ask_to_save()

        _, history = trainer.fit(state, source, steps=9, hooks=[saver, request])
    assert [record.step for record in history.records if record.save] == [5]
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000005"]
    assert history.recompiles_after_warmup == 0


def test_an_own_loop_saves_and_goes_on(tmp_path):
    """On other workers; what the controller has learned is kept."""
    rows = {"x": np.random.default_rng(0).normal(size=(32, 3)).astype(np.float32)}
    loss_fn = lambda params, batch, keys: (batch["x"] @ params["w"] - 1) ** 2
    params = {"w": np.zeros(3, np.float32)}

    def loop(devices, steps, saves=()):
        with hetjax.Step(loss_fn, optax.adam(0.1), batch_size=32, devices=devices) as step:
            state = step.init(params)
            if (found := checkpoint.restore_latest(tmp_path / "run", state, step)) is not None:
                state = found.state
                assert found.extra == {"step": state.step}
            for _ in range(steps):
                state, _ = step(state, rows)
                if state.step in saves:
                    checkpoint.save(tmp_path / "run", state, step, extra={"step": state.step})
            return np.asarray(state.params["w"]), state.step

    whole, _ = loop(jax.devices()[:1], 6)
    loop(jax.devices()[:4], 5, saves=[2, 3])
    resumed, steps = loop(jax.devices()[:2], 3)
    assert steps == 6
    np.testing.assert_allclose(resumed, whole, rtol=1e-5)
    with (
        pytest.raises(ValueError, match="started with batch_size=32"),
        hetjax.Step(loss_fn, optax.adam(0.1), batch_size=16, devices=jax.devices()[:1]) as other,
    ):
        checkpoint.restore_latest(tmp_path / "run", other.init(params), other)
