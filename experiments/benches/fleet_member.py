"""One member of the fleet of bench_faults, also as a program: fleet_member.py FOLDER STEPS [--resume].

It trains a linear classifier by SGD with momentum, and writes a line for every step: the number of the step, the loss
as it is in all bits, and which samples the sum contained, by a metric that counts every sample. Now and then it
evaluates over all samples, and saves. L2 regularization makes the loss strongly convex, so that the round-off of sums
in another order fades instead of growing.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import hetjax
from hetjax import Chunked, Trainer, checkpoint, processes  # loaded before members are forked
from hetjax.fleet import initialize, leave
from hetjax.launch.elastic import STOP
from hetjax.launch.heartbeat import from_environment
from hetjax.state import gathered

SAMPLES, FEATURES, CLASSES, BATCH = 256, 64, 10, 32
EVALUATE, SAVE = 20, 50  # steps between two evaluations, and between two checkpoints


def loss_fn(params: Any, batch: Any, keys: Any) -> hetjax.Example:
    """Cross-entropy, with a count of every sample."""
    logits_bxc = batch["x"] @ params["w"] + params["b"]
    loss_b = optax.softmax_cross_entropy_with_integer_labels(logits_bxc, batch["y"])
    seen_bxn = jax.nn.one_hot(batch["number"], SAMPLES)
    return hetjax.Example(loss_b=loss_b, metrics={"seen": hetjax.Metric(seen_bxn, reduce="sum")})


def data() -> dict[str, np.ndarray]:
    """Normal vectors with labels of a linear map and some noise."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(SAMPLES, FEATURES)).astype(np.float32)
    y = (x @ rng.normal(size=(FEATURES, CLASSES)) + rng.normal(size=(SAMPLES, CLASSES))).argmax(1)
    return {"x": x, "y": y.astype(np.int32), "number": np.arange(SAMPLES, dtype=np.int32)}


def row(record: Any) -> dict[str, Any]:
    """What is compared of a step: the loss, which samples the sum contained, and which more than once."""
    return {"step": record.step, "loss": float(record.loss), **counted(record.metrics["seen"])}


def counted(seen: Any) -> dict[str, Any]:
    """Which samples a sum contained, a bit for each in hexadecimal digits, and which more than once."""
    counts = np.rint(seen).astype(int)
    return {"samples": np.packbits(counts > 0).tobytes().hex(), "twice": np.flatnonzero(counts > 1).tolist()}


def train(log: Path, steps: int, pause: float = 0.0, end: Path | None = None, folder: Path | None = None,
          resume: bool = False) -> None:  # fmt: skip
    """Train for some steps, or until the file `end` exists.

    Args:
        log: where lines are written.
        steps: number of steps.
        pause: seconds added to every step.
        end: file that ends the run.
        folder: of the checkpoints; None: there are none.
        resume: whether to go on from the newest of them.
    """
    heartbeat, link = from_environment(), processes.link()
    with contextlib.ExitStack() as stack:
        trainer = Trainer(
            loss_fn, optax.chain(optax.add_decayed_weights(1e-3), optax.sgd(0.02, momentum=0.9)), batch_size=BATCH,
            devices=jax.local_devices()[:1], engine=Chunked(rungs=[8]), **({"update": "sharded"} if link else {}),
        )  # fmt: skip
        stack.enter_context(trainer)
        state = trainer.init({"w": jnp.zeros((FEATURES, CLASSES)), "b": jnp.zeros(CLASSES)})
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda number, frame: trainer.leave())
        signal.signal(STOP, lambda number, frame: trainer.stop())
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        stack.callback(os.close, out)
        source = data()
        trainer.step.compile_evaluation(
            state, [{name: rows[:1] for name, rows in source.items()}]
        )  # not in front of others

        def write(record: Any, state: Any) -> None:
            found = {**row(record), "at": time.monotonic(), "pid": os.getpid()}
            if link is not None and processes.elastic():
                found |= {"number": link.number, "members": link.entered.numbers}
            if record.step % EVALUATE == 0:
                tested = trainer.evaluate(gathered(state), source)
                found["tested"] = {"loss": float(tested["loss"]), **counted(tested["seen"])}
            os.write(out, json.dumps(found).encode() + b"\n")
            if end is not None and end.exists():
                trainer.stop()
            time.sleep(pause)

        hooks: list[Any] = [write, *([heartbeat] if heartbeat is not None else [])]
        if folder is not None:
            if resume:
                with contextlib.nullcontext() if heartbeat is None else heartbeat.reading():
                    found = checkpoint.restore_latest(folder, state, trainer)
                state = state if found is None else found.state
            hooks.append(stack.enter_context(checkpoint.Saver(folder, trainer, steps=SAVE)))
        trainer.fit(state, source, steps=steps - state.step, hooks=hooks)


def member(variables: dict[str, str], log: Path, output: Path, **options: Any) -> None:
    """The process of a member, forked from one that has imported JAX."""
    os.environ.update(variables)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with open(output, "ab", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    faulthandler.register(signal.SIGUSR2)  # where it hangs
    code = 1
    try:
        if variables:
            initialize(wait_limit=120.0, start_limit=120.0)
        train(log, **options)
        code = 0
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else 1
    except BaseException as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        import traceback

        traceback.print_exc()
    leave(code, together=code == 0)


if __name__ == "__main__":
    initialize()
    where = Path(sys.argv[1])
    rank = os.environ.get("HETJAX_PROCESS", "0")
    train(where / f"log-{rank}", int(sys.argv[2]), 0.02, folder=where / "checkpoints", resume="--resume" in sys.argv)
    leave(0, together=True)
