"""The command `hetjax train`: train a model on devices of unequal speed, and see what balancing gains.

    hetjax train                                                 # compare equal and balanced, under a minute
    hetjax train --strategy dbs --epochs 5                       # one run of any strategy
    hetjax launch --processes 4 -- hetjax train --strategy balanced                        # several processes
    hetjax train --help

Reads top to bottom: configuration, processes, devices; for each run its data, model, trainer and run folder; the table
of results. In training/: configs.py defines the flags, setup.py builds objects from them, partitions.py cuts blocks,
output.py writes and prints, takeover.py locks the run folder and replaces an earlier run in it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from hetjax import checkpoint, processes, report
from hetjax.cli.training import configs, output, partitions, setup
from hetjax.cli.training.configs import Config
from hetjax.cli.training.takeover import CHECKPOINTS, Takeover, sole_use
from hetjax.devices.workers import device_kind
from hetjax.engines.precision import warn_of_bfloat16
from hetjax.environment import RESTART, STARTED
from hetjax.fleet.agree import Disagreement, same
from hetjax.fleet.carrier import PeerLost
from hetjax.fleet.distributed import initialize, leave
from hetjax.fleet.generations import Fenced
from hetjax.history import History
from hetjax.interrupt import stop_on_signals
from hetjax.launch import heartbeat
from hetjax.launch.heartbeat import Heartbeat
from hetjax.nonfinite import NonFiniteError
from hetjax.presets import Choice, choose
from hetjax.profiling import Profile
from hetjax.recovery import Left, StateLost
from hetjax.simulation.speeds import Simulation
from hetjax.state import State
from hetjax.trainer import Trainer

PROFILE = "profile"  # folder of the trace in a run folder
_OUT_OF_MEMORY = "RESOURCE_EXHAUSTED"
PER_PROCESS_FLAGS = ("devices", "capacity", "out", "tensorboard", "wandb")  # flags that may differ between processes


class Stopped(Exception):
    """The run was stopped, by the user (130) or for lack of members (1); everything is saved."""

    def __init__(self, message: str, code: int = 130):
        super().__init__(message)
        self.code = code


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program and return its exit code.

    0 success, 2 user error, 1 failure that a restart may fix, 130 stopped by the user.
    """
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    console, debug = Console(), "--debug" in arguments
    output.quiet_logs(console, debug)
    try:
        config = read_config(arguments)
        setup.check_flags(config)
        group = config.processes
        rank = initialize(
            group.coordinator,
            group.processes,
            group.process,
            transport=group.transport,
            devices=config.workers.devices,
            key=group.key,
            start_limit=group.start_limit,
        )
        console.quiet = not rank.first
        run(config, heartbeat.from_environment(), console)
    except Stopped as stopped:
        console.print(str(stopped), soft_wrap=True, highlight=False)
        return stopped.code
    except Left as left:
        print(left, flush=True)
        return 0
    except KeyboardInterrupt:
        console.print("Stopped immediately; steps since the last checkpoint are lost.", highlight=False)
        if processes.count() > 1:  # do not wait for the others, which may block in a collective
            leave(130, together=False)
        return 130
    except jax.errors.JaxRuntimeError as error:
        if debug or not (processes.count() > 1 or _OUT_OF_MEMORY in str(error)):
            raise
        if _OUT_OF_MEMORY in str(error):
            print(f"error: {str(error).splitlines()[0]} Lower --width, --batch-size or --devices.", file=sys.stderr)
            return 2
        lost = f"process {processes.index()} lost the other processes ({str(error).splitlines()[0]})"
        print(f"error: {lost}. Find out which one ended first; --resume continues the run.", file=sys.stderr)
        return 1
    except PeerLost as error:
        if debug:
            raise
        print(f"error: {error} See its output for the reason; --resume continues the run.", file=sys.stderr)
        return 1
    except (Disagreement, ValueError, TypeError, OSError, ImportError, MemoryError, NonFiniteError, StateLost) as error:
        if debug:
            raise
        Console(stderr=True).print(f"error: {error}", soft_wrap=True, highlight=False, markup=False)
        return 1 if isinstance(error, TimeoutError | Disagreement | Fenced | StateLost) else 2
    return 0


def read_config(arguments: Sequence[str]) -> Config:
    """Parse the flags over the defaults: a named experiment, or the configuration of the run to resume."""
    name, out = (configs.flag_value(arguments, flag) for flag in ("--config", "--out"))
    if out == "":
        raise ValueError("--out is empty: give a run folder, or omit the flag.")
    default = Config() if name is None else configs.named(name)
    default = configs.one_length(arguments, default)
    if "--resume" not in arguments:
        return configs.parse(arguments, default)
    folder = Path(out) if out is not None else configs.parse(arguments, default).folder
    path = folder / "config.json"
    outdated = path.is_file() and path.stat().st_mtime < float(os.environ.get(STARTED, 0))
    if outdated or (RESTART in os.environ and not path.is_file()):  # the launcher adds --resume; no step was finished
        return configs.parse([flag for flag in arguments if flag != "--resume"], default)
    if not path.is_file():
        raise ValueError(f"There is no run to resume in {folder}: it has no config.json. Give its folder with --out.")
    saved = configs.saved(path, default)
    config = configs.parse(arguments, configs.one_length(arguments, saved))
    configs.check_same_run(saved, config, folder)
    return config


