"""Model states that would train wrong are refused before training, by what they compute."""

import logging

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import hetjax
from hetjax.adapters.probe import check_model_state, probe_indices, warn_of_idle_workers
from hetjax.data import fetch, load
from hetjax.state import State
from hetjax.zoo.tasks import make_task

GROUP, SAMPLES = 4, 40
RNG = np.random.default_rng(0)
DATA = {
    "x": RNG.normal(1.0, 2.0, (SAMPLES, 3, 5)).astype(np.float32),
    "y": RNG.integers(0, 3, SAMPLES).astype(np.int32),
}
cross_entropy = optax.softmax_cross_entropy_with_integer_labels


def probe(model, advance=None, data=DATA, params=None):
    """Run the check that precedes every compile for training."""
    quantum = model.quantum
    rows = {name: values[probe_indices(len(values), quantum)] for name, values in data.items()}
    state = State(model.params if params is None else params, model.model_state, None, None)
    check_model_state(model.loss_fn, advance or hetjax.running_average(), state, rows, jax.devices()[0])


class LinenNet(linen.Module):
    """Layers between two dense ones; each entry of `layers` is called with `training`."""

    layers: tuple
    training: bool = True

    @linen.compact
    def __call__(self, x):
        x = linen.Dense(6)(x)
        for make in self.layers:
            x = make(self.training)(x)
        x = linen.Dropout(0.3, deterministic=not self.training)(jax.nn.relu(x))
        return linen.Dense(3)(x).mean(0)


def linen_model(*layers, group=GROUP):
    variables = LinenNet(layers, training=False).init(jax.random.key(0), DATA["x"][0])
    loss = lambda apply, example: cross_entropy(apply(example["x"]), example["y"])
    return hetjax.from_linen(
        LinenNet(layers), variables, loss, eval_module=LinenNet(layers, training=False), group=group
    )


def nnx_model(layer):
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.first, self.norm, self.head = nnx.Linear(5, 6, rngs=rngs), layer, nnx.Linear(6, 3, rngs=rngs)
            self.drop = nnx.Dropout(0.3, rngs=rngs)

        def __call__(self, x):
            return self.head(self.drop(self.norm(self.first(x)))).mean(0)

    return hetjax.from_nnx(
        Net(nnx.Rngs(0)), lambda model, example, rngs: cross_entropy(model(example["x"]), example["y"])
    )


class Averaging(linen.Module):
    """Keeps its own running average, as BatchNorm usually does."""

    training: bool
    momentum: float = 0.9

    @linen.compact
    def __call__(self, x):
        mean = self.variable("batch_stats", "mean", jnp.zeros, x.shape[-1:])
        if self.training and not self.is_initializing():
            mean.value = self.momentum * mean.value + (1 - self.momentum) * x.mean(0)
        return x - mean.value


class Counting(linen.Module):
    training: bool

    @linen.compact
    def __call__(self, x):
        calls = self.variable("batch_stats", "calls", lambda: jnp.zeros((), jnp.int32))
        if self.training and not self.is_initializing():
            calls.value += 1
        return x


class Spectral(linen.Module):
    training: bool

    @linen.compact
    def __call__(self, x):
        return linen.SpectralNorm(linen.Dense(6))(x, update_stats=self.training)


class AveragingNnx(nnx.Module):
    def __init__(self, momentum):
        self.momentum, self.mean = momentum, nnx.BatchStat(jnp.zeros(6))

    def __call__(self, x):
        self.mean[...] = self.momentum * self.mean[...] + (1 - self.momentum) * x.mean(0)
        return x - self.mean[...]


def flax_norm(momentum=0.99, frozen=False):
    return lambda training: linen.BatchNorm(use_running_average=frozen or not training, momentum=momentum)


def group_norm(training):
    return hetjax.LinenBatchNorm(not training, group=GROUP)


@pytest.mark.parametrize("momentum", [0.99, 0.0])
def test_linen_batch_norm_is_refused_by_name_before_anything_runs(momentum):
    model = linen_model(flax_norm(momentum))
    with (
        hetjax.Trainer(model, optax.sgd(0.1), batch_size=8, devices=jax.devices()[:2]) as trainer,
        pytest.raises(
            ValueError, match=r"The layer BatchNorm_0 is flax\.linen\.BatchNorm.* Use hetjax\.LinenBatchNorm"
        ),
    ):
        trainer.fit(trainer.init(model.params, model.model_state), DATA, steps=1)


