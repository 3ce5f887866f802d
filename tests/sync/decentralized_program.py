"""Decentralized runs over the processes of the launcher: decentralized_program.py FILE.

The first process writes the final parameters of all workers to FILE. Each run is saved and resumed half way.
"""

import json
import sys
import tempfile
from pathlib import Path

import numpy as np

SAMPLES, BATCH, SIZE, STEPS, WORKERS = 60, 20, 3, 12, 4
RUNS = {
    "ring": {"topology": "ring", "mix_every": 2},
    "matcha": {"topology": "ring", "matcha_budget": 0.5},
    "blocks": {"topology": "ring", "mix_every": 2},
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
    return 0.5 * (batch["a"] @ params["x"] - batch["t"]) ** 2


def results(folder):
    """Of each run: the test loss of the answer, the losses, and the parameters of all workers (first process only)."""
    import jax
    import jax.numpy as jnp
    import optax

    from hetjax import Chunked, Trainer, checkpoint
    from hetjax.checkpoint.snapshot import host_copy
    from hetjax.sync import Decentralized

    outcomes, partitions = {}, {"blocks": blocks()}
    for name, options in RUNS.items():
        make = lambda name=name, options=options: Trainer(
            loss_fn,
            optax.sgd(0.05, momentum=0.9),
            batch_size=BATCH,
            controller="equal",
            partition=partitions.get(name, "global"),
            sync=Decentralized(**options),
            devices=jax.devices()[:WORKERS],
            engine=Chunked(rungs=[4, BATCH]),
            seed=3,
        )
        with make() as trainer:
            fresh = trainer.init({"x": jnp.zeros(SIZE)})
            state, _ = trainer.fit(fresh, data(), steps=STEPS // 2)
            checkpoint.save(folder / name, state, trainer)
        with make() as trainer:
            resumed = checkpoint.restore_latest(folder / name, fresh, trainer)
            state, history = trainer.fit(resumed.state, data(), steps=STEPS - STEPS // 2)
            tested = trainer.evaluate(state, data())
        params_WxP = host_copy(state.params["x"])
        outcomes[name] = [tested["loss"], history.losses, None if params_WxP is None else params_WxP.tolist()]
    return outcomes


def main():
    import jax

    from hetjax.fleet.distributed import initialize, leave

    jax.config.update("jax_num_cpu_devices", WORKERS // 2)
    info = initialize(wait_limit=60, heartbeat_limit=20)
    with tempfile.TemporaryDirectory() as folder:
        outcomes = results(Path(folder))
    if info.first:
        Path(sys.argv[1]).write_text(json.dumps(outcomes))
    leave(0, together=True)


if __name__ == "__main__":
    main()
