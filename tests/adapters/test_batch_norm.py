"""BatchNorm over fixed groups gives the same numbers for any split; exact statistics need the masked engine."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from problems import RandomPlans, distance

import hetjax
from hetjax.sampling.order import Sampler
from hetjax.trainer import Trainer

GROUP, BATCH, SAMPLES = 4, 24, 58  # the last step of an epoch has 10 samples: two groups and a half
LADDER = hetjax.Chunked(rungs=[2 * GROUP, BATCH])
RNG = np.random.default_rng(0)
DATA = {
    "x": RNG.normal(1.0, 2.0, (SAMPLES, 3, 5)).astype(np.float32),
    "y": RNG.integers(0, 3, SAMPLES).astype(np.int32),
}


class Net(nnx.Module):
    def __init__(self, rngs, norm):
        self.first, self.norm, self.head = nnx.Linear(5, 6, rngs=rngs), norm, nnx.Linear(6, 3, rngs=rngs)

    def __call__(self, x):
        return self.head(jax.nn.relu(self.norm(self.first(x))).mean(-2))


def example_loss(model, example, rngs=None):
    return optax.softmax_cross_entropy_with_integer_labels(model(example["x"]), example["y"])


def flax_model(sync="groups"):
    return hetjax.from_nnx(Net(nnx.Rngs(1), hetjax.BatchNorm(6, group=GROUP, sync=sync, momentum=0.9)), example_loss)


@functools.cache
def reference(group, momentum, steps):
    """Training from the definition: each group of the global batch is normalized by its own mean and variance."""
    params, stats, optimizer = plain(flax_model().params), (jnp.zeros(6), jnp.ones(6)), optax.sgd(0.1, momentum)
    sampler, opt_state, cursor = Sampler(SAMPLES, BATCH, 0), optimizer.init(params), 0

    def mean_loss(params, x, y):
        total, means, variances = 0.0, [], []
        for lo in range(0, len(x), group):
            h = x[lo : lo + group] @ params["first"]["kernel"] + params["first"]["bias"]
            mean, var = h.mean((0, 1)), h.var((0, 1))
            h = (h - mean) / jnp.sqrt(var + 1e-5) * params["norm"]["scale"] + params["norm"]["bias"]
            logits = jax.nn.relu(h).mean(1) @ params["head"]["kernel"] + params["head"]["bias"]
            total += optax.softmax_cross_entropy_with_integer_labels(logits, y[lo : lo + group]).sum()
            means.append(mean * len(h))
            variances.append(var * len(h))
        return total / len(x), (sum(means) / len(x), sum(variances) / len(x))

    gradient = jax.jit(jax.value_and_grad(mean_loss, has_aux=True))
    for _ in range(steps):
        step = sampler.step(cursor)
        index = sampler.indices(step.epoch, step.start, step.stop)
        (_, seen), grads = gradient(params, DATA["x"][index], DATA["y"][index])
        updates, opt_state = optimizer.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        stats = tuple(0.9 * old + 0.1 * new for old, new in zip(stats, seen, strict=True))
        cursor += step.batch
    return params, stats


def plain(tree):
    return nnx.to_pure_dict(tree)


@pytest.mark.parametrize("transport", ["mesh", pytest.param("host", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "engine", [LADDER, pytest.param("looped", marks=pytest.mark.slow), "masked"], ids=["chunked", "looped", "masked"]
)
def test_groups_give_the_same_training_for_any_split(engine, transport):
    model, optimizer = flax_model(), optax.sgd(0.1, momentum=0.9)
    assert model.quantum == GROUP
    expected, (mean, var) = reference(GROUP, 0.9, steps=4)
    with Trainer(
        model, optimizer, batch_size=BATCH, controller=RandomPlans(3), engine=engine, transport=transport,
        devices=jax.devices()[:3], capacity=BATCH,
    ) as trainer:  # fmt: skip
        state, _ = trainer.fit(trainer.init(model.params, model.model_state), DATA, steps=4)
    assert distance(plain(state.params), expected) <= 1e-5
    running = plain(state.model_state)["norm"]
    np.testing.assert_allclose(running["mean"], mean, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(running["var"], var, rtol=1e-4)


def test_exact_statistics_over_all_workers_in_the_masked_engine():
    model, optimizer = flax_model(sync="exact"), optax.sgd(0.1)
    expected, (mean, var) = reference(BATCH, None, steps=3)
    with Trainer(
        model, optimizer, batch_size=BATCH, controller="static", engine="auto", devices=jax.devices()[:3]
    ) as trainer:
        state, history = trainer.fit(trainer.init(model.params, model.model_state), DATA, steps=3)
    assert history.engine == "masked"
    assert np.isnan([record.times_W for record in history.records]).all()  # workers wait for each other
    assert history.counts[:2].tolist() == [[8, 8, 8]] * 2
    assert distance(plain(state.params), expected) <= 1e-5
    np.testing.assert_allclose(plain(state.model_state)["norm"]["mean"], mean, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(plain(state.model_state)["norm"]["var"], var, rtol=1e-4)


@pytest.mark.parametrize("engine", ["chunked", "looped"])
def test_exact_statistics_in_other_engines_are_refused_before_anything_runs(engine):
    model = flax_model(sync="exact")
    with (
        Trainer(model, optax.sgd(0.1), batch_size=BATCH, controller="equal", engine=engine) as trainer,
        pytest.raises(ValueError, match="Only the masked engine"),
    ):
        trainer.fit(trainer.init(model.params, model.model_state), DATA, steps=1)


def test_exact_statistics_with_a_controller_that_needs_timings_are_refused():
    model = flax_model(sync="exact")
    with (
        Trainer(model, optax.sgd(0.1), batch_size=BATCH, controller="balanced", engine="masked") as trainer,
        pytest.raises(ValueError, match="Use 'equal' or 'static'"),
    ):
        trainer.fit(trainer.init(model.params, model.model_state), DATA, steps=1)


def test_evaluation_uses_the_running_averages():
    model = flax_model()
    with Trainer(model, optax.sgd(0.1), batch_size=BATCH, devices=jax.devices()[:2]) as trainer:
        state, _ = trainer.fit(trainer.init(model.params, model.model_state), DATA, steps=5)
        means = trainer.evaluate(state, DATA)
    live = model.merge(state.params, state.model_state)
    losses = [example_loss(live, {"x": x, "y": y}) for x, y in zip(DATA["x"], DATA["y"], strict=True)]
    assert means["loss"] == pytest.approx(float(np.mean(losses)), rel=1e-5)


def test_linen_gives_the_same_numbers_as_nnx():
    class LinenNet(linen.Module):
        training: bool

        @linen.compact
        def __call__(self, x):
            norm = hetjax.LinenBatchNorm(not self.training, group=GROUP, momentum=0.9, name="norm")
            return linen.Dense(3, name="head")(jax.nn.relu(norm(linen.Dense(6, name="first")(x))).mean(0))

    nnx_model = flax_model()
    variables = LinenNet(False).init(jax.random.key(0), DATA["x"][0])
    variables = {"params": plain(nnx_model.params), "batch_stats": variables["batch_stats"]}
    model = hetjax.from_linen(
        LinenNet(True),
        variables,
        lambda apply, example: example_loss(apply, example),
        eval_module=LinenNet(False),
        group=GROUP,
    )
    results = []
    for made in (nnx_model, model):
        with Trainer(
            made,
            optax.sgd(0.1),
            batch_size=BATCH,
            controller="equal",
            devices=jax.devices()[:2],
            engine=LADDER,
        ) as trainer:
            state, history = trainer.fit(trainer.init(made.params, made.model_state), DATA, steps=3)
            results.append((history.losses, trainer.evaluate(state, DATA)["loss"]))
    np.testing.assert_allclose(results[0][0], results[1][0], rtol=1e-5)
    assert results[0][1] == pytest.approx(results[1][1], rel=1e-5)


def test_flax_batch_norm_is_refused():
    with pytest.raises(ValueError, match=r"Use hetjax\.BatchNorm.*hetjax\.convert_batch_norm\(model\)"):
        hetjax.from_nnx(Net(nnx.Rngs(0), nnx.BatchNorm(6, rngs=nnx.Rngs(0))), example_loss)


def test_dropout_depends_on_the_sample_and_not_on_the_split():
    class Dropped(nnx.Module):
        def __init__(self, rngs):
            self.linear, self.drop = nnx.Linear(15, 3, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x):
            return self.linear(self.drop(x.reshape(-1)))

    model = hetjax.from_nnx(Dropped(nnx.Rngs(0)), example_loss)
    runs = []
    for workers, seed in [(1, 0), (4, 1)]:
        with Trainer(
            model.loss_fn,
            optax.sgd(0.1),
            batch_size=BATCH,
            controller=RandomPlans(seed),
            devices=jax.devices()[:workers],
            engine=LADDER,
        ) as trainer:
            runs.append(trainer.fit(trainer.init(model.params), DATA, steps=4)[1].losses)
    np.testing.assert_allclose(runs[0], runs[1], rtol=1e-5)
    batch = {"x": DATA["x"][:2], "y": DATA["y"][:2]}
    same = {"x": np.stack([DATA["x"][0]] * 2), "y": np.stack([DATA["y"][0]] * 2)}
    keys = jax.random.split(jax.random.key(0), 2)
    loss_b = model.loss_fn(model.params, same, keys).loss_b
    assert loss_b[0] != loss_b[1]  # the same sample under two keys
    assert len(model.eval_fn(model.params, batch, keys).loss_b) == 2