@pytest.mark.parametrize(
    ("make", "name", "independent"),
    [
        (lambda: linen_model(Averaging), "Averaging_0.mean", False),
        (lambda: linen_model(lambda training: Averaging(training, 0.01)), "Averaging_0.mean", False),
        (lambda: linen_model(group_norm, Averaging), "Averaging_0.mean", False),
        (lambda: nnx_model(AveragingNnx(0.9)), "norm.mean", False),
        (lambda: linen_model(Counting), "Counting_0.calls", True),
        (lambda: linen_model(Spectral), "SpectralNorm_0.Dense_0/kernel/u", True),
        pytest.param(
            lambda: nnx_model(nnx.SpectralNorm(nnx.Linear(6, 6, rngs=nnx.Rngs(1)), rngs=nnx.Rngs(2))),
            "norm.batch_stats.('kernel', 'u')",
            True,
            marks=pytest.mark.skipif(not hasattr(nnx, "SpectralNorm"), reason="new in Flax 0.12"),
        ),
    ],
    ids=["linen", "slow", "behind-batch-norm", "nnx", "counter", "linen-spectral", "nnx-spectral"],
)  # fmt: skip
def test_a_layer_with_its_own_running_average_is_refused_by_name(make, name, independent):
    with pytest.raises(ValueError, match="averaged twice") as refused:
        probe(make())
    assert name in str(refused.value)
    assert "Use hetjax.BatchNorm or hetjax.LinenBatchNorm" in str(refused.value)
    assert ("advance=hetjax.running_average(0.0)" in str(refused.value)) == independent


def test_the_trainer_refuses_such_a_layer():
    model = linen_model(Spectral)
    with (
        hetjax.Trainer(model, optax.sgd(0.1), batch_size=16, devices=jax.devices()[:2]) as trainer,
        pytest.raises(ValueError, match="averaged twice"),
    ):
        trainer.fit(trainer.init(model.params, model.model_state), DATA, steps=1)


class Statistics(nnx.Module):
    """Keeps the mean of an example, which does not depend on the split."""

    def __init__(self):
        self.mean = nnx.BatchStat(jnp.zeros(6))

    def __call__(self, x):
        self.mean[...] = x.mean(0)
        return x


@pytest.mark.parametrize(
    "make",
    [
        lambda: linen_model(group_norm),
        lambda: linen_model(lambda training: hetjax.LinenBatchNorm(not training, group=GROUP, dtype=jnp.bfloat16)),
        lambda: linen_model(flax_norm(frozen=True)),
        lambda: linen_model(flax_norm(frozen=True), group_norm),
        lambda: linen_model(group_norm, flax_norm(frozen=True), group_norm),
        lambda: linen_model(group_norm, lambda training: linen.Dense(6), group_norm),
        lambda: nnx_model(hetjax.BatchNorm(6, group=GROUP)),
        lambda: nnx_model(hetjax.BatchNorm(6, group=16)),
        lambda: nnx_model(hetjax.BatchNorm(6, group=GROUP, sync="exact")),
        lambda: nnx_model(Statistics()),
    ],
    ids=[
        "linen",
        "bfloat16",
        "frozen",
        "frozen-before",
        "frozen-between",
        "cancelling",
        "nnx",
        "group-16",
        "exact",
        "mean",
    ],
)
def test_a_state_that_does_not_depend_on_the_split_passes(make):
    probe(make())


def test_nan_passes_because_the_first_step_reports_it():
    probe(nnx_model(hetjax.BatchNorm(6, group=GROUP)), data={**DATA, "x": np.full_like(DATA["x"], np.nan)})


def test_the_resnet_with_batch_norm_passes():
    model = make_task("digits", "resnet", norm="batch", width=4).model
    probe(model, data=fetch(load("digits"), np.arange(100)))


def test_averages_are_not_checked_with_a_custom_advance():
    probe(linen_model(Averaging), advance=lambda state, sums: state)


def over_microbatch(params, state, batch, keys, mask_b):
    """BatchNorm over the valid rows of a microbatch."""
    share_b = mask_b / mask_b.sum()
    x = batch["x"].mean(1)
    mean = share_b @ x
    var = share_b @ (x - mean) ** 2
    loss = cross_entropy((x - mean) / jnp.sqrt(var + 1e-5) @ params["w"], batch["y"])
    return loss, ({"norm": {"mean": mean * mask_b.sum(), "var": var * mask_b.sum()}}, mask_b.sum(dtype=jnp.float32))


