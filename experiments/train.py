"""Train a model on devices of unequal speed and see what balancing does.

    python experiments/train.py                                  # equal against balanced, under a minute
    python experiments/train.py --strategy dbs --epochs 5        # one run, any method
    python -m hetjax launch --processes 4 -- experiments/train.py --strategy balanced      # several processes
    python experiments/train.py --help

From top to bottom: configuration, processes, devices, then for each run data, model, trainer, run folder; a table at
the end. The flags are in config.py, what they mean in setup.py, the output in output.py, what
becomes of an earlier run in the same folder, and that no other run uses it, in training/takeover.py.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from training import configs, output, partitions, setup
from training.configs import Config
from training.takeover import CHECKPOINTS, Takeover, sole_use

from hetjax import checkpoint, report
from hetjax.environment import RESTART, STARTED
from hetjax.fleet.agree import Disagreement, gather, same
from hetjax.fleet.distributed import initialize, leave
from hetjax.history import History
from hetjax.interrupt import stop_on_signals
from hetjax.launch import heartbeat
from hetjax.launch.heartbeat import Heartbeat
from hetjax.nonfinite import NonFiniteError
from hetjax.presets import Choice, choose
from hetjax.simulation.speeds import Simulation
from hetjax.state import State
from hetjax.trainer import Trainer

_OUT_OF_MEMORY = "RESOURCE_EXHAUSTED"
OF_A_PROCESS = ("devices", "capacity", "out", "tensorboard", "wandb")  # what processes of one run may differ in


class Stopped(Exception):
    """The user asked for the end; everything is saved."""


def main(arguments: Sequence[str] | None = None) -> int:
    """The whole program; returns its exit code: 0, 2 for a mistake of the user, 1 for what another start may mend, 130
    when stopped from outside."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    console, debug = Console(), "--debug" in arguments
    output.quiet_logs(console, debug)
    try:
        config = read_config(arguments)
        setup.check_flags(config)
        asked = config.processes
        place = initialize(asked.coordinator, asked.processes, asked.process, start_limit=asked.start_limit)
        console.quiet = not place.first
        run(config, place.processes, heartbeat.from_environment(), console)
    except Stopped as stopped:
        console.print(str(stopped), soft_wrap=True, highlight=False)
        return 130
    except KeyboardInterrupt:
        console.print("Ended at once; what was not yet saved is lost.", highlight=False)
        if jax.distributed.is_initialized():  # the others may sit in a collective: this one does not wait for them
            leave(130, together=False)
        return 130
    except jax.errors.JaxRuntimeError as error:
        if debug or not (jax.distributed.is_initialized() or _OUT_OF_MEMORY in str(error)):
            raise
        if _OUT_OF_MEMORY in str(error):
            print(f"error: {str(error).splitlines()[0]} Lower --width, --batch-size or --devices.", file=sys.stderr)
            return 2
        lost = f"process {jax.process_index()} lost the others ({str(error).splitlines()[0]})"
        print(f"error: {lost}. See which ended first; --resume goes on from the last checkpoint.", file=sys.stderr)
        return 1
    except (Disagreement, ValueError, TypeError, OSError, ImportError, MemoryError, NonFiniteError) as error:
        if debug:
            raise
        Console(stderr=True).print(f"error: {error}", soft_wrap=True, highlight=False, markup=False)
        return 1 if isinstance(error, TimeoutError | Disagreement) else 2
    return 0


