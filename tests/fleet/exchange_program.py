"""Exchanges between processes in fewer bits and with delay, over the processes of the launcher: CASE FOLDER.

    cut       a loss that is linear in the parameters: the sum of all gradients is known, so nothing may be lost
    benched   the linear loss in 8 bits on two processes, of which one after the other sits on the bench
    skipped   the linear loss with a step that is not finite, in float32 and in 8 bits
    delay     delayed updates, and a run resumed from a state in between
    resumed   a run in 8 bits, resumed in the same format, in float32, and where 'auto' chooses float32
    double    a model in float64, and what the history says of the numbers between processes
    refused   options that do not go together

Every process writes its results as JSON.
"""

import json
import os
import sys
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import numpy as np

SEED = 5
WIDTH = 700  # not a multiple of a block
SIZES = [32, 32, 20, 32, 32, 8, 32, 32, 32, 20, 32, 32]  # samples of each step
LAST = 7  # first step without samples in process 1
BAD = 3  # the step that is not finite
SAVED = 5  # number of steps before a state is made
RATE = 0.05
PHASES = ("copy", "cut", "send", "meet", "receive", "add", "check", "update", "return", "gather", "store")


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


def stepped(loss_fn, optimizer, params, saved_after=None, rows=None, **options):
    """The whole states after `saved_after` and all steps, and the losses."""
    import hetjax

    found, losses = {}, []
    given = {"controller": controller(), "engine": hetjax.Chunked(rungs=[4, 16]), "wait_limit": 60, **options}
    with hetjax.Step(loss_fn, optimizer, batch_size=32, **given) as step:
        state = step.init(params)
        for n, batch in enumerate(batches() if rows is None else rows):
            if n == saved_after:
                found["saved"] = step.export(state)
            state, record = step(state, batch)
            losses += [] if record is None else [record.loss]
        losses.append(step.flush().loss)
        found["end"] = step.export(state)
    return found, losses


@contextmanager
def phases_apart():
    """Check that no phase of the exchange lies within another one, or it would count twice; the names of all."""
    from hetjax import profiling

    class Phase(profiling.phase):
        def __enter__(self):
            assert not (self._name in PHASES and within), f"{self._name} within {within}"
            seen.add(self._name)
            if self._name in PHASES:
                within.append(self._name)
            return super().__enter__()

        def __exit__(self, *error):
            if self._name in PHASES:
                within.pop()
            return super().__exit__(*error)

    within, seen = [], set()
    with patch.object(profiling, "phase", Phase):
        yield seen


def cut(info):
    """The parameters of all processes, and what was left over, in every format."""
    import optax

    from hetjax.reduce import slices

    linear = lambda params, batch, keys: batch["wide"] @ params["w"] + batch["x"][:, 0] * params["b"]
    params = {"w": np.zeros(WIDTH, np.float32), "b": np.ones((), np.float32)}
    results = {}
    for wire in ("bfloat16", "int8", "auto"):
        with patch.object(slices, "_SMALLEST", 128), phases_apart() as seen:
            found, _ = stepped(linear, optax.sgd(RATE), params, SAVED, wire=wire)
        assert wire == "auto" or "cut" in seen
        results[wire] = {name: plain_state(state) for name, state in found.items()}
    return results


def plain_state(state):
    left_over = (state.more or {}).get("left_over") or {"sums": [], "differences": []}
    plain = lambda tree: [np.asarray(tree[name], np.float64).ravel().tolist() for name in sorted(tree)]
    as_lists = {name: [np.asarray(leaf, np.float64).ravel().tolist() for leaf in tree]
                for name, tree in left_over.items()}  # fmt: skip
    return {"params": plain(state.params), **as_lists, "bits": [x.hex() for x in plain(state.params)[-1]]}