def test_statistics_over_a_microbatch_are_refused_by_name():
    state = {"norm": {"mean": jnp.zeros(5), "var": jnp.ones(5)}}
    model = hetjax.FlaxModel(over_microbatch, over_microbatch, {"w": jnp.ones((5, 3))}, state, None)
    for advance in (None, lambda state, sums: state):
        with pytest.raises(ValueError, match=r"model state norm\.var depends on how a batch is split.*LayerNorm"):
            probe(model, advance)


def test_counting_masked_rows_is_refused():
    def careless(params, state, batch, keys, mask_b):
        loss, (sums, _) = over_microbatch(params, state, batch, keys, mask_b)
        return loss, ({"norm": {"mean": sums["norm"]["mean"]}}, jnp.float32(len(mask_b)))

    model = hetjax.FlaxModel(careless, careless, {"w": jnp.ones((5, 3))}, {"norm": {"mean": jnp.zeros(5)}}, None)
    with pytest.raises(ValueError, match="model state count depends"):
        probe(model)


@pytest.mark.slow
def test_spectral_norm_with_momentum_zero_trains_as_in_flax():
    class Net(linen.Module):
        @linen.compact
        def __call__(self, x, training=True):
            return linen.SpectralNorm(linen.Dense(3))(x, update_stats=training)

    data, optimizer = {"x": DATA["x"].mean(1), "y": DATA["y"]}, optax.sgd(0.1)
    variables = Net().init(jax.random.key(0), data["x"][0])
    model = hetjax.from_linen(
        Net(), variables, lambda apply, example: cross_entropy(apply(example["x"]), example["y"]), group=1
    )
    with hetjax.Trainer(
        model, optimizer, batch_size=SAMPLES, devices=jax.devices()[:2], controller="equal",
        engine=hetjax.Chunked(rungs=[20]), advance=hetjax.running_average(0.0),
    ) as trainer:  # fmt: skip
        state, _ = trainer.fit(trainer.init(model.params, model.model_state), data, steps=3)

    def mean_loss(params, stats):
        out, new = Net().apply({"params": params, "batch_stats": stats}, data["x"], mutable=["batch_stats"])
        return cross_entropy(out, data["y"]).mean(), new["batch_stats"]

    params, stats = variables["params"], variables["batch_stats"]
    opt_state = optimizer.init(params)
    for _ in range(3):
        grads, stats = jax.grad(mean_loss, has_aux=True)(params, stats)
        updates, opt_state = optimizer.update(grads, opt_state)
        params = optax.apply_updates(params, updates)
    chex.assert_trees_all_close((state.params, state.model_state), (params, stats), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("group", "idle"), [(8, 3), (4, 2), (2, 0), (1, 0)])
def test_groups_that_leave_workers_idle_are_logged(group, idle, caplog):
    with caplog.at_level(logging.WARNING, "hetjax"):
        warn_of_idle_workers(8, group, 4)
    assert len(caplog.messages) == (idle > 0)
    if idle:
        assert f"at least {idle} of the 4 workers are idle" in caplog.text
        assert f"groups of at most 2 (BatchNorm(group=...)) or batch_size={4 * group} or more" in caplog.text


def test_training_with_too_few_groups_logs_the_idle_workers(caplog):
    model = nnx_model(hetjax.BatchNorm(6, group=GROUP))
    with (
        caplog.at_level(logging.WARNING, "hetjax"),
        hetjax.Trainer(
            model, optax.sgd(0.1), batch_size=2 * GROUP, controller="equal", devices=jax.devices()[:4],
            engine=hetjax.Chunked(rungs=[GROUP]),
        ) as trainer,
    ):  # fmt: skip
        _, history = trainer.fit(trainer.init(model.params, model.model_state), DATA, steps=1)
    assert (history.counts[0] == 0).sum() == 2
    assert len([message for message in caplog.messages if "at least 2 of the 4 workers are idle" in message]) == 1


def test_a_state_of_several_parameter_sets_is_checked():
    model = nnx_model(hetjax.BatchNorm(6, group=GROUP))
    options = {
        "batch_size": 16,
        "sync": "decentralized",
        "devices": jax.devices()[:2],
        "controller": "equal",
        "engine": hetjax.Chunked(rungs=[8]),
    }
    with hetjax.Trainer(model, optax.sgd(0.1), **options) as trainer:
        state, _ = trainer.fit(trainer.init(model.params, model.model_state), DATA, steps=1)
    assert state.replicas == 2
    with hetjax.Trainer(model, optax.sgd(0.1), **options) as trainer:
        state, history = trainer.fit(state, DATA, steps=1)
    assert np.isfinite(history.losses).all()
