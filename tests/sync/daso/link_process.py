"""One node of a run over a real link: link_process.py SPEC, with SPEC in JSON. Process 0 prints its journal.

Started by bench_daso.run_once; the model is daso_node's, with 1,068,810 parameters.
"""

import json
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[3] / "experiments")]

from benches.daso_node import data, init_mlp, loss_fn, info  # noqa: E402, I001  joins the others before JAX starts

import optax  # noqa: E402
from held_exchanges import held_exchanges  # noqa: E402

from hetjax import Chunked, Trainer  # noqa: E402
from hetjax.devices.chosen import chosen_devices  # noqa: E402
from hetjax.fleet.distributed import leave  # noqa: E402
from hetjax.sync.daso import Daso  # noqa: E402


def main(spec):
    train, _ = data("synthetic", spec["batch"] * spec["steps"], 1)
    sync = Daso(warm_up=0, cool_down=0, max_skip=spec["skip"], between="equal", wait="paper")
    trainer = Trainer(
        loss_fn, optax.sgd(1e-3), batch_size=spec["batch"], controller="equal", sync=sync,
        devices=chosen_devices(1), engine=Chunked(rungs=[spec["batch"] // 2]),
    )  # fmt: skip

    def set_schedule(record, state):
        if record.step == 1:  # as late in training: rare exchanges, received many steps later
            sync.schedule.skip, sync.schedule.wait = spec["skip"], spec["wait"]

    with trainer, held_exchanges():
        trainer.fit(trainer.init(init_mlp(0)), train, epochs=1, hooks=[set_schedule])
    if info.first:
        journal = [entry._asdict() for entry in sync.reduce.journal]
        print("result", json.dumps({"journal": journal}), flush=True)
    leave(0, together=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
