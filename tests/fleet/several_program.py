"""Training over the processes of the launcher: several_program.py DEVICES FOLDER [MISTAKE ...].

Random plans, the same in all processes, with each engine; once with sums too large for one all-to-all; once with
constant unequal shares. Every process writes its results and the samples it read.

With mistakes, process 1 deviates instead: it trains for longer, starts from other parameters, from another momentum, or
plans step 3 differently. The errors of all processes are printed; the last one ends the program with exit code 3.
"""

import json
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np

STEPS, SEED = 14, 11
MISTAKES = ("end", "start", "optimizer", "plan")  # the last one is found within a step
RUNS = ("chunked", "looped", "masked", "large", "steady")


def run(name, devices, mistake=None):
    """Losses and final parameters of one run, and the samples that were read; `mistake`: made by this process."""
    import jax
    from problems import RandomPlans
    from tiny_problem import trainer_for

    from hetjax import Chunked
    from hetjax.planning.controllers.base import Plan
    from hetjax.reduce import transports

    def outputs(params, batch, keys):
        noise = jax.vmap(jax.random.normal)(keys)
        return {"number": batch["number"], "sum": batch["x"] @ params["w"], "noise": noise}

    class Random(RandomPlans):
        planned = 0

        def plan(self, batch, limits, epoch=0):
            plan = super().plan(batch, limits, epoch)
            self.planned += 1
            if mistake == "plan" and self.planned == 4:
                plan.counts_W[:] = plan.counts_W[::-1].copy() if len(set(plan.counts_W)) > 1 else [batch, *[0] * 3]
            return plan

        def state_dict(self):
            return {}

    class Steady(Random):
        def plan(self, batch, limits, epoch=0):
            shares_W = np.arange(1, limits.workers + 1)
            counts_W = batch * shares_W // shares_W.sum()
            counts_W[-1] += batch - counts_W.sum()
            return Plan(counts_W)

    engine = {"chunked": Chunked(rungs=[4, 16]), "masked": "masked"}.get(name, "looped")
    controller = Steady(SEED) if name == "steady" else Random(SEED)
    options = {"controller": controller, "engine": engine, "predict_fn": outputs, "wait_limit": 60}
    trainer, source, state = trainer_for(devices, **options)
    if mistake == "start":
        state = trainer.init({name: value + 1 for name, value in state.params.items()})
    if mistake == "optimizer":
        state = replace(state, opt_state=jax.tree.map(lambda x: x + 1, state.opt_state))
    recorded = RecordedSource(source)
    limit = patch.object(transports, "_AT_ONCE", 0) if name == "large" else nullcontext()
    with trainer, limit:
        state, history = trainer.fit(state, recorded, steps=STEPS + (mistake == "end"))
        tested = trainer.evaluate(state, source)
        predicted = trainer.predict(state, source)
    return {
        "losses": history.losses,
        "tested": tested["loss"],
        "predicted": {key: values.tolist() for key, values in predicted.items()},
        "params": {key: np.asarray(value).tolist() for key, value in state.params.items()},
        "own": history.counts[:, list(trainer.workers.local)].sum(axis=1).tolist(),
        "read": recorded.log,
        "recompiles": history.recompiles_after_warmup,
    }


class RecordedSource:
    """A source in memory that records which rows were read."""

    def __init__(self, data):
        self.data, self.log = data, []

    def __len__(self):
        return len(self.data["number"])

    def __getitem__(self, index):
        rows = {name: values[index] for name, values in self.data.items()}
        self.log += np.atleast_1d(rows["number"]).tolist()
        return rows


def main():
    import jax

    from hetjax.fleet.distributed import initialize, leave

    per_process, folder, *mistakes = sys.argv[1:]
    jax.config.update("jax_num_cpu_devices", int(per_process))
    info = initialize(wait_limit=60, heartbeat_limit=10)
    for mistake in mistakes:
        try:
            run("chunked", None, mistake if info.process == 1 else None)
        except (ValueError, RuntimeError) as error:
            print(f"{mistake}: {error}", flush=True)
            if mistake == mistakes[-1]:
                leave(3, together=False)
    results = {name: run(name, None) for name in RUNS}
    Path(folder, f"{info.process}.json").write_text(json.dumps(results))
    leave(0, together=True)


if __name__ == "__main__":
    main()
