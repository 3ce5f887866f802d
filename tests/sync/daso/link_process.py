"""One node of a run over a real link, as a program: link_process.py ORDERS. Process 0 prints when its steps ended, and
its journal. bench_daso.run_once starts it; the model is daso_node's, with 1,068,810 parameters."""

import json
import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[3] / "experiments")]

from benches.daso_node import data, init_mlp, loss_fn, place  # noqa: E402, I001  which joins the others before JAX starts

import optax  # noqa: E402

from hetjax import Chunked, Trainer  # noqa: E402
from hetjax.devices.fake import devices_of_all  # noqa: E402
from hetjax.fleet.distributed import leave  # noqa: E402
from hetjax.sync.daso import Daso  # noqa: E402


def main(orders):
    train, _ = data("synthetic", orders["batch"] * orders["steps"], 1)
    sync = Daso(warm_up=0, cool_down=0, max_skip=orders["skip"], between="equal", wait="paper")
    trainer = Trainer(
        loss_fn, optax.sgd(1e-3), batch_size=orders["batch"], controller="equal", sync=sync,
        devices=devices_of_all(1), engine=Chunked(rungs=[orders["batch"] // 2]),
    )  # fmt: skip
    ended = []

    def look(record, state):
        ended.append(time.perf_counter())
        if len(ended) == 1:  # as in a run that is far along: seldom, and received late
            sync.schedule.skip, sync.schedule.wait = orders["skip"], orders["wait"]

    with trainer:
        trainer.fit(trainer.init(init_mlp(0)), train, epochs=1, hooks=[look])
    if place.first:
        journal = [entry._asdict() for entry in sync.reduce.journal]
        print("result", json.dumps({"ended": ended, "journal": journal}), flush=True)
    leave(0, together=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
