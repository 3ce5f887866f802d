"""One node of bench_daso.py: daso_node.py SPEC trains one run as specified in JSON; process 0 prints its result.

The parameters at the end of every epoch are kept and tested after the run, so that testing is not part of its time.
"""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from typing import Any

from hetjax.fleet.distributed import initialize, leave

info = initialize(start_limit=120)

import jax  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402

from hetjax import Chunked, processes  # noqa: E402
from hetjax.adapters.contract import Example  # noqa: E402
from hetjax.data import load  # noqa: E402
from hetjax.data.catalog import synthetic_source  # noqa: E402
from hetjax.devices.chosen import chosen_devices  # noqa: E402
from hetjax.planning import controllers  # noqa: E402
from hetjax.reduce.wire import BLOCK  # noqa: E402
from hetjax.sync.allreduce import AllReduce  # noqa: E402
from hetjax.sync.daso import Daso  # noqa: E402
from hetjax.sync.daso.averaging import bytes_sent  # noqa: E402
from hetjax.trainer import Trainer  # noqa: E402
from hetjax.zoo.tasks import classification  # noqa: E402

WORKERS = 2  # of a node
BITS = {"float32": 32, "bfloat16": 16, "int8": 8 + 32 / BLOCK}  # a parameter on the wire, with its part of a scale
LAYERS = (784, 1024, 256, 10)  # 1,068,810 parameters


def init_mlp(seed: int) -> list[dict[str, np.ndarray]]:
    """Initial parameters (He normal)."""
    rng = np.random.default_rng(seed)
    layer = lambda a, b: {"w": rng.normal(0, (2 / a) ** 0.5, (a, b)).astype(np.float32), "b": np.zeros(b, np.float32)}
    return [layer(*sizes) for sizes in pairwise(LAYERS)]


def loss_fn(params: list[dict[str, jax.Array]], batch: dict[str, jax.Array], keys: jax.Array) -> Example:
    """Cross-entropy and accuracy of the MLP."""
    x = batch["image"].reshape(len(batch["image"]), -1)
    for layer in params[:-1]:
        x = jax.nn.relu(x @ layer["w"] + layer["b"])
    score = jax.vmap(classification)(x @ params[-1]["w"] + params[-1]["b"], batch["label"])
    return Example(score.loss, None, {"accuracy": score.correct})


def data(dataset: str, samples: int, tested: int) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """The first samples of the training and the test data, in memory."""
    if dataset == "synthetic":
        sizes = {"train": samples, "test": tested}
        sources = [synthetic_source(split, samples=size, noise=1.5) for split, size in sizes.items()]
    else:
        sources = [load(dataset, "train"), load(dataset, "test")]
    first = lambda source, n: jax.tree.map(np.asarray, source[np.arange(min(n, len(source)))])
    return first(sources[0], samples), first(sources[1], tested)


def make_sync(spec: dict[str, Any]) -> Any:
    """DASO, or all-reduce: in 16 bits and on a simulated link as DASO's blocking phase, which knows of both."""
    if spec["sync"] == "allreduce" and spec["link"] is None:
        return AllReduce()
    if spec["sync"] in ("allreduce", "allreduce-16"):
        wire = "bfloat16" if spec["sync"] == "allreduce-16" else "full"
        return Daso(warm_up=spec["epochs"], link=spec["link"], gradient_wire=wire)
    return Daso(link=spec["link"], **spec["options"])


def make_trainer(spec: dict[str, Any], sync: Any) -> Trainer:
    """The trainer of a node, as in the paper: SGD with momentum, several workers; no node leaves the exchange."""
    controller = controllers.make("equal" if isinstance(sync, Daso) and sync.config.faithful else "balanced")
    controller.benches = False  # type: ignore[misc]  # behind a slow link one node alone may be the quickest
    return Trainer(
        loss_fn,
        optax.sgd(spec["rate"], momentum=0.9),
        batch_size=spec["batch"],
        controller=controller,
        sync=sync,
        devices=chosen_devices(WORKERS),
        seed=spec["seed"],
        engine=Chunked(rungs=[8, 32, 128, 256]),
        **(spec["options"] if isinstance(sync, AllReduce) else {}),
    )


def evaluate(params: Any, test: dict[str, np.ndarray]) -> dict[str, float]:
    """Test loss and accuracy."""
    example = jax.jit(loss_fn)(params, test, None)
    return {"loss": float(example.loss_b.mean()), "accuracy": float(example.metrics["accuracy"].mean())}


def main(spec: dict[str, Any]) -> None:
    """Train and print `result` with a JSON object: epochs, journal, exchanges, bytes."""
    train, test = data(spec["dataset"], spec["samples"], spec["tested"])
    samples, seed, sync = len(train["label"]), spec["seed"], make_sync(spec)
    trainer = make_trainer(spec, sync)
    seconds, snapshots = [], []

    def keep(record: Any, state: Any) -> None:
        if state.cursor % samples == 0:
            seconds.append(record.seconds)
            one = lambda x: np.array(x.addressable_data(0)[0] if state.replicas else x)
            snapshots.append(jax.tree.map(one, state.params))

    with trainer:
        state, history = trainer.fit(trainer.init(init_mlp(seed)), train, epochs=spec["epochs"], hooks=[keep])
        steps = int(state.step)
    if info.first:
        blocking = lambda e: not isinstance(sync, Daso) or sync.schedule.blocking(e)
        starts = [0.0, *seconds[:-1]]
        epochs = [
            {"seconds": end - start, "until": end, "blocking": blocking(e), **evaluate(params, test)}
            for e, (start, end, params) in enumerate(zip(starts, seconds, snapshots, strict=True))
        ]
        journal = [record._asdict() for record in sync.reduce.journal] if isinstance(sync, Daso) else []
        exchanges, size = len(journal), sum(record["bytes"] for record in journal)
        if not isinstance(sync, Daso):  # one all-reduce of gradients per step
            exact = bytes_sent("total", jax.tree.leaves(snapshots[0]), processes.count())
            size, exchanges = int(steps * exact * BITS[history.more.get("wire", "float32")] / 32), steps
        result = {"epochs": epochs, "journal": journal, "exchanges": exchanges, "bytes": size}
        result |= {"wire": history.more["wire"]} if "wire" in history.more else {}
        print("result", json.dumps(result), flush=True)
    leave(0, together=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
