"""A small run over several processes, as a program of its own: program.py FOLDER STEPS [FLAGS].

Process 0 writes a row for every step, with its loss and its samples, to FOLDER/steps.jsonl.
"""

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import jax
from sample_log import samples_of
from tiny_problem import trainer_for

from hetjax import checkpoint
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
    asked = flags.parse_args()
    place = initialize(wait_limit=60)
    heart = from_environment()
    leave(run(asked, place.first, [] if heart is None else [heart]), together=True)


def run(asked, first, hooks):
    """The exit code: 0, or 130 if it was stopped from outside."""
    folder = asked.folder / "checkpoints"
    trainer, source, state = trainer_for(jax.devices(), sync=asked.sync, controller=asked.controller)
    with trainer, stop_on_signals(trainer.stop) as interrupt:
        if asked.resume and (found := checkpoint.restore_latest(folder, state, trainer)) is not None:
            state = found.state

        def tell(record, state):
            if first:
                row = {
                    "step": record.step,
                    "loss": record.loss,
                    "samples": samples_of(record.metrics, int(record.counts_W.sum())),
                    "workers": len(record.counts_W),
                }
                with (asked.folder / "steps.jsonl").open("a") as file:
                    file.write(json.dumps(row) + "\n")

        with checkpoint.Saver(folder, trainer, steps=asked.save_steps, seconds=asked.save_seconds, keep=3) as saver:
            left = asked.steps - state.step
            state, history = trainer.fit(state, source, steps=left, hooks=[tell, saver, interrupt, *hooks])
            saver.save(history.records[-1], state)
        trainer.evaluate(state, source)
    return 0 if state.step == asked.steps else 130


if __name__ == "__main__":
    main()
