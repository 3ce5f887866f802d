"""One node of runs over two processes, as a program: node_process.py FOLDER. What it saw goes there."""

import json
import logging
import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2] / "support")]

from hetjax.fleet.distributed import initialize, leave  # noqa: E402

place = initialize(start_limit=60, wait_limit=60)

import jax  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from daso_setups import BATCH, SAMPLES, flat, tanh_net  # noqa: E402
from sample_log import numbered, telling  # noqa: E402

from hetjax import Chunked, Simulation, Trainer, checkpoint  # noqa: E402
from hetjax.fleet.agree import Disagreement  # noqa: E402
from hetjax.simulation.speeds import constant  # noqa: E402
from hetjax.sync.daso import Daso  # noqa: E402

OPTIONS = {"warm_up": 1, "cool_down": 1, "stability": 0.9, "max_skip": 4, "wire": "full", "wait": "paper"}
EPOCHS, WORKERS = 6, len(jax.local_devices()) - 1  # a device carries the exchanges
BYTES = 15 * 2  # of the network's parameters, in 16 bits, between two nodes


def made(sync, controller="equal", rungs=(1, 8), **options):
    loss_fn, data, params, _ = tanh_net()
    data, params = jax.tree.map(lambda x: x.astype(np.float32), (data, params))
    trainer = Trainer(
        telling(loss_fn, SAMPLES), optax.sgd(0.1, momentum=0.5), batch_size=BATCH, controller=controller, sync=sync,
        engine=Chunked(rungs=rungs), **options,
    )  # fmt: skip
    return trainer, numbered(data), trainer.init(params)


def run(sync, epochs=EPOCHS, hook=None, poisoned=None, **options):
    """A whole run: what its records say, and the parameters at the end."""
    trainer, data, state = made(sync, **options)
    if poisoned is not None:
        data["y"][poisoned] = np.nan
    records = []

    def tell(record, state):
        records.append({
            "step": record.step, "epoch": record.epoch, "loss": record.loss, "counts": record.counts_W.tolist(),
            "metrics": record.metrics,
        })  # fmt: skip
        if hook is not None:
            hook(trainer, record)

    with trainer:
        state, _ = trainer.fit(state, data, epochs=epochs, hooks=[tell])
        tested = trainer.evaluate(state, data)["loss"]
        answer = flat(trainer.answer(state).params).tolist()
    journal = [entry._asdict() for entry in sync.reduce.journal]
    found = {"records": records, "answer": answer, "journal": journal, "cursor": state.cursor, "step": state.step}
    return found | {"tested": tested}


def whole(folder):
    return run(Daso(between="equal", **OPTIONS))


def stopped(folder, asked=5):
    """Node 1 asks for the end, which comes while an exchange is under way; both save, and go on in a new trainer."""
    trainer, data, state = made(Daso(between="equal", **OPTIONS))
    with trainer:
        ask = lambda record, state: trainer.stop() if record.step == asked and place.process == 1 else None
        state, first = trainer.fit(state, data, epochs=EPOCHS, hooks=[ask])
        checkpoint.save(folder / f"saved-{asked}", state, trainer)
    trainer, data, fresh = made(Daso(between="equal", **OPTIONS))
    with trainer:
        found = checkpoint.restore_latest(folder / f"saved-{asked}", fresh, trainer)
        pending = "sent" in found.state.more
        state, second = trainer.fit(found.state, data, stop_at=EPOCHS * SAMPLES)
        answer = flat(trainer.answer(state).params).tolist()
    return {"after": found.state.step, "pending": pending, "answer": answer, "losses": first.losses + second.losses}


def stopped_between(folder):
    """The wish goes along with the first exchange of an epoch; the end comes two steps later."""
    return stopped(folder, asked=6)


def refused(folder):
    """What both nodes are told before the first step."""
    last = {device.process_index: device for device in jax.devices()}
    told = []
    for sync, options in (
        (Daso(**OPTIONS), {"seed": place.process}),
        (Daso(nodes=2), {}),
        (Daso(), {"devices": list(last.values())}),
        (Daso(), {"capacity": 1}),
    ):
        try:
            run(sync, **options)
        except ValueError as error:
            told.append(str(error))
    return told