def read_config(arguments: Sequence[str]) -> Config:
    """Flags over a named experiment, or over the configuration of the run that is to be resumed."""
    name, out = (configs.before_flags(arguments, flag) for flag in ("--config", "--out"))
    if out == "":
        raise ValueError("--out is empty: give the folder of the run, or leave it out.")
    default = Config() if name is None else configs.named(name)
    default = configs.one_length(arguments, default)
    if "--resume" not in arguments:
        return configs.parse(arguments, default)
    folder = Path(out) if out is not None else default.folder
    path = folder / "config.json"
    of_another = path.is_file() and path.stat().st_mtime < float(os.environ.get(STARTED, 0))
    if of_another or (RESTART in os.environ and not path.is_file()):  # the launcher said --resume; nothing had begun
        return configs.parse([flag for flag in arguments if flag != "--resume"], default)
    if not path.is_file():
        raise ValueError(f"There is no run to resume in {folder}: it holds no config.json. Give its folder by --out.")
    saved = configs.saved(path, default)
    config = configs.parse(arguments, configs.one_length(arguments, saved))
    configs.check_same_run(saved, config, folder)
    return config


def run(config: Config, processes: int, heart: Heartbeat | None, console: Console) -> None:
    """The one run that was asked for, or equal and balanced in turn."""
    simulation, devices = setup.find_devices(config, processes)
    told = {name: value for name, value in config.flat().items() if name not in OF_A_PROCESS}
    same(resume=config.output.resume, **told)
    folder, method = config.folder, setup.method(config, processes)
    partitions.check_flags(config)
    with sole_use(folder):
        run_in(folder, config, method, devices, simulation, heart, console)


def run_in(
    folder: Path,
    config: Config,
    method: dict[str, Any],
    devices: list[jax.Device],
    simulation: Simulation | None,
    heart: Heartbeat | None,
    console: Console,
) -> None:
    """The same with everything found, in a folder that no other run uses."""
    if not config.compares:
        chosen = choose(**method)
        name = chosen.name
        summary = train(config, chosen, folder, [folder], devices, simulation, heart, console)
        if jax.process_index() != 0:
            return
        drawn = report.report(folder)
        output.show_table([(name, summary)], console)
        output.show_paths(folder / "run.png", drawn.page, console)
        return
    names, summaries = ("equal", "balanced"), []
    places = [folder / name for name in names]
    for k, name in enumerate(names):
        chosen = choose(**(method | {"strategy": name}))
        summary = train(config, chosen, places[k], places[k:], devices, simulation, heart, console)
        if simulation is not None:  # the row time of the first run holds for both
            simulation = replace(simulation, row_time=summary["row_time"], step=0, phases=0, overruns=0)
        summaries.append((name, summary))
    if jax.process_index() != 0:
        return
    drawn = report.report(folder / "equal", folder / "balanced", page=folder / "report.html")
    output.show_table(summaries, console)
    output.show_comparison(summaries, folder, console)
    output.show_paths(folder / "balanced" / "run.png", drawn.page, console)


