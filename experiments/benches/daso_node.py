"""One node of bench_daso.py: daso_node.py ORDERS. Trains as told in the JSON text ORDERS; process 0 prints the result.

The parameters of every epoch's end are kept and tested afterwards, so that testing takes none of the time measured.
"""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from typing import Any

from hetjax.fleet.distributed import initialize, leave

place = initialize(start_limit=120)

import jax  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402

from hetjax import Chunked  # noqa: E402
from hetjax.adapters.contract import Example  # noqa: E402
from hetjax.data import load  # noqa: E402
from hetjax.data.catalog import synthetic_source  # noqa: E402
from hetjax.devices.fake import devices_of_all  # noqa: E402
from hetjax.sync.allreduce import AllReduce  # noqa: E402
from hetjax.sync.daso import Daso  # noqa: E402
from hetjax.sync.daso.averaging import bytes_sent  # noqa: E402
from hetjax.trainer import Trainer  # noqa: E402
from hetjax.zoo.tasks import classification  # noqa: E402

LAYERS = (784, 1024, 256, 10)  # 1,068,810 parameters


def init_mlp(seed: int) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(seed)
    layer = lambda a, b: {"w": rng.normal(0, (2 / a) ** 0.5, (a, b)).astype(np.float32), "b": np.zeros(b, np.float32)}
    return [layer(*sizes) for sizes in pairwise(LAYERS)]


def loss_fn(params: list[dict[str, jax.Array]], batch: dict[str, jax.Array], keys: jax.Array) -> Example:
    x = batch["image"].reshape(len(batch["image"]), -1)
    for layer in params[:-1]:
        x = jax.nn.relu(x @ layer["w"] + layer["b"])
    score = jax.vmap(classification)(x @ params[-1]["w"] + params[-1]["b"], batch["label"])
    return Example(score.loss, None, {"accuracy": score.correct})


def data(dataset: str, samples: int, tested: int) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    if dataset == "synthetic":
        sizes = {"train": samples, "test": tested}
        sources = [synthetic_source(split, samples=size, noise=1.5) for split, size in sizes.items()]
    else:
        sources = [load(dataset, "train"), load(dataset, "test")]
    first = lambda source, n: jax.tree.map(np.asarray, source[np.arange(min(n, len(source)))])
    return first(sources[0], samples), first(sources[1], tested)


def sync_of(orders: dict[str, Any]) -> Any:
    """The all-reduce of the trainer itself, or over a simulated link that of DASO's blocking phase."""
    if orders["sync"] == "allreduce" and orders["link"] is None:
        return AllReduce()
    if orders["sync"] == "allreduce":
        return Daso(warm_up=orders["epochs"], link=orders["link"])
    return Daso(link=orders["link"], **orders["options"])


def test_of(params: Any, test: dict[str, np.ndarray]) -> dict[str, float]:
    told = jax.jit(loss_fn)(params, test, None)
    return {"loss": float(told.loss_b.mean()), "accuracy": float(told.metrics["accuracy"].mean())}


def main(orders: dict[str, Any]) -> None:
    train, test = data(orders["dataset"], orders["samples"], orders["tested"])
    samples, seed, sync = len(train["label"]), orders["seed"], sync_of(orders)
    trainer = Trainer(
        loss_fn,
        optax.adam(orders["rate"]),
        batch_size=orders["batch"],
        controller="balanced",
        sync=sync,
        devices=devices_of_all(1),  # the other one carries the exchanges
        seed=seed,
        engine=Chunked(rungs=[8, 32, 128, 256]),
    )
    seconds, held = [], []

    def keep(record: Any, state: Any) -> None:
        if state.cursor % samples == 0:
            seconds.append(record.seconds)
            one = lambda x: np.array(x.addressable_data(0))[0 if state.replicas else ...]
            held.append(jax.tree.map(one, state.params))

    with trainer:
        state, _ = trainer.fit(trainer.init(init_mlp(seed)), train, epochs=orders["epochs"], hooks=[keep])
        steps = int(state.step)
    if place.first:
        blocking = lambda e: not isinstance(sync, Daso) or sync.schedule.blocking(e)
        starts = [0.0, *seconds[:-1]]
        epochs = [
            {"seconds": end - start, "until": end, "blocking": blocking(e), **test_of(params, test)}
            for e, (start, end, params) in enumerate(zip(starts, seconds, held, strict=True))
        ]
        journal = [entry._asdict() for entry in sync.reduce.journal] if isinstance(sync, Daso) else []
        exchanges, size = len(journal), sum(entry["bytes"] for entry in journal)
        if not isinstance(sync, Daso):  # gradients, in every step
            exchanges, size = steps, steps * bytes_sent("total", jax.tree.leaves(held[0]), jax.process_count())
        told = {"epochs": epochs, "journal": journal, "exchanges": exchanges, "bytes": size}
        print("result", json.dumps(told), flush=True)
    leave(0, together=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