def narrow(folder):
    """Node 1 can take two samples a step, and would get four."""
    return run(Daso(between="equal", warm_up=0), epochs=1, capacity=[8, 2][place.process])


def apart(folder):
    """Ended inside an epoch, with 6 and 2 samples a step: what this node holds, and what is made of both."""
    trainer, data, state = made(Daso(between="equal", warm_up=0), capacity=[8, 2][place.process])
    with trainer:
        state, _ = trainer.fit(state, data, steps=3)
        own = flat([x.addressable_data(0)[0] for x in jax.tree.leaves(state.params)])
        return {"own": own.tolist(), "answer": flat(trainer.answer(state).params).tolist()}


def altered(folder):
    """Node 1 forgets where it is, in three ways, each in a run of its own: what both are told then."""
    told = []
    for what in ("schedule", "rates", "counts"):

        def alter(trainer, record, what=what):
            sync = trainer.sync
            if place.process == 0 or record.step != 8:
                return
            if what == "schedule":
                sync.schedule.plateau.bad += 1
            elif what == "rates":
                sync.sharing.rate_N[1] *= 1.01
            else:
                sync.sharing.controller.state.counts_W = sync.sharing.controller.state.counts_W[::-1] + np.array(
                    [1, -1]
                )

        try:
            run(Daso(**OPTIONS), hook=alter, speeds=Simulation(constant([1.0] * WORKERS), row_time=0.002))
        except Disagreement as error:
            told.append(str(error))
    return told


def poisoned(folder):
    """A sample that is not finite, for one of the nodes."""
    said, handler = [], logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("hetjax").addHandler(handler)
    run(Daso(between="equal", warm_up=0), epochs=1, poisoned=0, on_nonfinite="skip")
    return [text for text in said if "NaN" in text]


def overlapping(folder):
    """Steps of 40 ms and more; exchanges that a simulated link makes last longer than several of them."""
    sync = Daso(warm_up=0, cool_down=0, between="equal", link=8 * BYTES / 0.3)
    return run(sync, epochs=2, speeds=Simulation(constant([1] * WORKERS), row_time=0.02))


def paced(folder):
    """Node 1 is half as fast: first the same steps with other samples, then steps in proportion."""
    speed = [1.0, 0.5][place.process]
    sync = Daso(warm_up=1, cool_down=0, between="steps")
    return run(sync, epochs=3, speeds=Simulation(constant([speed] * WORKERS), row_time=0.02))


def inside(folder):
    """Node 0 has workers of speeds 1 and 1/4, node 1 one of 1/4: samples between the nodes and in them by speed."""
    sync = Daso(warm_up=0, cool_down=0)
    speeds = Simulation(constant([1.0, 0.25] if place.process == 0 else [0.25]), row_time=0.02)
    return run(sync, epochs=4, controller="balanced", rungs=(1, 2, 4), speeds=speeds)


def late(folder):
    """Node 1 stands still for a while."""
    pause = lambda trainer, record: time.sleep(1.5) if record.step == 8 and place.process == 1 else None
    return run(Daso(between="equal", **OPTIONS), hook=pause)


def lost(folder):
    """Node 1 stands still for longer than anybody waits. Comes last, as it leaves exchanges behind."""
    pause = lambda trainer, record: time.sleep(4) if record.step == 8 and place.process == 1 else None
    try:
        run(Daso(between="equal", wait_limit=1.0, **OPTIONS), hook=pause)
    except TimeoutError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    quick = whole, stopped, stopped_between, refused, narrow, apart, altered, poisoned
    for job in (*quick, overlapping, paced, inside, late, lost):
        result = job(folder)
        (folder / f"{job.__name__}-{place.process}.json").write_text(json.dumps(result))
    other = folder / f"{lost.__name__}-{1 - place.process}.json"
    until = time.monotonic() + 30
    while not other.exists() and time.monotonic() < until:  # whoever left first would end the other
        time.sleep(0.05)
    leave(0, together=False)
