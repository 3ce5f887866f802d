"""Train a model on devices of unequal speed and see what balancing does.

    python experiments/train.py                                  # equal against balanced, under a minute
    python experiments/train.py --strategy dbs --epochs 5        # one run, any method
    python experiments/train.py --help

From top to bottom: configuration, devices, then for each run data, model, trainer, run folder; a table at the end.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import train_config
from rich.console import Console
from rich.logging import RichHandler
from rich.table import Table
from train_config import Config

from hetjax import checkpoint, watch
from hetjax.devices import fake_devices, said_by_environment
from hetjax.interrupt import stop_on_signals
from hetjax.run.simulate import Simulation, constant
from hetjax.run.trace_file import read_trace
from hetjax.strategies import Strategy, resolve
from hetjax.task import Task, make_task
from hetjax.trainer import NonFiniteError, Trainer

log = logging.getLogger("hetjax")
CHECKPOINTS = "checkpoints"
SAME_STEPS = 10  # later the optimiser has blown up the rounding of sums in another order


class Stopped(Exception):
    """The user asked for the end; everything is saved."""


def main(arguments: Sequence[str] | None = None) -> int:
    """The whole program; returns its exit code: 0, 2 for a mistake of the user, 130 when stopped from outside."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    console = Console(stderr=False)
    quiet_logs(console, debug="--debug" in arguments)
    try:
        config = read_config(arguments)
        runs(config, console)
    except Stopped as stopped:
        console.print(str(stopped), soft_wrap=True, highlight=False)
        return 130
    except KeyboardInterrupt:
        console.print("Ended at once; what was not yet saved is lost.", highlight=False)
        return 130
    except (ValueError, TypeError, OSError, ImportError, NonFiniteError) as error:
        if "--debug" in arguments:
            raise
        Console(stderr=True).print(f"[bold red]error:[/] {error}", soft_wrap=True, highlight=False)
        return 2
    return 0


def read_config(arguments: Sequence[str]) -> Config:
    """Flags over a named experiment, or over the configuration of the run that is to be resumed."""
    name, out = (train_config.before_flags(arguments, flag) for flag in ("--config", "--out"))
    default = Config() if name is None else train_config.named(name)
    default = train_config.one_length(arguments, default)
    if "--resume" not in arguments:
        return train_config.parse(arguments, default)
    folder = Path(out) if out is not None else default.folder
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(f"There is no run to resume in {folder}: it holds no config.json. Give its folder by --out.")
    saved = train_config.with_values(default, json.loads(path.read_text(encoding="utf-8")))
    config = train_config.parse(arguments, train_config.one_length(arguments, saved))
    train_config.check_same_run(saved, config, folder)
    return config


def runs(config: Config, console: Console) -> None:
    """Equal and balanced in turn, or the one run that was asked for."""
    folder = config.folder
    simulation, devices = find_devices(config)
    if not config.compares:
        name, strategy = resolve(**method(config))
        summary = train(config, name, strategy, folder, devices, simulation, console)
        pictures = watch.report(folder)
        show([(name, summary)], console)
        tell_paths(console, pictures.figures[0], pictures.page)
        return
    folder.mkdir(parents=True, exist_ok=True)
    watch.write_json(folder / "config.json", config.flat())
    summaries = []
    for name in ("equal", "balanced"):
        _, strategy = resolve(**(method(config) | {"preset": name}))
        if simulation is not None:  # the row time of the first run holds for both
            simulation = replace(simulation, step=0, phases=0, overruns=0)
        summaries.append((name, train(config, name, strategy, folder / name, devices, simulation, console)))
    pictures = watch.report(folder / "equal", folder / "balanced", page=folder / "report.html")
    show(summaries, console)
    tell_comparison(summaries, folder, console)
    tell_paths(console, folder / "balanced" / "run.png", pictures.page)


