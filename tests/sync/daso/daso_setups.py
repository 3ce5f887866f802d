"""Two problems with hand-written gradients, for the package and for the reference; and nodes fed step by step."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
from holder import Holder

from hetjax import Chunked, Trainer
from hetjax.devices.workers import Workers
from hetjax.engines.clocks import LocalResult
from hetjax.planning.controllers.base import Plan
from hetjax.reduce.base import own_slots
from hetjax.reduce.layout import Layout, StepSums
from hetjax.reduce.transports import ReduceOptions
from hetjax.sampling.order import Sampler, Span
from hetjax.state import State
from hetjax.sync.base import SyncContext, UpdateRule
from hetjax.sync.daso import Daso

SAMPLES, BATCH = 44, 8  # five steps of eight and one of four


class Fixed:
    """A controller with fixed counts for full steps, and proportional ones for the short last step."""

    name = "fixed"

    def __init__(self, counts):
        self.counts = np.asarray(counts)

    def plan(self, batch, limits, epoch=0):
        counts = self.counts * batch // self.counts.sum()
        counts[-1] += batch - counts.sum()
        return Plan(counts)

    def observe(self, seen):
        pass

    def state_dict(self):
        return {"controller": self.name}

    def load_state_dict(self, state):
        pass


def quadratic(seed=0, size=3):
    """Half the squared distance to the samples, with a curvature per coordinate."""
    rng = np.random.default_rng(seed)
    center, curve = rng.normal(size=(SAMPLES, size)), np.array([1.0, 0.5, 2.0])[:size]

    def loss_fn(params, batch, keys):
        return 0.5 * jnp.sum(jnp.asarray(curve) * (params - batch["c"]) ** 2, axis=-1)

    def gradient(x, rows):
        away = x - center[rows]
        return (curve * away).sum(0), 0.5 * (curve * away**2).sum()

    return loss_fn, {"c": center}, np.zeros(size), gradient


def tanh_net(seed=0, inputs=4, hidden=3):
    """y = v tanh(U z) with squared error; the reference has all parameters in one vector."""
    rng = np.random.default_rng(seed)
    z, y = rng.normal(size=(SAMPLES, inputs)), rng.normal(size=SAMPLES)
    x0 = rng.normal(size=hidden * inputs + hidden) / 2
    cut = hidden * inputs

    def loss_fn(params, batch, keys):
        predicted = jnp.tanh(batch["z"] @ params["u"].T) @ params["v"]
        return 0.5 * (predicted - batch["y"]) ** 2

    def gradient(x, rows):
        u, v = x[:cut].reshape(hidden, inputs), x[cut:]
        h = np.tanh(z[rows] @ u.T)
        error = h @ v - y[rows]
        back = (error[:, None] * v) * (1 - h**2)
        return np.concatenate([(back.T @ z[rows]).ravel(), h.T @ error]), 0.5 * float(error @ error)

    return loss_fn, {"z": z, "y": y}, {"u": x0[:cut].reshape(hidden, inputs), "v": x0[cut:]}, gradient


def flat(params):
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(params)])


def per_node(params, nodes):
    """Stacked parameters as one vector per node."""
    return [flat([leaf[j] for leaf in jax.tree.leaves(params)]) for j in range(nodes)]


def node_parts(epoch, counts, sizes, seed=0):
    """The samples of each node in every step of an epoch, in the sampler's order."""
    sampler, split = Sampler(SAMPLES, BATCH, seed), Fixed(counts)
    steps = []
    for start in range(0, SAMPLES, BATCH):
        step = sampler.step(epoch * SAMPLES + start)
        counts_W = split.plan(step.batch, None).counts_W
        per_node = [part.sum() for part in np.split(counts_W, np.cumsum(sizes)[:-1])]
        order = sampler.indices(epoch, step.start, step.stop)
        steps.append(np.split(order, np.cumsum(per_node)[:-1]))
    return steps


class Driven:
    """Nodes of one worker each, fed with gradients by the test, without a trainer.

    Every step spans 4 samples of the epoch, independent of how many the nodes report.
    """

    def __init__(self, x, optimizer, samples, nodes=4, epochs=100, **options):
        workers = Workers.of(jax.devices()[:nodes])
        self.layout = Layout.of(jax.ShapeDtypeStruct(x.shape, x.dtype), (), ())
        rule, end = UpdateRule(optimizer, None, None), epochs * samples
        self.context = SyncContext(workers, self.layout, rule, ReduceOptions(), 4, samples=samples, end=end)
        self.options = {"nodes": nodes, **options}
        self.sync = Daso(**self.options)
        self.samples, self.cursor = samples, 0
        self.reduce = Holder(self.sync.open(self.context, State(jnp.asarray(x), None, optimizer.init(x), None)))

    def reopen(self):
        """Continue from what a checkpoint would hold."""
        state = jax.tree.map(np.array, self.reduce.state(self.cursor // 4, self.cursor))
        saved = self.sync.state_dict()
        self.sync = Daso(**self.options)
        self.sync.load_state_dict(saved)
        self.reduce = Holder(self.sync.open(self.context, state))

    @property
    def x(self):
        """The parameters of each node."""
        return [np.asarray(leaves[0])[0] for leaves in self.reduce.replicas().leaves_w]

    def step(self, sums, stop=False):
        """One step, given the sum of gradients and the number of samples of every node."""
        results = []
        for device, (gradient, count) in zip(self.reduce.workers.own, sums, strict=True):
            zero, number = jnp.zeros(()), jnp.asarray(float(count))
            step_sums = StepSums(jnp.asarray(gradient), (), zero, number, number, {})
            parts = tuple(jax.device_put(np.asarray(part)[None], device) for part in self.layout.pack(step_sums))
            results.append(LocalResult(parts, count, 0.0, 1.0))
        epoch, start = divmod(self.cursor, self.samples)
        self.cursor += 4
        slots = [own_slots(1.0, result.rows, 0, stop) for result in results]
        self.reduce.step(results, slots, Span(epoch, start, start + 4))
        self.reduce.report()


def trainer(loss_fn, counts, sizes, optimizer=None, sync=None, **options):
    daso = {"nodes": sizes, "wire": "full", **options}
    return Trainer(
        loss_fn,
        optimizer or optax.sgd(0.1),
        batch_size=BATCH,
        controller=Fixed(counts),
        sync=Daso(**daso) if sync is None else sync,
        devices=jax.devices()[: len(counts)],
        engine=Chunked(rungs=[1, 8]),
    )
