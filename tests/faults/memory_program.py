"""Training on two processes, of which process 1 runs out of memory: memory_program.py FOLDER.

Both train twice. In the second run process 1 limits its address space after two steps, so that a microbatch of LARGE
rows really does not fit any more. Every process writes its results.
"""

import json
import logging
import resource
import sys
import time
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sample_log import log_samples, numbered, samples_of

from hetjax import Chunked, Trainer
from hetjax.devices import memory
from hetjax.engines.ladder import Ladder
from hetjax.fleet.distributed import initialize, leave

BATCH, STEPS, LENGTH, WIDTH = 96, 4, 4096, 256  # 4 MiB of activations per row
WORDS = 2**21  # 8 MiB of sums per microbatch
SMALL, LARGE = 3, 48  # rows of a microbatch; the larger one is an equal share of the batch


def loss_fn(params, batch, keys):
    noise_b = jax.vmap(jax.random.normal)(keys)
    hidden = jnp.square(batch["x"] @ params["in"])
    return ((hidden @ params["out"]).mean(1) + params["words"][batch["word"]] - batch["y"] + 0.1 * noise_b) ** 2


def address_space():
    """Bytes of virtual memory of this process: the least in a second, as XLA frees temporaries with a delay."""
    pages = []
    for _ in range(100):
        pages.append(int(Path("/proc/self/statm").read_text().split()[0]))
        time.sleep(0.01)
    return min(pages) * resource.getpagesize()


def large_need(trainer):
    """Bytes that the large microbatch takes in training."""
    (ladder,) = trainer.step.engine.ladders.values()
    (program,) = ladder.programs[LARGE].values()
    return memory.needed(program)


def run(limited):
    rng = np.random.default_rng(0)
    data = {"x": rng.normal(size=(BATCH, LENGTH, 3)), "y": rng.normal(size=BATCH)}
    params = {"in": rng.normal(size=(3, WIDTH)), "out": rng.normal(size=WIDTH) / WIDTH, "words": np.zeros(WORDS)}
    data, params = jax.tree.map(np.float32, (data, params))
    data["word"] = rng.integers(0, WORDS, BATCH).astype(np.int32)
    loss = log_samples(loss_fn, BATCH)
    options = {"batch_size": BATCH, "engine": Chunked(rungs=[SMALL, LARGE]), "controller": "equal", "wait_limit": 60}
    with Trainer(loss, optax.sgd(1e-4, momentum=0.9), **options) as trainer:
        source = numbered(data)
        state, first = trainer.fit(trainer.init(params), source, steps=2)
        before = resource.getrlimit(resource.RLIMIT_AS)
        if limited:
            resource.setrlimit(resource.RLIMIT_AS, (address_space() + large_need(trainer) // 2, before[1]))
        state, rest = trainer.fit(state, source, steps=STEPS - 2)
        resource.setrlimit(resource.RLIMIT_AS, before)
    records = first.records + rest.records
    seen = {**state.params, "words": state.params["words"][data["word"]]}
    return {
        "losses": [record.loss for record in records],
        "samples": [samples_of(record.metrics, BATCH) for record in records],
        "counts": [record.counts_W.tolist() for record in records],
        "params": {name: np.asarray(value).tolist() for name, value in seen.items()},
    }


def main():
    info = initialize(wait_limit=60)
    Ladder._prices = lambda self, rungs: ({rung: 1.0 + rung for rung in rungs}, 0.0)  # large microbatches are cheaper
    handler, messages = logging.Handler(), []
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("hetjax").addHandler(handler)
    try:
        results = {"free": run(False), "limited": run(info.process == 1), "messages": messages}
    except MemoryError:
        traceback.print_exc()
        leave(1, together=False)
    Path(sys.argv[1], f"{info.process}.json").write_text(json.dumps(results))
    leave(0, together=True)


if __name__ == "__main__":
    main()
