"""Decentralized runs over the processes of the launcher: decentralized_program.py FILE [unlike].

The first process writes the final parameters of all workers to FILE. Each run is saved and resumed half way. `unlike`:
the workers of each process belong to two PJRT clients.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

import numpy as np

SAMPLES, BATCH, SIZE, STEPS, WORKERS = 60, 20, 3, 12, 4
WIDE = np.linspace(-1, 1, 2**13, dtype=np.float32)  # 3 x 8192 parameters: read by neighbors and sent without a copy
RUNS = {
    "ring": {"topology": "ring", "mix_every": 2},
    "matcha": {"topology": "ring", "matcha_budget": 0.5},
    "blocks": {"topology": "ring", "mix_every": 2},
    "complete": {"topology": "complete", "mix_every": 2},
}


def data():
    rng = np.random.default_rng(0)
    a = rng.normal(size=(SAMPLES, SIZE)).astype(np.float32)
    return {"a": a, "t": (a @ [1.0, -2, 0.5] + np.linspace(-1, 3, SAMPLES)).astype(np.float32)}


def blocks():
    """Submodular blocks of unequal size; only the first process may compute them."""
    from hetjax import make_blocks, processes
    from hetjax.data.source_blocks import shared_blocks

    def cut():
        assert processes.first()
        return make_blocks({"image": data()["a"], "label": np.arange(SAMPLES) % 3}, [4, 3, 2, 1], features="raw")

    return shared_blocks(cut)


def loss_fn(params, batch, keys):
    """Least squares in both parameters, the large one for targets of its own along its second axis."""
    missed = batch["a"] @ params["large"] - batch["t"][:, None] * WIDE
    return 0.5 * (batch["a"] @ params["x"] - batch["t"]) ** 2 + (missed**2).mean(axis=-1) * WIDE.size / 10


def noisy_sgd():
    """Momentum SGD with noise drawn from a key in its state, which a checkpoint has to hold for every worker."""
    import jax
    import optax

    def update(grads, key, params=None):
        key, drawn = jax.random.split(key)
        return jax.tree.map(lambda g: g + 0.1 * jax.random.normal(drawn, g.shape), grads), key

    noise = optax.GradientTransformation(lambda params: jax.random.key(5), update)
    return optax.chain(noise, optax.sgd(0.05, momentum=0.9))


def results(folder, devices):
    """Of each run: the test loss of the answer, the losses, and the parameters of all workers (first process only)."""
    import jax.numpy as jnp

    from hetjax import Chunked, Trainer, checkpoint
    from hetjax.checkpoint.snapshot import host_copy
    from hetjax.sync import Decentralized

    outcomes, partitions = {}, {"blocks": blocks()}
    for name, options in RUNS.items():
        make = lambda name=name, options=options: Trainer(
            loss_fn,
            noisy_sgd(),
            batch_size=BATCH,
            controller="equal",
            partition=partitions.get(name, "global"),
            sync=Decentralized(**options),
            devices=devices,
            engine=Chunked(rungs=[4, BATCH]),
            seed=3,
        )
        with make() as trainer:
            fresh = trainer.init({"x": jnp.zeros(SIZE), "large": jnp.outer(jnp.arange(SIZE), WIDE)})
            state, _ = trainer.fit(fresh, data(), steps=STEPS // 2)
            checkpoint.save(folder / name, state, trainer)
        with make() as trainer:
            resumed = checkpoint.restore_latest(folder / name, fresh, trainer)
            state, history = trainer.fit(resumed.state, data(), steps=STEPS - STEPS // 2)
            tested = trainer.evaluate(state, data())
        params = {key: host_copy(leaf) for key, leaf in sorted(state.params.items())}
        outcomes[name] = [
            tested["loss"],
            history.losses,
            {key: x.tolist() for key, x in params.items() if x is not None},
        ]
    return outcomes


def main():
    import jax
    from second_client import second_client

    from hetjax.fleet.distributed import initialize, leave

    jax.config.update("jax_num_cpu_devices", WORKERS // int(os.environ["HETJAX_PROCESSES"]))
    info = initialize(wait_limit=60, heartbeat_limit=20)
    path, *unlike = sys.argv[1:]
    devices = [*second_client()[:1], jax.devices("cpu")[0]] if unlike else jax.devices()
    with tempfile.TemporaryDirectory() as folder:
        outcomes = results(Path(folder), devices)
    if info.first:
        Path(path).write_text(json.dumps(outcomes))
    leave(0, together=True)


if __name__ == "__main__":
    main()