def train(
    config: Config,
    name: str,
    strategy: Strategy,
    folder: Path,
    devices: list[jax.Device],
    simulation: Simulation | None,
    console: Console,
) -> dict[str, Any]:
    """One run into its folder; its summary."""
    finished = folder / "summary.json"
    if config.output.resume and finished.is_file():
        console.print(f"{name}: finished already, see {folder}", soft_wrap=True, highlight=False)
        return json.loads(finished.read_text(encoding="utf-8"))
    task = build_task(config)
    steps, epochs = duration(config)
    total_steps = steps or -(-len(task.train) // config.data.batch_size) * epochs
    controller = strategy.make_controller()
    trainer = Trainer(
        task.model.loss_fn,
        optimizer(config, total_steps),
        eval_fn=task.model.eval_fn,
        batch_size=config.data.batch_size,
        controller=controller,
        partition=strategy.partition,
        engine=strategy.engine,
        devices=devices,
        speeds=simulation,
        capacity=whole_numbers("--capacity", config.workers.capacity),
        ema_decay=config.optimiser.ema,
        seed=config.output.seed,
    )
    with trainer, stop_on_signals(trainer.stop) as interrupt:
        state = trainer.init(task.model.params, task.model.model_state)
        earlier: dict[str, Any] = {"seconds": 0.0}
        if config.output.resume and (saved := checkpoint.latest(folder / CHECKPOINTS)) is not None:
            state, earlier = checkpoint.restore(saved, state, controller)
            if simulation is not None:
                simulation.row_time = earlier.get("row_time")
            console.print(f"{name}: goes on after step {state.step}", highlight=False)
        extra = lambda seconds: {"seconds": earlier["seconds"] + seconds, "row_time": row_time(simulation)}
        folder.mkdir(parents=True, exist_ok=True)
        watch.write_json(folder / "config.json", config.flat())
        tracker = trackers(config, name, folder, state.step)
        with log_file(folder, "a" if state.step else "w"):
            hooks = [
                watch.Follow(tracker, seconds=earlier["seconds"]),
                checkpoint.Saver(
                    folder / CHECKPOINTS,
                    controller,
                    len(task.train),
                    config.output.save_every,
                    lambda record: extra(record.seconds),
                ),
                interrupt,
                watch.Progress(name, console=console),
            ]
            console.print(f"{name}: {len(devices)} workers, compiling", highlight=False)
            left = {"steps": steps - state.step} if steps else {"stop_at": epochs * len(task.train)}
            state, history = trainer.fit(state, task.train, hooks=hooks, **left)
            if jax.process_index() == 0:
                checkpoint.save(folder / CHECKPOINTS, state, controller, extra(history.records[-1].seconds))
            if interrupt.asked and state.step < total_steps:
                tracker.close()
                raise Stopped(
                    f"Stopped after step {state.step} of {total_steps}; everything is saved. Go on with "
                    f"python experiments/train.py --resume --out {config.folder}"
                )
            tested = trainer.evaluate(state, task.test)
    told = history.summary() | whole_run(folder)
    summary = {
        "strategy": name,
        "controller": strategy.controller,
        "partition": strategy.partition,
        "sync": strategy.sync,
        **told,
        "efficiency": told["samples_per_s"] / told["ideal_samples_per_s"] if told["ideal_samples_per_s"] else None,
        "test_accuracy": tested["accuracy"],
        "test_loss": tested["loss"],
    }
    tracker.summary(summary)
    tracker.close()
    return summary


# -- what the flags mean --


def find_devices(config: Config) -> tuple[Simulation | None, list[jax.Device]]:
    """The devices, and their simulated speeds if any: 1, 1, 0.5, 0.25 while nothing about devices is given."""
    asked = config.workers
    if asked.trace is not None and asked.speeds is not None:
        raise ValueError("--trace and --speeds both say how fast the workers are: give one of them.")
    trace = None
    if asked.trace is not None:
        trace = read_trace(asked.trace)
    elif asked.speeds is not None and asked.speeds != "real":
        trace = constant(numbers("--speeds", asked.speeds))
    count = asked.devices if trace is None or asked.devices is not None else len(trace(0)[0])
    devices = fake_devices(count)
    silent = asked.devices is None and asked.speeds is None and said_by_environment() is None
    if trace is None and silent and devices[0].platform == "cpu":
        trace = constant(numbers("--speeds", train_config.DEFAULT_SPEEDS))
    if trace is None:
        return None, devices
    least, fixed = train_config.LEAST_ROW_TIME_MS / 1e3, asked.row_time
    if fixed is not None and not 0 < fixed < np.inf:
        raise ValueError(f"--row-time is {fixed}: expected milliseconds above 0.")
    return Simulation(trace, row_time=None if fixed is None else fixed / 1e3, least=least), devices


def build_task(config: Config) -> Task:
    asked, options = config.model, train_config.model_options(config)
    augment = asked.augment or ("none" if asked.model in ("mlp", "transformer") else "shift")
    return make_task(
        config.data.dataset,
        asked.model,
        seed=config.output.seed,
        norm=asked.norm,
        augment=augment,
        dtype=asked.dtype,
        **options,
    )


def duration(config: Config) -> tuple[int | None, int]:
    """Steps if they were given, and epochs."""
    steps, epochs = config.data.steps, config.data.epochs
    if steps is not None and epochs is not None:
        raise ValueError(f"--steps {steps} and --epochs {epochs} both say how long to train: give one of them.")
    for flag, value in (("--steps", steps), ("--epochs", epochs), ("--batch-size", config.data.batch_size)):
        if value is not None and value < 1:
            raise ValueError(f"{flag} is {value}: give at least 1.")
    return steps, epochs or train_config.DEFAULT_EPOCHS


def optimizer(config: Config, steps: int) -> optax.GradientTransformation:
    asked, rate = config.optimiser, train_config.learning_rate(config)
    schedule: Any = rate
    if asked.schedule == "cosine":
        schedule = optax.warmup_cosine_decay_schedule(0.0, rate, max(1, steps // 10), max(2, steps))
    make = {
        "adamw": lambda: optax.adamw(schedule, weight_decay=asked.weight_decay),
        "adam": lambda: optax.adam(schedule),
        "sgd": lambda: optax.sgd(schedule, momentum=0.9),
        "lion": lambda: optax.lion(schedule, weight_decay=asked.weight_decay),
    }[asked.optimizer]
    return make() if asked.clip is None else optax.chain(optax.clip_by_global_norm(asked.clip), make())


def method(config: Config) -> dict[str, Any]:
    asked = config.method
    every = asked.every if asked.every in (None, "epoch") else whole_numbers("--every", asked.every)[0]
    axes = {axis: getattr(asked, axis) for axis in ("controller", "partition", "sync", "engine", "faithful")}
    return {"preset": asked.strategy, "every": every, **axes}


def numbers(flag: str, text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{flag} is {text!r}: expected numbers with commas between, such as 1,1,0.5.") from None


def whole_numbers(flag: str, text: str | None) -> Any:
    if text is None:
        return None
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{flag} is {text!r}: expected whole numbers with commas between, such as 128,64.") from None


# -- what is written and shown --


def quiet_logs(console: Console, debug: bool) -> None:
    """hetjax's warnings on the terminal (with --debug everything), other packages' errors only."""
    for noisy in ("jax", "orbax", "absl"):
        logging.getLogger(noisy).setLevel(logging.WARNING if debug else logging.ERROR)
    log.handlers = [RichHandler(logging.INFO if debug else logging.WARNING, console, show_time=False, show_path=False)]
    log.setLevel(logging.INFO)
    log.propagate = False


@contextmanager
def log_file(folder: Path, mode: str) -> Iterator[None]:
    """hetjax's log of a run, in its folder."""
    handler = logging.FileHandler(folder / "log.txt", mode, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)
        handler.close()


def trackers(config: Config, name: str, folder: Path, done: int) -> watch.Tracker:
    told: list[watch.Tracker] = [watch.JsonlTracker(folder, done=done)]
    if config.output.tensorboard:
        told.append(watch.TensorBoardTracker(folder))
    if config.output.wandb is not None:
        from hetjax.watch.wandb import WandbTracker

        told.append(WandbTracker(config.output.wandb, name=name, config=config.flat(), folder=folder))
    return watch.Composite(*told)


def row_time(simulation: Simulation | None) -> float | None:
    return None if simulation is None else simulation.row_time


def whole_run(folder: Path) -> dict[str, Any]:
    """What the metrics of all parts of a run, resumed or not, come to."""
    run = watch.read_run(folder)
    wall, samples = float(np.nansum(run.step_time_S)), int(np.nansum(run.counts_SxW))
    return {
        "steps": run.steps,
        "samples": samples,
        "wall_s": wall,
        "samples_per_s": samples / wall,
        "plan_changes": len(run.changes),
    }


def show(summaries: list[tuple[str, dict[str, Any]]], console: Console) -> None:
    table = Table(box=None, padding=(0, 2), pad_edge=False, header_style="bold")
    for column in ("", "samples/s", "ideal", "efficiency", "test accuracy", "seconds"):
        table.add_column(column, justify="right" if column else "left")
    for name, summary in summaries:
        ideal, efficiency = summary["ideal_samples_per_s"], summary["efficiency"]
        table.add_row(
            name,
            f"{summary['samples_per_s']:,.0f}",
            "–" if ideal is None else f"{ideal:,.0f}",
            "–" if efficiency is None else f"{efficiency:.0%}",
            f"{summary['test_accuracy']:.4f}",
            f"{summary['wall_s']:.1f}",
        )
    console.print("")
    console.print(table)
    console.print("")


def tell_comparison(summaries: list[tuple[str, dict[str, Any]]], folder: Path, console: Console) -> None:
    """How much faster, and that it is the same training: the losses step by step."""
    (_, equal), (_, balanced) = summaries
    losses = [watch.read_run(folder / name).loss_S[:SAME_STEPS] for name, _ in summaries]
    apart = float(np.max(np.abs(losses[0] - losses[1])))
    faster = balanced["samples_per_s"] / equal["samples_per_s"]
    told = f"balanced is {faster:.2f}x as fast, and the same training: over the first {len(losses[0])} steps"
    console.print(f"{told}\nthe losses of the two differ by {apart:.0e} at most.", highlight=False)


def tell_paths(console: Console, picture: Path, page: Path) -> None:
    console.print(f"picture: {picture}\nreport:  {page}", soft_wrap=True, highlight=False)


if __name__ == "__main__":
    sys.exit(main())