def benched(info):
    """What was left over, the owners and what this process holds after every step; and the states."""
    import optax
    from problems import RandomPlans

    from hetjax.planning.controllers.base import Plan
    from hetjax.reduce import sharded, slices
    from hetjax.reduce.cut import HostCut

    class Benching(RandomPlans):
        planned = 0

        def plan(self, batch, limits, epoch=0):
            out = {1: 1, 3: 0}.get(self.planned // 2)
            self.planned += 1
            if out is None:
                return Plan(np.array([batch // 2, batch - batch // 2]))
            return Plan(np.where(np.arange(2) == out, 0, batch), benched_W=np.arange(2) == out)

        def state_dict(self):
            return {}

    linear = lambda params, batch, keys: batch["wide"] @ params["w"] + batch["x"][:, 0] * params["b"]
    params = {"w": np.zeros(WIDTH, np.float32), "b": np.ones((), np.float32)}
    kept, owners, end, hand_over = [], [], HostCut._end, HostCut.hand_over

    def ended(self, step, applied):
        end(self, step, applied)
        kept.append(len(self.cut.left))

    def handed_over(self, core, share_P):
        core = hand_over(self, core, share_P)
        owners.append([sorted(set(self.exchange.owners)), sum(one.masters is not None for one in core.owned.values())])
        return core

    with (
        patch.object(slices, "_SMALLEST", 128),
        patch.object(slices.shares, "__kwdefaults__", {"fixed": 0.0, "own": 6.0}),
        patch.object(HostCut, "_end", ended),
        patch.object(HostCut, "hand_over", handed_over),
        patch.object(sharded, "_SETTLED", 100),
    ):
        found, _ = stepped(linear, optax.sgd(RATE), params, SAVED, wire="int8", controller=Benching(SEED))
    return {"states": {name: plain_state(state) for name, state in found.items()}, "kept": kept, "owners": owners}


def skipped(info):
    import optax

    from hetjax.reduce import slices

    linear = lambda params, batch, keys: batch["wide"] @ params["w"] + batch["x"][:, 0] * params["b"]
    params = {"w": np.zeros(WIDTH, np.float32), "b": np.ones((), np.float32)}
    rows, results = batches(), {}
    rows[BAD]["wide"][-1] = np.inf  # of the last process
    for wire in ("float32", "int8"):
        with patch.object(slices, "_SMALLEST", 128):
            found, _ = stepped(linear, optax.sgd(RATE), params, rows=rows, wire=wire, on_nonfinite="skip")
        results[wire] = plain_state(found["end"])
    return results


def resumed(info):
    """A run in int8 whose state is given to another step, in the same format, in float32 and in 'auto'."""
    import optax

    import hetjax
    from hetjax.reduce import cut

    linear = lambda params, batch, keys: batch["wide"] @ params["w"] + batch["x"][:, 0] * params["b"]
    params = {"w": np.zeros(WIDTH, np.float32), "b": np.ones((), np.float32)}
    saved = stepped(linear, optax.sgd(RATE), params, SAVED, wire="int8")[0]["saved"]
    results = {"saved": plain_state(saved)}
    for wire in ("int8", "float32", "auto"):
        chosen = patch.object(cut, "quickest", lambda seconds_of: "float32")
        with chosen, hetjax.Step(linear, optax.sgd(RATE), batch_size=32, controller="equal", wire=wire) as step:
            state, _ = step(saved, batches()[0])
            results[wire] = plain_state(step.export(state))
    return results


def double(info):
    """Float64 with wire='auto', which has nothing to cut; and float32 in int8."""
    import jax
    import optax

    import hetjax

    jax.config.update("jax_enable_x64", True)
    found = {}
    for wire, dtype in (("auto", np.float64), ("int8", np.float32)):
        data = {name: rows.astype(dtype) for name, rows in batches()[0].items()}
        squared = lambda params, batch, keys: (batch["x"] @ params["w"] - batch["y"]) ** 2
        with hetjax.Trainer(squared, optax.sgd(RATE), batch_size=32, controller="equal", wire=wire) as trainer:
            state, history = trainer.fit(trainer.init({"w": np.zeros(6, dtype)}), data, steps=3)
        found[wire] = [history.summary()["wire"], str(state.params["w"].dtype), plain_state(state)["params"]]
    return found


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
    result = {
        "cut": cut,
        "benched": benched,
        "skipped": skipped,
        "resumed": resumed,
        "double": double,
        "delay": delay,
        "refused": refused,
    }[case](info)
    Path(folder, f"{info.process}.json").write_text(json.dumps(result))
    leave(0, together=True)


if __name__ == "__main__":
    main()