def train(
    config: Config,
    chosen: Choice,
    folder: Path,
    replaces: Sequence[Path],
    devices: list[jax.Device],
    simulation: Simulation | None,
    heart: Heartbeat | None,
    console: Console,
) -> dict[str, Any]:
    """One run into its folder; its summary. Only the first process writes, all have to see the folder.

    What earlier runs left there and in the other folders that it `replaces` is gone after its first step.
    """
    name, task = chosen.name, setup.make_task_of(config)
    steps, epochs = setup.duration(config)
    finished = output.finished(folder, steps, epochs * len(task.train)) if config.output.resume else None
    if finished is not None:
        console.print(f"{name}: finished already, see {folder}", soft_wrap=True, highlight=False)
        return finished
    total_steps = setup.total_steps(config, len(task.train))
    partition = partitions.partition_of(config, chosen, task, devices, simulation, folder, console)
    trainer = Trainer(
        task.model,
        setup.optimizer(config, total_steps, scheduled=chosen.sync.stepped),
        batch_size=config.data.batch_size,
        controller=chosen.controller if chosen.sync.stepped else None,
        partition=partition,
        sync=setup.scheduled_sync(config, chosen, total_steps),
        engine=chosen.engine,
        devices=devices,
        speeds=simulation,
        capacity=setup.whole_numbers("--capacity", config.workers.capacity),
        ema_decay=config.optimizer.ema,
        seed=config.output.seed,
        on_nonfinite=config.optimizer.on_nonfinite,
        max_skips=config.optimizer.max_skips,
    )
    left = lambda state: (steps - state.step) if steps else (epochs * len(task.train) - state.cursor)
    with trainer, stop_on_signals(trainer.stop) as interrupt:
        state, before = beginning(config, trainer, trainer.init(task.model.params, task.model.model_state), folder)
        row_time = lambda: trainer.simulation and trainer.simulation.row_time
        told = "compiling" if state.step == 0 else f"compiling; goes on after step {state.step}"
        console.print(f"{name}: {len(devices)} workers, {told}", highlight=False)
        tracker = output.trackers(config, name, folder, state.step)
        follow = report.Follow(tracker, **before)
        saver = checkpoint.Saver(
            folder / CHECKPOINTS,
            trainer,
            steps=config.output.save_steps,
            seconds=config.output.save_every,
            keep=config.output.keep,
            extra=lambda record: {
                "seconds": follow.seconds + record.seconds,
                "plan_changes": follow.plan_changes,
                "row_time": row_time(),
                "config": config.flat(),
            },
        )
        takeover = Takeover(config, folder, replaces, partition)
        hooks = [takeover, follow, saver, interrupt]
        hooks += [report.Progress(name, console=console), *([] if heart is None else [heart])]
        history = History(engine=chosen.engine.name, workers=len(devices))
        with output.log_file(folder, "a" if state.step else "w"), saver:
            if left(state) > 0:
                length = {"steps": left(state)} if steps else {"stop_at": epochs * len(task.train)}
                try:
                    state, history = trainer.fit(state, task.train, hooks=hooks, **length)
                except NonFiniteError as error:
                    raise NonFiniteError(f"{error} {takeover.last_checkpoint()}") from error
                if history.records:  # a run without a barrier may be stopped before anything is finished
                    saver.save(history.records[-1], state)
                saver.close()
            takeover.now()
            if left(state) > 0:
                tracker.close()
                if not state.step:
                    raise Stopped("Stopped before the first step was done: there is nothing to save.")
                raise Stopped(
                    f"Stopped after step {state.step} of {total_steps}; everything is saved. Go on with "
                    f"python experiments/train.py --resume --out {config.folder}"
                )
            tested = trainer.evaluate(state, task.test)
    if chosen.sync.name == "daso":  # every process has its own part of a step
        ideals = gather(history.ideal_samples_per_s)
        history.ideal_samples_per_s = sum(ideals) if all(ideals) else None
    if jax.process_index() != 0:
        return {"row_time": row_time()}
    summary = output.summary(chosen, folder, history, tested, state, follow.seconds, follow.plan_changes) | {
        "row_time": row_time(),
        "last_step": int(state.step),
        "cursor": int(state.cursor),
    }
    tracker.summary(summary)
    tracker.close()
    return summary


def beginning(config: Config, trainer: Trainer, fresh: State, folder: Path) -> tuple[State, dict[str, Any]]:
    """The state to start from, and what is counted on from the last checkpoint, if there is one."""
    found = checkpoint.restore_latest(folder / CHECKPOINTS, fresh, trainer) if config.output.resume else None
    if found is None:
        return fresh, {}
    if config.optimizer.schedule == "cosine":
        saved = configs.with_values(config, found.extra.get("config", {}))
        was, now = setup.length(saved), setup.length(config)
        output.warn_of_new_length(was, now, found.state.step)
    if trainer.simulation is not None:
        trainer.simulation.row_time = found.extra.get("row_time")
    before = {"seconds": found.extra.get("seconds", 0.0), "plan_changes": found.extra.get("plan_changes", 0)}
    return found.state, before


if __name__ == "__main__":
    try:
        ended = main()
    except Exception:
        traceback.print_exc()
        ended = 1
    leave(ended, together=ended in (0, 130))
