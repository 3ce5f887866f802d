"""One node of runs over two processes: node_process.py FOLDER [JOBS]. Writes the result of every job to that folder."""

import json
import logging
import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2] / "support")]

from hetjax.fleet.distributed import initialize, leave  # noqa: E402

info = initialize(start_limit=60, wait_limit=60)

import jax  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from daso_setups import BATCH, SAMPLES, flat, tanh_net  # noqa: E402
from held_exchanges import held_exchanges  # noqa: E402
from sample_log import log_samples, numbered  # noqa: E402
from second_client import second_client  # noqa: E402

from hetjax import Chunked, Simulation, Trainer, checkpoint  # noqa: E402
from hetjax.fleet.agree import Disagreement  # noqa: E402
from hetjax.simulation.speeds import constant  # noqa: E402
from hetjax.sync.daso import Daso  # noqa: E402

OPTIONS = {"warm_up": 1, "cool_down": 1, "stability": 0.9, "max_skip": 4, "wire": "full", "wait": "paper"}
SECOND = second_client()  # before JAX starts
EPOCHS, WORKERS = 6, len(jax.local_devices())


def made(sync, controller="equal", rungs=(1, 8), **options):
    loss_fn, data, params, _ = tanh_net()
    data, params = jax.tree.map(lambda x: x.astype(np.float32), (data, params))
    trainer = Trainer(
        log_samples(loss_fn, SAMPLES), optax.sgd(0.1, momentum=0.5), batch_size=BATCH, controller=controller, sync=sync,
        engine=Chunked(rungs=rungs), **options,
    )  # fmt: skip
    return trainer, numbered(data), trainer.init(params)


def run(sync, epochs=EPOCHS, hook=None, poisoned=None, **options):
    """A whole run: its records, its exchanges, and the parameters at the end."""
    trainer, data, state = made(sync, **options)
    if poisoned is not None:
        data["y"][poisoned] = np.nan
    records = []

    def keep(record, state):
        records.append({
            "step": record.step, "epoch": record.epoch, "loss": record.loss, "counts": record.counts_W.tolist(),
            "metrics": record.metrics,
        })  # fmt: skip
        if hook is not None:
            hook(trainer, record)

    with trainer:
        state, _ = trainer.fit(state, data, epochs=epochs, hooks=[keep])
        tested = trainer.evaluate(state, data)["loss"]
        answer = flat(trainer.answer(state).params).tolist()
    journal = [entry._asdict() for entry in sync.reduce.journal]
    result = {"records": records, "answer": answer, "journal": journal, "cursor": state.cursor, "step": state.step}
    return result | {"tested": tested}


def whole(folder):
    return run(Daso(between="equal", **OPTIONS))


def unlike(folder):
    """The worker of node 1 belongs to another PJRT client: its device is of another kind than those of node 0."""
    return run(Daso(between="equal", **OPTIONS), devices=[None, SECOND[:1]][info.process])


def stopped(folder, requested=5):
    """Node 1 requests the end, which comes while an exchange is pending; both save, and resume in a new trainer."""
    trainer, data, state = made(Daso(between="equal", **OPTIONS))
    with trainer:
        stop = lambda record, state: trainer.stop() if record.step == requested and info.process == 1 else None
        state, first = trainer.fit(state, data, epochs=EPOCHS, hooks=[stop])
        checkpoint.save(folder / f"saved-{requested}", state, trainer)
    trainer, data, fresh = made(Daso(between="equal", **OPTIONS))
    with trainer:
        found = checkpoint.restore_latest(folder / f"saved-{requested}", fresh, trainer)
        pending = "sent" in found.state.more
        state, second = trainer.fit(found.state, data, stop_at=EPOCHS * SAMPLES)
        answer = flat(trainer.answer(state).params).tolist()
    return {"after": found.state.step, "pending": pending, "answer": answer, "losses": first.losses + second.losses}


def stopped_between(folder):
    """The request is sent with the first exchange of an epoch; the end comes two steps later."""
    return stopped(folder, requested=6)


