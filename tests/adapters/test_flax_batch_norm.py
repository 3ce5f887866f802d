"""BatchNorm takes the place of Flax's own layers: same arguments, variables and numbers, by import or conversion."""

import dataclasses
import inspect
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from problems import RandomPlans

import hetjax
from hetjax.adapters.batch_norm import over_groups
from hetjax.adapters.nnx_versions import List
from hetjax.sampling.order import Sampler

GROUP, BATCH = 4, 24
RNG = np.random.default_rng(0)
DATA = {
    "x": RNG.normal(1.0, 2.0, (2 * BATCH, 3, 5)).astype(np.float32),
    "y": RNG.integers(0, 3, 2 * BATCH).astype(np.int32),
}


def example_loss(model, example, rngs=None):
    return optax.softmax_cross_entropy_with_integer_labels(model(example["x"]), example["y"])


class Net(nnx.Module):
    def __init__(self, rngs, norm):
        self.first, self.norm, self.head = nnx.Linear(5, 6, rngs=rngs), norm, nnx.Linear(6, 3, rngs=rngs)

    def __call__(self, x):
        return self.head(jax.nn.relu(self.norm(self.first(x))).mean(-2))


class LinenNet(linen.Module):
    norm: type
    options: tuple = ()
    train: bool = True

    @linen.compact
    def __call__(self, x):
        x = linen.Dense(6)(x)
        x = self.norm(**dict(self.options))(x, use_running_average=not self.train)
        return linen.Dense(3)(jax.nn.relu(x).mean(-2))


class Residual(nnx.Module):
    def __init__(self, rngs, norm):
        self.convs = List([nnx.Conv(4, 4, (3,), use_bias=False, rngs=rngs) for _ in range(2)])
        self.norms = List([norm(4, momentum=momentum, rngs=rngs) for momentum in (0.9, 0.99)])

    def __call__(self, x):
        y = jax.nn.relu(self.norms[0](self.convs[0](x)))
        return jax.nn.relu(x + self.norms[1](self.convs[1](y)))


class ResNet(nnx.Module):
    """Convolutions over the 3 positions of an example."""

    def __init__(self, rngs, norm=nnx.BatchNorm):
        self.stem, self.norm = nnx.Conv(5, 4, (3,), rngs=rngs), norm(4, epsilon=1e-3, use_scale=False, rngs=rngs)
        self.blocks = List([Residual(rngs, norm) for _ in range(2)])
        self.head = nnx.Linear(4, 3, rngs=rngs)

    def __call__(self, x):
        x = jax.nn.relu(self.norm(self.stem(x)))
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(-2))


