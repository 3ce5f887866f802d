"""Training on unlike devices, over the processes of the launcher: unlike_program.py CASE FOLDER.

    controllers   one process with two PJRT clients: every controller, and one device alone
    mixed         three processes: two clients; two devices; one device
    bits          sharded and replicated updates for 200 steps; the bytes of all parameters in the end
    owners        two processes that compute in turns, while the owners of the slices change
    moved         ten steps from the newest checkpoint, and a checkpoint; with the update in MOVED_UPDATE
    benched       two processes, of which one after the other sits on the bench
    optimizers    sharded and replicated updates of every optimizer, with given shares of the slices

Every process writes its results as JSON.
"""

import hashlib
import itertools
import json
import os
import sys
from pathlib import Path
from unittest.mock import patch

import numpy as np

SEED = 3
SHARES = {"unequal": [5, 3, 1, 1], "idle": [5, 3, 2, 0]}  # of slices; in the second, process 3 has none
OPTIMIZERS = (
    "momentum", "adam", "adamw, masked", "adafactor", "lamb", "lion", "muon", "multi_transform", "chain with clip",
    "clip_norm",
)  # fmt: skip


def optimizer_of(name):
    """The optimizer of this name, and further options of Step."""
    import jax
    import optax

    matrices = lambda params: jax.tree.map(lambda p: p.ndim > 1, params)
    labels = lambda params: {key: "frozen" if key == "v" else "trained" for key in params}
    made = {
        "momentum": lambda: optax.sgd(0.05, momentum=0.9),
        "adam": lambda: optax.adam(1e-2),
        "adamw, masked": lambda: optax.adamw(1e-2, weight_decay=0.1, mask=matrices),
        "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=4),
        "lamb": lambda: optax.lamb(1e-2),
        "lion": lambda: optax.lion(1e-3),
        "muon": lambda: optax.contrib.muon(1e-2),
        "multi_transform": lambda: optax.multi_transform(
            {"trained": optax.adam(1e-2), "frozen": optax.set_to_zero()}, labels
        ),
        "chain with clip": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2)),
        "clip_norm": lambda: optax.adam(1e-2),
    }[name]()
    return made, {"clip_norm": 0.1} if name == "clip_norm" else {}


def mlp(width=24):
    """A small regression with one hidden layer: loss, parameters, data."""
    import jax
    import jax.numpy as jnp

    rng = np.random.default_rng(SEED)
    x = rng.normal(size=(128, 8)).astype(np.float32)
    data = {"x": x, "y": np.sin(x.sum(1)).astype(np.float32)}
    params = {
        "w": rng.normal(size=(8, width)).astype(np.float32) / 3,
        "b": np.full(width, 0.1, np.float32),
        "u": rng.normal(size=(width, 12)).astype(np.float32) / 5,
        "v": rng.normal(size=12).astype(np.float32) / 3,
    }

    def loss_fn(params, batch, keys):
        hidden = jnp.tanh(batch["x"] @ params["w"] + params["b"])
        kept = jax.vmap(lambda key: jax.random.bernoulli(key, 0.8, (width,)))(keys)
        return (jnp.tanh(hidden * kept / 0.8 @ params["u"]) @ params["v"] - batch["y"]) ** 2

    return loss_fn, params, data


def normalized():
    """A Flax model with BatchNorm over fixed groups and dropout, and its data."""
    import jax
    from flax import nnx

    import hetjax

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.first, self.norm = nnx.Linear(8, 12, rngs=rngs), hetjax.BatchNorm(12, group=4, rngs=rngs)
            self.last, self.dropout = nnx.Linear(12, 1, rngs=rngs), nnx.Dropout(0.2)

        def __call__(self, x, rngs):
            hidden = jax.nn.relu(self.norm(self.first(x)))
            return self.last(hidden if rngs is None else self.dropout(hidden, rngs=rngs))[..., 0]

    def example_loss(model, sample, rngs):
        return (model(sample["x"], rngs) - sample["y"]) ** 2

    return hetjax.from_nnx(Model(nnx.Rngs(SEED)), example_loss), mlp()[2]


def digest(tree):
    import jax

    content = b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree))
    return hashlib.sha256(content).hexdigest()


def plain(tree):
    import jax

    return [np.asarray(leaf, np.float64).ravel().tolist() for leaf in jax.tree.leaves(tree)]


def train(model, optimizer, data, params, steps, model_state=None, batch=32, **options):
    """The state after some steps, the losses, and the trainer's step."""
    import hetjax

    options = {"controller": "equal", "engine": hetjax.Chunked(rungs=[4, 16]), "wait_limit": 60, **options}
    with hetjax.Trainer(model, optimizer, batch_size=batch, **options) as trainer:
        state, history = trainer.fit(trainer.init(params, model_state), data, steps=steps)
        return state, history