def rejected(folder):
    """The errors that both nodes raise before the first step."""
    messages = []
    for sync, options in (
        (Daso(**OPTIONS), {"seed": info.process}),
        (Daso(nodes=2), {}),
        (Daso(), {"transport": "host"}),
        (Daso(), {"capacity": 1}),
        (Daso(faithful=True), {}),
    ):
        try:
            run(sync, **options)
        except ValueError as error:
            messages.append(str(error))
    return messages


def narrow(folder):
    """Node 1 has a capacity of two samples per step; its equal share would be four."""
    return run(Daso(between="equal", warm_up=0), epochs=1, capacity=[8, 2][info.process])


def apart(folder):
    """Ended within an epoch, with 6 and 2 samples per step: the parameters of this node, and the answer."""
    trainer, data, state = made(Daso(between="equal", warm_up=0), capacity=[8, 2][info.process])
    with trainer:
        state, _ = trainer.fit(state, data, steps=3)
        own = flat([x.addressable_data(0)[0] for x in jax.tree.leaves(state.params)])
        return {"own": own.tolist(), "answer": flat(trainer.answer(state).params).tolist()}


def altered(folder):
    """The state of node 1 is altered in three ways, in a run each: the errors on both nodes."""
    messages = []
    for what in ("schedule", "rates", "counts"):

        def alter(trainer, record, what=what):
            sync = trainer.sync
            again = what == "counts"  # a new plan may replace those of one step before they are compared
            if info.process == 0 or record.step < 8 or (record.step > 8 and not again):
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
            messages.append(str(error))
    return messages


def poisoned(folder):
    """A sample that is not finite, on one of the nodes: the warnings about it."""
    messages, handler = [], logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("hetjax").addHandler(handler)
    run(Daso(between="equal", warm_up=0), epochs=1, poisoned=0, on_nonfinite="skip")
    return [message for message in messages if "NaN" in message]


def overlapping(folder):
    """Exchanges that are held until they are received."""
    with held_exchanges():
        return run(Daso(warm_up=0, cool_down=0, between="equal"), epochs=2)


def paced(folder):
    """Node 1 is half as fast: first the same steps with fewer samples, then fewer steps."""
    speed = [1.0, 0.5][info.process]
    sync = Daso(warm_up=1, cool_down=0, between="steps")
    return run(sync, epochs=3, speeds=Simulation(constant([speed] * WORKERS), row_time=0.05))


def inside(folder):
    """Node 0 has workers of speeds 1 and 1/4, node 1 one of 1/4: samples follow speed between nodes and within."""
    sync = Daso(warm_up=0, cool_down=0)
    speeds = Simulation(constant([1.0, 0.25] if info.process == 0 else [0.25]), row_time=0.04)
    return run(sync, epochs=4, controller="balanced", rungs=(1, 2, 4), speeds=speeds)


def wait_until(condition, limit=30):
    until = time.monotonic() + limit
    while not condition() and time.monotonic() < until:
        time.sleep(0.02)


def straggler(folder):
    """Node 1 pauses until node 0 has entered an exchange without it; which nodes have entered that exchange then."""
    entered = []

    def pause(trainer, record):
        if record.step == 8 and info.process == 1:
            reduce = trainer.sync.reduce
            channel = reduce.exchange.slices.channel
            following = channel.number, channel.round, 0, 0  # the first message of node 0
            wait_until(lambda: following in channel.carrier._mail)
            entered.extend([following in channel.carrier._mail, reduce._pending is not None])

    return run(Daso(between="equal", **OPTIONS), hook=pause) | {"entered": entered}


def timed_out(folder):
    """Node 1 pauses until node 0 has given up on it. The last job, as it leaves exchanges behind."""

    def pause(trainer, record):
        if record.step == 8 and info.process == 1:
            wait_until((folder / "timed_out-0.json").exists)

    try:
        run(Daso(between="equal", wait_limit=1.0, **OPTIONS), hook=pause)
    except TimeoutError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    quick = whole, unlike, stopped, stopped_between, rejected, narrow, apart, altered, poisoned
    jobs = {job.__name__: job for job in (*quick, overlapping, paced, inside, straggler, timed_out)}
    folder, names = Path(sys.argv[1]), sys.argv[2:] or list(jobs)
    for name in names:
        (folder / f"{name}-{info.process}.json").write_text(json.dumps(jobs[name](folder)))
    leave(0, together=True)
