"""Exchanges between processes in fewer bits and with delay, over the processes of the launcher: CASE FOLDER.

    cut       a loss that is linear in the parameters: the sum of all gradients is known, so nothing may be lost
    delay     delayed updates, and a run resumed from a state in between
    resumed   a run in 8 bits, resumed in the same format and in float32
    refused   options that do not go together

Every process writes its results as JSON.
"""

import json
import os
import sys
from pathlib import Path
from unittest.mock import patch

import numpy as np

SEED = 5
WIDTH = 700  # not a multiple of a block
SIZES = [32, 32, 20, 32, 32, 8, 32, 32, 32, 20, 32, 32]  # samples of each step
LAST = 7  # first step without samples in process 1
SAVED = 5  # number of steps before a state is made
RATE = 0.05


def batches():
    rng = np.random.default_rng(SEED)
    whole = {"x": rng.normal(size=(32, 6)).astype(np.float32), "y": rng.normal(size=32).astype(np.float32)}
    whole["wide"] = (rng.normal(size=(32, WIDTH)) * np.exp(rng.normal(size=WIDTH))).astype(np.float32)
    turn = lambda n: {name: np.roll(rows, 3 * n, axis=0) for name, rows in whole.items()}
    return [{name: rows[:size] for name, rows in turn(n).items()} for n, size in enumerate(SIZES)]


def controller():
    """Process 1 has no samples from step LAST on."""
    from problems import RandomPlans

    from hetjax.planning.controllers.base import Plan

    class Leaving(RandomPlans):
        planned = 0

        def plan(self, batch, limits, epoch=0):
            counts_W = np.zeros(limits.workers, np.int64)
            counts_W[1] = batch // 4 if self.planned < LAST else 0
            counts_W[2:] = batch // 4
            counts_W[0] = batch - counts_W.sum()
            self.planned += 1
            return Plan(counts_W)

        def state_dict(self):
            return {}

    return Leaving(SEED)


def stepped(loss_fn, optimizer, params, saved_after=None, **options):
    """The whole states after `saved_after` and all steps, and the losses."""
    import hetjax

    found, losses = {}, []
    given = {"controller": controller(), "engine": hetjax.Chunked(rungs=[4, 16]), "wait_limit": 60, **options}
    with hetjax.Step(loss_fn, optimizer, batch_size=32, **given) as step:
        state = step.init(params)
        for n, batch in enumerate(batches()):
            if n == saved_after:
                found["saved"] = step.export(state)
            state, record = step(state, batch)
            losses += [] if record is None else [record.loss]
        losses.append(step.flush().loss)
        found["end"] = step.export(state)
    return found, losses


def cut(info):
    """The parameters of all processes, and what was left over, in every format."""
    import optax

    from hetjax.reduce import slices

    linear = lambda params, batch, keys: batch["wide"] @ params["w"] + batch["x"][:, 0] * params["b"]
    params = {"w": np.zeros(WIDTH, np.float32), "b": np.ones((), np.float32)}
    results = {}
    for wire in ("bfloat16", "int8", "auto"):
        with patch.object(slices, "_SMALLEST", 128):
            found, _ = stepped(linear, optax.sgd(RATE), params, SAVED, wire=wire)
        results[wire] = {name: plain_state(state) for name, state in found.items()}
    return results


def plain_state(state):
    left_over = (state.more or {}).get("left_over") or {"sums": [], "differences": []}
    plain = lambda tree: [np.asarray(tree[name], np.float64).ravel().tolist() for name in sorted(tree)]
    as_lists = {name: [np.asarray(leaf, np.float64).ravel().tolist() for leaf in tree]
                for name, tree in left_over.items()}  # fmt: skip
    return {"params": plain(state.params), **as_lists, "bits": [x.hex() for x in plain(state.params)[-1]]}


def resumed(info):
    """A run in int8 whose state is given to another step, in the same format and in float32."""
    import optax

    import hetjax

    linear = lambda params, batch, keys: batch["wide"] @ params["w"] + batch["x"][:, 0] * params["b"]
    params = {"w": np.zeros(WIDTH, np.float32), "b": np.ones((), np.float32)}
    saved = stepped(linear, optax.sgd(RATE), params, SAVED, wire="int8")[0]["saved"]
    results = {"saved": plain_state(saved)}
    for wire in ("int8", "float32"):
        with hetjax.Step(linear, optax.sgd(RATE), batch_size=32, controller="equal", wire=wire) as step:
            state, _ = step(saved, batches()[0])
            results[wire] = plain_state(step.export(state))
    return results


def delay(info):
    import optax

    import hetjax

    squared = lambda params, batch, keys: (batch["x"] @ params["w"] - batch["y"]) ** 2
    params = {"w": np.zeros(6, np.float32)}
    optimizer = optax.sgd(RATE, momentum=0.9)
    found, losses = stepped(squared, optimizer, params, SAVED, delay=1)
    with hetjax.Step(squared, optimizer, batch_size=32, controller="equal", delay=1) as step:
        state = found["saved"]
        for batch in batches()[SAVED:]:
            state, _ = step(state, batch)
        found["resumed"] = step.export(state)
    return {"params": {name: np.asarray(state.params["w"]).tolist() for name, state in found.items()}, "losses": losses}


def refused(info):
    """What is said about options that do not go together."""
    import optax

    import hetjax

    found = []
    for options in (
        {"wire": "float16"}, {"wire": "int8", "update": "replicated"}, {"delay": 1, "update": "replicated"},
        {"delay": 2}, {"wire": "int8", "sync": "decentralized"}, {"delay": 1, "sync": "daso"},
    ):  # fmt: skip
        try:
            hetjax.Step(lambda p, b, k: b["x"] @ p, optax.sgd(RATE), batch_size=8, **options)
            found.append("")
        except ValueError as error:
            found.append(str(error))
    return found


def main():
    case, folder = sys.argv[1:]
    if os.environ.get("HETJAX_PROCESS") == "1":  # rounds otherwise
        os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_cpu_max_isa=AVX"
    import jax

    from hetjax.fleet.distributed import initialize, leave

    jax.config.update("jax_num_cpu_devices", 1)
    info = initialize(wait_limit=60, heartbeat_limit=10)
    result = {"cut": cut, "resumed": resumed, "delay": delay, "refused": refused}[case](info)
    Path(folder, f"{info.process}.json").write_text(json.dumps(result))
    leave(0, together=True)


if __name__ == "__main__":
    main()