def controllers(folder):
    import jax
    import optax
    from second_client import second_client

    from hetjax import presets

    second = second_client()
    devices = [jax.devices("cpu")[0], second[0]]
    loss_fn, params, data = mlp()
    results = {}
    for name in presets.CONTROLLERS:
        options = {"controller": f"{name}:2,1" if name == "fixed" else name}
        (state, history), (alone, single) = (
            train(loss_fn, optax.sgd(0.05, momentum=0.9), data, params, 12, devices=used, **given)
            for used, given in ((devices, options), (devices[:1], {}))
        )
        results[name] = {
            "losses": history.losses, "alone": single.losses, "params": plain(state.params),
            "params_alone": plain(alone.params), "transport": history.transport,
        }  # fmt: skip
    Path(folder, "0.json").write_text(json.dumps(results))


def mixed(folder, info):
    import jax
    import optax
    from second_client import second_client

    devices = {0: lambda: [*second_client()[:1], jax.devices("cpu")[0]], 1: lambda: jax.devices()[:2],
               2: lambda: jax.devices()[:1]}[info.process]()  # fmt: skip
    model, data = normalized()
    options = {"controller": "fixed:3,2,2,1,4", "devices": devices, "ema_decay": 0.9}
    state, history = train(model, optax.sgd(0.05, momentum=0.9), data, model.params, 50, model.model_state, **options)
    return {
        "losses": history.losses, "params": plain(state.params), "model_state": plain(state.model_state),
        "ema": plain(state.ema), "opt_state": plain(state.opt_state), "bits": digest(state.core),
        "transport": history.transport,
    }  # fmt: skip


def bits(folder, info):
    """With several slices for each process, and model state."""
    import jax
    import optax

    from hetjax.reduce import slices
    from hetjax.reduce.sharded import HostSharded

    model, data = normalized()
    rng = np.random.default_rng(SEED)  # JAX's own draws are rounded otherwise
    params = jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32) / 3, model.params)
    optimizer, owned, own = optax.adam(1e-2, eps=1e-3), [], HostSharded.own

    def noted(self, share_P):
        own(self, share_P)
        owned.append(np.bincount(self.exchange.owners[: len(self.pieces)], minlength=3).tolist())

    found = {}
    for update in ("sharded", "replicated"):
        with patch.object(slices, "_SMALLEST", 16), patch.object(HostSharded, "own", noted):
            state, _ = train(model, optimizer, data, params, 200, model.model_state, update=update)
        found[update] = digest(state.core)
    return {**found, "owned": owned}


def optimizers(folder, info):
    import hetjax
    from hetjax.reduce import sharded, slices

    loss_fn, params, data = mlp()
    found = {}
    for name in os.environ["TESTED_OPTIMIZERS"].split("|"):
        optimizer, options = optimizer_of(name)
        options = {"engine": hetjax.Chunked(rungs=[8]), **options}  # with several, measured prices decide the last bits
        replicated, _ = train(loss_fn, optimizer, data, params, 6, update="replicated", **options)
        found[name] = {"replicated": plain(replicated.params), "state": plain(replicated.opt_state)}
        for shares, share_P in SHARES.items():
            if shares == "idle" and name != "adam":
                continue
            given = lambda *_, share_P=share_P: np.array(share_P) / sum(share_P)
            with patch.object(slices, "_SMALLEST", 32), patch.object(sharded, "shares", given):
                state, _ = train(loss_fn, optimizer, data, params, 6, update="sharded", **options)
            found[name][shares] = {"params": plain(state.params), "state": plain(state.opt_state)}
    return found


