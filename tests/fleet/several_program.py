"""The core over the processes of the launcher: several_program.py DEVICES FOLDER [MISTAKE].

Random plans (the same in all processes) with each engine, once with sums too large to be sent by everybody to
everybody, and once unequal shares that stay; every process writes what it saw and which samples it read.
MISTAKE: 'plan', process 1 plans step 3 otherwise; 'start', it starts from other parameters; 'optimizer', with another
momentum; 'end', it wants to train for longer.
"""

import json
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np

STEPS, SEED = 14, 11


def runs(devices, mistake=None, process=0):
    """Losses and the final parameters of each run, and the samples that were read."""
    import jax
    from problems import RandomPlans
    from tiny_problem import trainer_for

    from hetjax import Chunked
    from hetjax.planning.controllers.base import Plan
    from hetjax.reduce import transports

    class Odd(RandomPlans):
        def plan(self, batch, limits, epoch=0):
            plan = super().plan(batch, limits, epoch)
            self.planned = getattr(self, "planned", 0) + 1
            if mistake == "plan" and process == 1 and self.planned == 4:
                plan.counts_W[:] = plan.counts_W[::-1].copy() if len(set(plan.counts_W)) > 1 else [batch, *[0] * 3]
            return plan

        def state_dict(self):
            return {}

    class Steady(Odd):
        def plan(self, batch, limits, epoch=0):
            shares_W = np.arange(1, limits.workers + 1)
            counts_W = batch * shares_W // shares_W.sum()
            counts_W[-1] += batch - counts_W.sum()
            return Plan(counts_W)

    found = {}
    for name in ("chunked", "looped", "masked", "large", "steady"):
        engine = {"chunked": Chunked(rungs=[4, 16]), "masked": "masked"}.get(name, "looped")
        controller = Steady(SEED) if name == "steady" else Odd(SEED)
        trainer, source, state = trainer_for(
            devices, controller=controller, engine=engine, wait_limit=60,
        )  # fmt: skip
        if mistake == "start" and process == 1:
            state = trainer.init({name: value + 1 for name, value in state.params.items()})
        if mistake == "optimizer" and process == 1:
            state = replace(state, opt_state=jax.tree.map(lambda x: x + 1, state.opt_state))
        read, steps = Reads(source), STEPS + (mistake == "end" and process == 1)
        limit = patch.object(transports, "_AT_ONCE", 0) if name == "large" else nullcontext()
        with trainer, limit:
            state, history = trainer.fit(state, read, steps=steps)
            tested = trainer.evaluate(state, source)
        params = {key: np.asarray(value).tolist() for key, value in state.params.items()}
        counts = history.counts[:, list(trainer.workers.local)].sum(axis=1).tolist()
        found[name] = {
            "losses": history.losses, "tested": tested["loss"], "params": params, "own": counts, "read": read.log,
            "recompiles": history.recompiles_after_warmup,
        }  # fmt: skip
    return found


class Reads:
    """A source in memory that notes which rows were asked for."""

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

    per_process, folder, *mistake = sys.argv[1:]
    jax.config.update("jax_num_cpu_devices", int(per_process))
    place = initialize(wait_limit=60, heartbeat_limit=10)
    try:
        found = runs(None, *mistake, process=place.process)
    except (ValueError, RuntimeError) as error:
        print("error:", error, flush=True)
        leave(3, together=False)
    Path(folder, f"{place.process}.json").write_text(json.dumps(found))
    leave(0, together=True)


if __name__ == "__main__":
    main()