def arrays(tree):
    """The arrays of a tree by name, for trees of Flax NNX and of Flax Linen alike."""
    name = lambda path: jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value")
    return {name(path): np.asarray(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def trained(model, steps=3, *, workers=2, seed=0, **options):
    """Return the parameters, the statistics and the loss in evaluation after a few steps with random counts."""
    options = {"controller": RandomPlans(seed), "engine": hetjax.Chunked(rungs=[model.quantum])} | options
    with hetjax.Trainer(
        model, optax.sgd(0.1), batch_size=BATCH, devices=jax.devices()[:workers], capacity=BATCH, **options
    ) as trainer:
        state, _ = trainer.fit(trainer.init(model.params, model.model_state), DATA, steps=steps)
        return arrays(state.params), arrays(state.model_state), trainer.evaluate(state, DATA)["loss"]


def trained_by_flax(loss_of, params, stats, steps=3):
    """The same in a plain loop: `loss_of(params, stats, batch, train)` returns the losses and the new statistics."""
    sampler, optimizer = Sampler(len(DATA["y"]), BATCH, 0), optax.sgd(0.1)
    opt_state = optimizer.init(params)

    @jax.jit
    def update(params, stats, opt_state, batch):
        def mean_loss(params):
            losses, new = loss_of(params, stats, batch, True)
            return losses.mean(), new

        grads, stats = jax.grad(mean_loss, has_aux=True)(params)
        updates, opt_state = optimizer.update(grads, opt_state)
        return optax.apply_updates(params, updates), stats, opt_state

    evaluate = jax.jit(lambda params, stats: loss_of(params, stats, DATA, False)[0])
    for step in map(sampler.step, range(0, steps * BATCH, BATCH)):
        index = sampler.indices(step.epoch, step.start, step.stop)
        params, stats, opt_state = update(params, stats, opt_state, jax.tree.map(lambda x: x[index], DATA))  # noqa: B023
    return arrays(params), arrays(stats), float(evaluate(params, stats).mean())


def trained_nnx(network, steps=3):
    """A plain loop around a Flax NNX model."""
    graph, params, stats = nnx.split(network, nnx.Param, nnx.BatchStat)

    def loss_of(params, stats, batch, train):
        model = nnx.merge(graph, params, stats, copy=True)
        model.train() if train else model.eval()
        losses = example_loss(model, batch)
        return losses, nnx.state(model, nnx.BatchStat)

    return trained_by_flax(loss_of, params, stats, steps)


def trained_linen(make, variables):
    """A plain loop around a Flax Linen module; `make(train)` returns it."""

    def loss_of(params, stats, batch, train):
        tree = {"params": params, "batch_stats": stats}
        logits, new = make(train).apply(tree, batch["x"], mutable=["batch_stats"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]), new["batch_stats"]

    return trained_by_flax(loss_of, variables["params"], variables["batch_stats"])


def test_the_arguments_are_those_of_flax():
    fields = [field.name for field in dataclasses.fields(linen.BatchNorm) if field.name not in ("parent", "name")]
    assert list(inspect.signature(hetjax.LinenBatchNorm).parameters)[: len(fields)] == fields
    of_flax = inspect.signature(nnx.BatchNorm).parameters
    options = {name: value.default for name, value in of_flax.items() if value.default is not inspect.Parameter.empty}
    layer = hetjax.BatchNorm(num_features=6, rngs=nnx.Rngs(0), **options)
    stock = nnx.BatchNorm(6, rngs=nnx.Rngs(0))
    assert all(getattr(layer, name) == getattr(stock, name) for name in options if hasattr(stock, name))
    calls = [inspect.signature(layer.__call__) for layer in (nnx.BatchNorm, hetjax.BatchNorm)]
    assert list(calls[0].parameters) == list(calls[1].parameters)


@pytest.mark.parametrize(("use_bias", "use_scale"), list(itertools.product([True, False], repeat=2)))
def test_variables_have_the_paths_shapes_dtypes_and_values_of_flax(use_bias, use_scale):
    options = {
        "use_bias": use_bias,
        "use_scale": use_scale,
        "param_dtype": jnp.bfloat16,
        "bias_init": nnx.initializers.normal(),
        "scale_init": nnx.initializers.uniform(),
    }
    states = [nnx.state(norm(6, rngs=nnx.Rngs(3), **options)) for norm in (nnx.BatchNorm, hetjax.BatchNorm)]
    chex.assert_trees_all_equal(*states, strict=True)

    class Two(linen.Module):
        norm: type

        @linen.compact
        def __call__(self, x):
            x = self.norm(use_running_average=True, **options)(x)
            return self.norm(use_running_average=True, force_float32_reductions=False, **options)(x)

    trees = [Two(norm).init(jax.random.key(0), DATA["x"][0]) for norm in (linen.BatchNorm, hetjax.LinenBatchNorm)]
    assert set(trees[1]["batch_stats"]) == {"BatchNorm_0", "BatchNorm_1"}
    chex.assert_trees_all_equal(*trees, strict=True)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"momentum": 0.9, "use_fast_variance": False, "axis_name": "batch"},
        {"axis": -2, "epsilon": 0.1, "use_bias": False},
        {"axis": (-2, -1), "momentum": 0.5, "use_scale": False},
    ],
    ids=["default", "momentum", "axis", "axes"],
)
@pytest.mark.parametrize("framework", ["nnx", "linen"])
def test_one_group_trains_and_evaluates_as_flax(options, framework):
    stock = {name: value for name, value in options.items() if name != "axis_name"}  # there is none in a plain loop
    if framework == "nnx":
        if options.get("axis") == (-2, -1):
            return  # nnx.BatchNorm has one axis of features
        make = lambda norm, **options: Net(
            nnx.Rngs(1), norm(3 if "axis" in options else 6, rngs=nnx.Rngs(2), **options)
        )
        expected = trained_nnx(make(nnx.BatchNorm, **stock))
        model = hetjax.from_nnx(make(hetjax.BatchNorm, group=BATCH, **options), example_loss)
    else:
        make = lambda norm, train, **options: LinenNet(norm, tuple(options.items()), train)
        variables = make(linen.BatchNorm, False, **stock).init(jax.random.key(0), DATA["x"][:2])
        expected = trained_linen(lambda train: make(linen.BatchNorm, train, **stock), variables)
        modules = [make(hetjax.LinenBatchNorm, train, group=BATCH, **options) for train in (True, False)]
        model = hetjax.from_linen(modules[0], variables, example_loss, eval_module=modules[1], group=BATCH)
    chex.assert_trees_all_close(trained(model), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_converted_linen_layers_train_as_in_flax_and_give_the_same_numbers_for_any_split():
    make = lambda train: LinenNet(linen.BatchNorm, (("momentum", 0.8),), train)
    variables = make(False).init(jax.random.key(0), DATA["x"][:2])
    convert = lambda **options: hetjax.from_linen(
        make(True), variables, example_loss, eval_module=make(False), convert_batch_norm=True, **options
    )
    chex.assert_trees_all_close(trained(convert(group=BATCH)), trained_linen(make, variables), rtol=1e-5, atol=1e-5)
    runs = [trained(convert(group=GROUP), workers=workers, seed=workers) for workers in (1, 3)]
    chex.assert_trees_all_close(*runs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("sync", "group", "options"),
    [
        ("groups", BATCH, {}),
        pytest.param(
            "exact", GROUP, {"engine": "masked", "controller": "static", "workers": 3}, marks=pytest.mark.slow
        ),
    ],
)
def test_a_converted_residual_network_trains_as_in_flax(sync, group, options):
    network = ResNet(nnx.Rngs(0))
    converted = hetjax.convert_batch_norm(network, group, sync)
    assert type(network.norm) is nnx.BatchNorm
    assert type(converted.blocks[1].norms[0]) is hetjax.BatchNorm
    model = hetjax.from_nnx(converted, example_loss)
    chex.assert_trees_all_close(trained(model, 4, **options), trained_nnx(network, 4), rtol=1e-5, atol=1e-5)


def test_a_converted_network_gives_the_same_numbers_for_any_split():
    model = hetjax.from_nnx(hetjax.convert_batch_norm(ResNet(nnx.Rngs(0)), group=GROUP), example_loss)
    assert model.quantum == GROUP
    runs = [trained(model, workers=workers, seed=workers) for workers in (1, 3)]
    chex.assert_trees_all_close(*runs, rtol=1e-5, atol=1e-6)


class Scanned(nnx.Module):
    def __init__(self, rngs):
        make = lambda rngs: nnx.BatchNorm(5, momentum=0.6, rngs=rngs)
        self.layers = nnx.split_rngs(splits=3)(nnx.vmap(make))(rngs)
        self.head = nnx.Linear(5, 3, rngs=rngs)

    def __call__(self, x):
        one = lambda layer, x: layer(x)
        return self.head(nnx.scan(one, in_axes=(0, nnx.Carry), out_axes=nnx.Carry)(self.layers, x).mean(-2))


class LinenScanned(linen.Module):
    train: bool

    @linen.compact
    def __call__(self, x):
        norm = lambda layer, x, _: (layer(x), None)
        scan = linen.scan(norm, variable_axes={"params": 0, "batch_stats": 0}, split_rngs={"params": True}, length=3)
        layer = linen.BatchNorm(use_running_average=not self.train, momentum=0.6)
        return linen.Dense(3)(scan(layer, x, None)[0].mean(-2))


@pytest.mark.slow
def test_scanned_layers_are_converted():
    network = Scanned(nnx.Rngs(0))
    model = hetjax.from_nnx(hetjax.convert_batch_norm(network, group=BATCH), example_loss)
    chex.assert_trees_all_close(trained(model), trained_nnx(network), rtol=1e-5, atol=1e-5)
    variables = LinenScanned(False).init(jax.random.key(0), DATA["x"][:2])
    options = {"eval_module": LinenScanned(False), "group": BATCH, "convert_batch_norm": True}
    model = hetjax.from_linen(LinenScanned(True), variables, example_loss, **options)
    chex.assert_trees_all_close(trained(model), trained_linen(LinenScanned, variables), rtol=1e-5, atol=1e-5)


def test_a_converted_linen_layer_in_training_mode_is_refused_in_evaluation():
    variables = LinenScanned(False).init(jax.random.key(0), DATA["x"][:2])
    model = hetjax.from_linen(LinenScanned(True), variables, example_loss, group=8, convert_batch_norm=True)
    keys = jax.random.split(jax.random.key(0), len(DATA["y"]))
    with pytest.raises(ValueError, match="pass eval_module"):
        model.eval_fn(model.params, model.model_state, DATA, keys, np.ones(len(keys), bool))


def test_checkpoints_fit_the_stock_and_the_converted_model():
    stock, other = ResNet(nnx.Rngs(0)), ResNet(nnx.Rngs(1))
    stock(DATA["x"])  # moves the statistics
    for source, target in [
        (stock, hetjax.convert_batch_norm(other)),
        (hetjax.convert_batch_norm(stock), other),
        (stock, ResNet(nnx.Rngs(1), hetjax.BatchNorm)),
    ]:
        nnx.update(target, nnx.state(source))
        source.eval(), target.eval()
        np.testing.assert_allclose(target(DATA["x"][0]), source(DATA["x"][0]), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_a_shared_layer_and_layers_in_lists_keep_their_momentum():
    class Shared(nnx.Module):
        def __init__(self):
            self.norms = List([hetjax.BatchNorm(5, group=GROUP, momentum=m) for m in (0.0, 0.5)])
            self.again, self.head = self.norms[1], nnx.Linear(5, 3, rngs=nnx.Rngs(0))

        def __call__(self, x):
            return self.head((self.norms[0](x) + self.again(x)).mean(0))

    model = hetjax.from_nnx(Shared(), example_loss)
    mean_of = lambda **options: [trained(model, 1, **options)[1][name] for name in ("norms.0.mean", "again.mean")]
    first, shared = mean_of()
    np.testing.assert_allclose(shared, 0.5 * first, rtol=1e-5)
    for mean in mean_of(advance=hetjax.running_average(0.9)):  # one for all
        np.testing.assert_allclose(mean, 0.1 * first, rtol=1e-5)


def outputs(layer, x, **options):
    """Outputs of a layer for a batch that was cut into blocks of 8."""
    graph, state = nnx.split(layer)
    one = lambda x: nnx.merge(graph, state, copy=True)(x, **options)
    return jax.jit(lambda x: over_groups(one, 8, jnp.ones(len(x), bool), x))(x)


def test_each_layer_has_its_own_group_within_a_block():
    x = DATA["x"][:16]
    for group in (2, 4, 8):
        parts = x.reshape(-1, group, 3, 5)
        expected = (parts - parts.mean((1, 2), keepdims=True)) / np.sqrt(parts.var((1, 2), keepdims=True) + 1e-5)
        found = outputs(hetjax.BatchNorm(5, group=group), x)
        np.testing.assert_allclose(found, expected.reshape(x.shape), rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match=r"groups of 3 samples, but .* blocks of 8.* Pass group=24 to from_linen"):
        outputs(hetjax.BatchNorm(5, group=3), x)


def test_a_linen_layer_whose_group_does_not_fit_is_refused_before_anything_runs():
    make = lambda train: LinenNet(hetjax.LinenBatchNorm, (("group", 16),), train)
    variables = make(False).init(jax.random.key(0), DATA["x"][0])
    model = hetjax.from_linen(make(True), variables, example_loss, eval_module=make(False), group=GROUP)
    with pytest.raises(ValueError, match=r"groups of 16 samples, but .* Pass group=16 to from_linen"):
        trained(model, 1)


def test_mask_and_dtype_give_the_numbers_of_flax():
    x, options = DATA["x"][:8], {"dtype": jnp.bfloat16}
    mask = jnp.array([True, False, True])[:, None]
    for given in ({}, {"mask": mask}, {"use_running_average": True}):
        expected = nnx.BatchNorm(5, rngs=nnx.Rngs(0), **options)(x, **given)
        found = outputs(hetjax.BatchNorm(5, group=8, **options), x, **given)
        assert found.dtype == expected.dtype
        np.testing.assert_allclose(found.astype(np.float32), expected.astype(np.float32), rtol=1e-2, atol=1e-2)
    expected = nnx.BatchNorm(5, rngs=nnx.Rngs(0))(x, mask=mask)
    np.testing.assert_allclose(outputs(hetjax.BatchNorm(5, group=8), x, mask=mask), expected, rtol=1e-5, atol=1e-5)
    assert outputs(hetjax.BatchNorm(5, group=8), jnp.bfloat16(x)).dtype == jnp.float32  # of the parameters


def test_what_has_no_meaning_here_is_refused_with_a_sentence():
    class Own(nnx.BatchNorm):
        pass

    stock = nnx.BatchNorm(6, axis_index_groups=[[0, 1]], rngs=nnx.Rngs(0))
    for make in (lambda: hetjax.BatchNorm(6, axis_index_groups=[[0, 1]]), lambda: hetjax.convert_batch_norm(stock)):
        with pytest.raises(ValueError, match="selects devices"):
            make()
    with pytest.raises(ValueError, match=r"is Own, a kind of flax\.nnx\.BatchNorm"):
        hetjax.from_nnx(hetjax.convert_batch_norm(Net(nnx.Rngs(0), Own(6, rngs=nnx.Rngs(0)))), example_loss)
    with pytest.raises(ValueError, match=r"5 features with axis=1 .* shape \(5, 3\)"):
        outputs(hetjax.BatchNorm(5, axis=1), np.swapaxes(DATA["x"][:8], 1, 2))
    with pytest.raises(ValueError, match="axis=3, but its input has 2 axes"):
        outputs(hetjax.BatchNorm(5, axis=3), DATA["x"][:8])