def turns(controller_base):
    """A controller that gives all samples to one worker for three steps, then to the other."""
    from hetjax.planning.controllers.base import Plan

    class Turns(controller_base):
        planned = 0

        def plan(self, batch, limits, epoch=0):
            counts_W = np.zeros(limits.workers, np.int64)
            counts_W[self.planned // 3 % limits.workers] = batch
            self.planned += 1
            return Plan(counts_W)

        def state_dict(self):
            return {}

    return Turns(SEED)


def owners(folder, info):
    """Owners change at every second step, also to a process that sat out and has old parameters."""
    from problems import RandomPlans

    from hetjax.reduce import sharded

    loss_fn, params, data = mlp()
    looks = itertools.count()
    alternate = lambda *_: np.eye(2)[next(looks) // 2 % 2]
    optimizer, _ = optimizer_of("momentum")
    with (
        patch.object(sharded, "shares", alternate),
        patch.object(sharded, "_SETTLED", 2),
        patch.object(sharded, "_WORTH", 0.0),
    ):
        state, history = train(loss_fn, optimizer, data, params, 24, update="sharded", controller=turns(RandomPlans))
    return {"losses": history.losses, "params": plain(state.params), "state": plain(state.opt_state)}


def benched(folder, info):
    """Process 1, then process 0, leaves the exchange for some steps; with the owners after each change."""
    from problems import RandomPlans

    from hetjax.planning.controllers.base import Plan
    from hetjax.reduce import sharded, slices
    from hetjax.reduce.sharded import HostSharded

    class Benching(RandomPlans):
        planned = 0

        def plan(self, batch, limits, epoch=0):
            out = {1: 1, 3: 0}.get(self.planned // 4)
            self.planned += 1
            if out is None:
                return Plan(np.array([batch // 2, batch - batch // 2]))
            benched_W = np.arange(2) == out
            return Plan(np.where(benched_W, 0, batch), benched_W=benched_W)

        def state_dict(self):
            return {}

    loss_fn, params, data = mlp()
    optimizer, _ = optimizer_of("momentum")
    owners, hand_over = [], HostSharded.hand_over

    def noted(self, core, share_P):
        core = hand_over(self, core, share_P)
        owners.append([sorted(set(self.exchange.owners)), len(core.owned)])
        return core

    with (
        patch.object(slices, "_SMALLEST", 32),
        patch.object(slices.shares, "__kwdefaults__", {"fixed": 0.0, "own": 6.0}),
        patch.object(HostSharded, "hand_over", noted),
        patch.object(sharded, "_SETTLED", 100),
    ):
        state, history = train(loss_fn, optimizer, data, params, 20, update="sharded", controller=Benching(SEED))
    return {
        "losses": history.losses, "params": plain(state.params), "state": plain(state.opt_state), "owners": owners,
    }  # fmt: skip


def go_on(folder, **options):
    """Ten steps with Adam, dropout, BatchNorm and a moving average, from the newest checkpoint of a folder."""
    import optax

    import hetjax
    from hetjax import checkpoint

    model, data = normalized()
    options = {"controller": "equal", "engine": hetjax.Chunked(rungs=[4, 16]), "wait_limit": 60, **options}
    optimizer = optax.adam(1e-2, eps=1e-3)  # a bias before BatchNorm has a gradient of rounding errors only
    with hetjax.Trainer(model, optimizer, batch_size=32, ema_decay=0.9, **options) as trainer:
        state = trainer.init(model.params, model.model_state)
        found = checkpoint.restore_latest(folder, state, trainer)
        state, history = trainer.fit(state if found is None else found.state, data, steps=10)
        checkpoint.save(folder, state, trainer)
        values = {name: plain(getattr(state, name)) for name in ("params", "model_state", "ema", "opt_state")}
        return {"losses": history.losses, "transport": history.transport, **values}


def moved(folder, info):
    return go_on(Path(folder, "checkpoints"), update=os.environ["MOVED_UPDATE"])


def owned_bytes(folder, info):
    """Bytes of the optimizer state in this process, and of all of it."""
    import jax
    import optax

    import hetjax
    from hetjax.devices import memory

    loss_fn, params, data = mlp(width=65_536)  # 1.4 million parameters
    engine = hetjax.Chunked(rungs=[4])
    step = hetjax.Step(loss_fn, optax.adam(1e-2), batch_size=32, update="sharded", controller="equal", engine=engine)
    state, _ = step(step.init(params), {name: rows[:32] for name, rows in data.items()})
    step.flush()
    core = state.pipeline.core
    own = sum(memory.size(owned.opt_state) for owned in core.owned.values())
    whole = memory.size(jax.tree.map(np.asarray, step.export(state).opt_state))
    step.close()
    return {"own": own, "whole": whole}


def main():
    case, folder = sys.argv[1:]
    if case == "controllers":
        controllers(folder)
        return
    import jax

    from hetjax.fleet.distributed import initialize, leave

    jax.config.update("jax_num_cpu_devices", 2 if case == "mixed" else 1)
    info = initialize(wait_limit=60, heartbeat_limit=10)
    result = {
        "mixed": mixed,
        "bits": bits,
        "optimizers": optimizers,
        "bytes": owned_bytes,
        "owners": owners,
        "benched": benched,
        "moved": moved,
    }[case](folder, info)
    Path(folder, f"{info.process}.json").write_text(json.dumps(result))
    leave(0, together=True)


if __name__ == "__main__":
    main()