def run(config: Config, heart: Heartbeat | None, console: Console) -> None:
    """Find the devices, check the flags, and train in the locked run folder."""
    simulation, devices = setup.find_devices(config)
    shared = {name: value for name, value in config.flat().items() if name not in PER_PROCESS_FLAGS}
    same(resume=config.output.resume, **shared)
    if config.model.dtype == "bfloat16":
        warn_of_bfloat16(map(device_kind, devices))
    folder, method = config.folder, setup.method(config)
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
    """Train one run, or equal and then balanced, and report; the folder is locked."""
    if not config.compares:
        chosen = choose(**method)
        name = chosen.name
        summary = train(config, chosen, folder, [folder], devices, simulation, heart, console)
        if not processes.first():
            return
        drawn = report.report(folder)
        output.show_table([(name, summary)], console)
        output.show_paths(folder / "run.png", drawn.page, console)
        return
    names, summaries = ("equal", "balanced"), []
    folders = [folder / name for name in names]
    for k, name in enumerate(names):
        chosen = choose(**(method | {"strategy": name}))
        summary = train(config, chosen, folders[k], folders[k:], devices, simulation, heart, console)
        if simulation is not None:  # both runs use the row time measured by the first
            simulation = replace(simulation, row_time=summary["row_time"], step=0, phases=0, overruns=0)
        summaries.append((name, summary))
    if not processes.first():
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
    """Train one run and return its summary.

    Only process 0 writes; all processes must see the folder. Earlier runs in the folders in `replaces` are removed
    after the first step.
    """
    name, task = chosen.name, setup.make_task_of(config)
    steps, epochs = setup.duration(config)
    finished = output.finished(folder, steps, epochs * len(task.train)) if config.output.resume else None
    if finished is not None:
        console.print(f"{name}: already finished, see {folder}", soft_wrap=True, highlight=False)
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
        compute_dtype=setup.compute_dtype(config),
        ema_decay=config.optimizer.ema,
        wire=config.processes.wire,
        delay=config.processes.delay,
        seed=config.output.seed,
        on_nonfinite=config.optimizer.on_nonfinite,
        max_skips=config.optimizer.max_skips,
        **setup.exchange_options(config, chosen.sync),
    )
    remaining = lambda state: (steps - state.step) if steps else (epochs * len(task.train) - state.cursor)
    with trainer, stop_on_signals(trainer.stop, trainer.leave if processes.elastic() else None) as interrupt:
        fresh = trainer.init(task.model.params, task.model.model_state)
        with nullcontext() if heart is None else heart.reading():
            state, totals = initial_state(config, trainer, fresh, folder)
        row_time = lambda: trainer.simulation and trainer.simulation.row_time
        workers = sum(setup.workers_by_process(devices))
        if state.step:
            console.print(f"{name}: resuming after step {state.step}", highlight=False)
        follow = output.Successor(config, name, folder, state.step, **totals)
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
        hooks: list[Any] = [output.speaks(console), takeover, follow, saver, interrupt]
        hooks += [report.Progress(name, console=console), *([] if heart is None else [heart])]
        if config.output.profile is not None:
            hooks.append(Profile(folder / PROFILE, config.output.profile))
        history = History(engine=chosen.engine.name, workers=workers)
        with output.log_file(folder, "a" if state.step else "w"), saver:
            if remaining(state) > 0:
                length = {"steps": remaining(state)} if steps else {"stop_at": epochs * len(task.train)}
                try:
                    state, history = trainer.fit(state, task.train, hooks=hooks, **length)
                except NonFiniteError as error:
                    raise NonFiniteError(f"{error} {takeover.last_checkpoint()}") from error
                if history.records:  # an asynchronous run may be stopped before its first record
                    saver.save(history.records[-1], state)
                saver.close()
            takeover.now()
            if remaining(state) > 0:
                follow.tracker.close()
                why = "" if trainer.step.recovery is None else trainer.step.recovery.stop
                code = 1 if why else 130
                if not state.step:
                    raise Stopped(f"{why} Stopped before the first step finished: nothing to save.".lstrip(), code)
                raise Stopped(
                    f"{why} Stopped after step {state.step} of {total_steps}; everything is saved. Continue with "
                    f"hetjax train --resume --out {config.folder}".lstrip(),
                    code,
                )
            tested = trainer.evaluate(state, task.test)
    if chosen.sync.name == "daso":  # the history covers only the workers of this process
        ideals = processes.gather(history.ideal_samples_per_s)
        history.ideal_samples_per_s = sum(ideals) if all(ideals) else None
    if not processes.first():
        return {"row_time": row_time()}
    follow.succeed(ends=True)
    summary = output.summary(chosen, folder, history, tested, state, follow.seconds, follow.plan_changes) | {
        "row_time": row_time(),
        "last_step": int(state.step),
        "cursor": int(state.cursor),
    }
    follow.tracker.summary(summary)
    follow.tracker.close()
    return summary


def initial_state(config: Config, trainer: Trainer, fresh: State, folder: Path) -> tuple[State, dict[str, Any]]:
    """Return the initial or restored state, and the totals of the earlier parts of a resumed run."""
    found = checkpoint.restore_latest(folder / CHECKPOINTS, fresh, trainer) if config.output.resume else None
    if found is None:
        return fresh, {}
    if config.optimizer.schedule == "cosine":
        saved = configs.with_values(config, found.extra.get("config", {}))
        output.warn_of_new_length(setup.length(saved), setup.length(config), found.state.step)
    if trainer.simulation is not None:
        trainer.simulation.row_time = found.extra.get("row_time")
    totals = {"seconds": found.extra.get("seconds", 0.0), "plan_changes": found.extra.get("plan_changes", 0)}
    return found.state, totals
