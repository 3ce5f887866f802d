"""A small training run on several processes: program.py FOLDER STEPS [FLAGS].

Process 0 writes one row per step, with its loss and samples, to FOLDER/steps.jsonl.
"""

import argparse
import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import jax
from sample_log import samples_of
from tiny_problem import trainer_for

from hetjax import checkpoint, environment
from hetjax.fleet.distributed import initialize, leave
from hetjax.interrupt import stop_on_signals
from hetjax.launch.heartbeat import from_environment


def main():
    flags = argparse.ArgumentParser()
    flags.add_argument("folder", type=Path)
    flags.add_argument("steps", type=int)
    flags.add_argument("--resume", action="store_true")
    flags.add_argument("--save-steps", type=int)
    flags.add_argument("--save-seconds", type=float)
    flags.add_argument("--sync", default="allreduce")
    flags.add_argument("--controller", default="balanced")
    options = flags.parse_args()
    process = initialize(wait_limit=60)
    heartbeat = from_environment()
    leave(run(options, process.first, [] if heartbeat is None else [heartbeat]), together=True)


def run(options, first, hooks):
    """Returns the exit code: 0, or 130 if it was interrupted."""
    folder = options.folder / "checkpoints"
    trainer, source, state = trainer_for(jax.devices(), sync=options.sync, controller=options.controller)
    with trainer, stop_on_signals(trainer.stop) as interrupt:
        if options.resume and (found := checkpoint.restore_latest(folder, state, trainer)) is not None:
            state = found.state

        def log(record, state):
            if first:
                row = {
                    "step": record.step,
                    "loss": record.loss,
                    "samples": samples_of(record.metrics, int(record.counts_W.sum())),
                    "workers": len(record.counts_W),
                    "attempt": int(os.environ.get(environment.RESTART, 0)),
                }
                with (options.folder / "steps.jsonl").open("a") as file:
                    file.write(json.dumps(row) + "\n")

        with checkpoint.Saver(folder, trainer, steps=options.save_steps, seconds=options.save_seconds, keep=3) as saver:
            remaining = options.steps - state.step
            state, history = trainer.fit(state, source, steps=remaining, hooks=[log, saver, interrupt, *hooks])
            saver.save(history.records[-1], state)
        trainer.evaluate(state, source)
    return 0 if state.step == options.steps else 130


if __name__ == "__main__":
    main()
