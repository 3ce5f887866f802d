"""A test of RCD-SGD's claim: do submodular blocks make decentralized SGD reach a loss sooner than random blocks?

    python experiments/studies/rcd_sgd.py --json rcd_sgd.json                                  # 10 minutes on two cores
    python experiments/studies/rcd_sgd.py --quick
    python experiments/studies/rcd_sgd.py --dataset idx:/usr/share/datasets/fashion-mnist

Workers of unequal simulated speed, each with a fixed block of the training samples and a batch in proportion to its
speed, train by decentralized SGD on a ring (--topology). Blocks are random, class-balanced, or submodular by facility
location or graph cut, and parameters are mixed every F = 1 or 2 steps; then by MATCHA, which uses half of the links,
and the published and other selection rules at F = 2. "even" is where the paper starts: random blocks of equal size, so
that all wait for the slowest worker. As F = 2 alone halves the communication and rates alone the waiting, every other
row is compared with random blocks by rate at the SAME F, with MATCHA or without, seed by seed.

steps, s         until the training loss of the mean of all workers reaches --target; seconds as measured, including
                 the exchange between simulated devices
link s           the same if parameters were sent over a link of --link Mbit/s
against random   steps relative to random blocks with the same F and seed: mean and standard deviation

Measured figures are in docs/benchmarks.md. They are of a small MLP on digits and Fashion-MNIST, where random blocks by
rate are hard to beat; they say nothing about larger models or data that is harder to divide.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import jax
import numpy as np
import optax
import tyro
from rich.console import Console
from rich.table import Table

from hetjax.data.source import fetch
from hetjax.data.source_blocks import make_blocks
from hetjax.devices.chosen import chosen_devices
from hetjax.launch.options import Switch, optional
from hetjax.report import write_json
from hetjax.sampling.blocks import Blocks
from hetjax.simulation.speeds import Simulation, constant
from hetjax.sync import AllReduce, Decentralized, Sync
from hetjax.sync.replicas import average
from hetjax.trainer import Trainer
from hetjax.zoo.tasks import Task, make_task

OBJECTIVES = ("facility-location", "graph-cut")
RULES = ("min-block", "per-rate", "fill")  # besides the default, which depends on the rates
MAX_SAMPLES = 10_000  # over which the training loss is taken


@dataclass(frozen=True)
class Args:
    """Compare blocks for decentralized SGD by the steps and seconds to a training loss."""

    dataset: str = "digits"
    """digits, or idx:DIR with Fashion-MNIST"""
    speeds: str = "1,0.5,0.25,0.25"
    """simulated relative speeds of the workers, also the rates of the partition"""
    seeds: int = 3
    """runs per row; a seed sets the parameters, the order and the random blocks"""
    epochs: int = 30
    batch_size: int = 64
    """samples per step over all workers"""
    learning_rate: float = 0.3
    """of plain SGD; divided by 10 after half and after three quarters of the epochs"""
    topology: str = "ring"
    matcha_budget: float = 0.5
    """average fraction of the links that the rows with MATCHA use"""
    faithful: Switch = False
    """equal weights of all workers, as published, instead of weights by samples"""
    target: float = 0.1
    """training loss to reach"""
    link: float = 100.0
    """Mbit/s of the simulated link"""
    row_time: float = 0.3
    """simulated milliseconds of one sample at speed 1"""
    quick: Switch = False
    """one seed, a third of the epochs, three times the target, no selection rules"""
    json: Annotated[Path | None, optional("FILE")] = None
    """file for all measurements"""


@dataclass(frozen=True)
class Setup:
    """One row of the table: the blocks, and how workers synchronize."""

    name: str
    every: int  # F; 0 for all-reduce
    blocks: Callable[[Task, np.ndarray, int], Blocks]  # (task, rates, seed) -> blocks
    random: Switch = False  # whether the blocks depend on the seed
    matcha: Switch = False  # draw the links of each mixing step


def reached(at_E: np.ndarray, loss_E: np.ndarray, target: float) -> float:
    """Where a loss curve first reaches the target, by linear interpolation; NaN if it does not."""
    below = np.flatnonzero(np.asarray(loss_E) <= target)
    if len(below) == 0:
        return float("nan")
    k = int(below[0])
    if k == 0:
        return float(at_E[0])
    fraction = (loss_E[k - 1] - target) / (loss_E[k - 1] - loss_E[k])
    return float(at_E[k - 1] + fraction * (at_E[k] - at_E[k - 1]))


@dataclass
class Curve:
    """One run: the mean of all workers, every few steps."""

    step: list[int]
    seconds: list[float]
    loss: list[float]
    accuracy: list[float]  # on the test samples
    sent_mb: list[float]  # by one worker
    overruns: float  # fraction of local phases that took longer than simulated

    def reached(self, target: float, axis: str) -> float:
        """Where on an axis the loss reaches the target, by linear interpolation; NaN if it does not."""
        return reached(np.asarray(getattr(self, axis), float), np.asarray(self.loss), target)


def setups(args: Args) -> list[Setup]:
    """The rows of the table."""
    random = lambda kind: lambda task, rates, seed: make_blocks(task.train, rates, kind, seed=seed)
    submodular = lambda objective, rule: (
        lambda task, rates, seed: make_blocks(task.train, rates, "submodular", objective=objective, rule=rule)
    )
    even = lambda task, rates, seed: make_blocks(task.train, np.ones_like(rates), "random", seed=seed)
    chosen = [Setup("even", 1, even, True)]
    for every in (1, 2):
        chosen += [Setup(kind, every, random(kind), True) for kind in ("random", "class-balanced")]
        chosen += [Setup(objective, every, submodular(objective, "auto")) for objective in OBJECTIVES]
    chosen.append(Setup("random, all-reduce", 0, random("random"), True))
    chosen += [Setup("random, MATCHA", 2, random("random"), True, matcha=True)]
    chosen += [Setup(f"{OBJECTIVES[0]}, MATCHA", 2, submodular(OBJECTIVES[0], "auto"), matcha=True)]
    if not args.quick:
        chosen += [Setup(f"{f}, {rule}", 2, submodular(f, rule)) for f in OBJECTIVES for rule in RULES]
    return chosen


def optimizer(args: Args, steps: int) -> optax.GradientTransformation:
    """Plain SGD with a step-wise schedule."""
    return optax.sgd(optax.piecewise_constant_schedule(args.learning_rate, {steps // 2: 0.1, 3 * steps // 4: 0.1}))


class Snapshots:
    """A hook that keeps the mean of the workers' parameters, to be evaluated after the run."""

    def __init__(self, every: int):
        self.every, self.kept = every, []

    def __call__(self, record: Any, state: Any) -> None:
        if record.step % self.every == 0:
            self.kept.append((record.step, record.seconds, jax.tree.map(np.array, average(state).params)))


def run(
    args: Args, setup: Setup, task: Task, blocks: Blocks, evaluate: Callable[[Any], list[float]], seed: int
) -> Curve:
    """Train once and return the curve."""
    rates = speeds(args)
    sync: Sync = AllReduce()
    if setup.every:
        budget = args.matcha_budget if setup.matcha else None
        sync = Decentralized(args.topology, setup.every, budget, args.faithful)
    steps_per_epoch = -(-len(task.train) // args.batch_size)
    simulation = Simulation(constant(rates), row_time=args.row_time / 1e3)
    snapshots = Snapshots(max(1, steps_per_epoch // 4))
    with Trainer(
        task.model,
        optimizer(args, args.epochs * steps_per_epoch),
        batch_size=args.batch_size,
        controller="equal",
        partition=blocks,
        sync=sync,
        devices=jax.devices()[: len(rates)],
        speeds=simulation,
        seed=seed,
    ) as trainer:
        _, history = trainer.fit(trainer.init(task.model.params), task.train, epochs=args.epochs, hooks=[snapshots])
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(task.model.params)) / 1e6
    evaluated = [evaluate(params) for _, _, params in snapshots.kept]
    return Curve(
        step=[step for step, _, _ in snapshots.kept],
        seconds=[seconds for _, seconds, _ in snapshots.kept],
        loss=[loss for loss, _ in evaluated],
        accuracy=[accuracy for _, accuracy in evaluated],
        sent_mb=[sent(sync, len(rates), step, seed) * size for step, _, _ in snapshots.kept],
        overruns=history.overruns / max(simulation.phases, 1),
    )


def sent(sync: Sync, workers: int, steps: int, seed: int) -> float:
    """How often a worker has sent its parameters or gradients on average; an all-reduce counts 2 (N - 1) / N."""
    per_all_reduce = 2 * (workers - 1) / workers
    if not isinstance(sync, Decentralized):
        return per_all_reduce * steps
    mixing = sync.mixing(workers)
    if mixing.uniform:
        return per_all_reduce * len(range(0, steps, sync.mix_every))
    links_R = np.array([len(pairs) / workers for pairs in mixing.rounds])
    return float(sum(links_R[mixing.active(seed, k)].sum() for k in range(0, steps, sync.mix_every)))


def make_evaluate(task: Task) -> Callable[[Any], list[float]]:
    """Make a function: parameters -> loss on (at most 10,000) training samples, accuracy on the test samples."""
    read = lambda source, most: jax.device_put(fetch(source, np.arange(min(len(source), most))))
    train, test = read(task.train, MAX_SAMPLES), read(task.test, len(task.test))

    @jax.jit
    def evaluate(params: Any, train: Any, test: Any) -> Any:
        of = lambda batch: task.model.eval_fn(params, batch, jax.random.split(jax.random.key(0), len(batch["label"])))
        return of(train).loss_b.mean(), of(test).metrics["accuracy"].mean()

    return lambda params: [float(value) for value in evaluate(params, train, test)]


def speeds(args: Args) -> np.ndarray:
    """The speeds of --speeds."""
    return np.array([float(part) for part in args.speeds.split(",")])


def measure(args: Args, console: Console) -> dict[str, Any]:
    """All curves: "NAME, F=F" -> one curve per seed."""
    rates, found = speeds(args), dict[str, Any]()
    cached: dict[str, Blocks] = {}
    for seed in range(args.seeds):
        task = make_task(args.dataset, "mlp", seed=seed, hidden=(64, 64), dropout=0.0)
        evaluate = make_evaluate(task)
        for setup in setups(args):
            if setup.random or setup.name not in cached:
                cached[setup.name] = setup.blocks(task, rates, seed)
            blocks = cached[setup.name]
            curve = run(args, setup, task, blocks, evaluate, seed)
            steps, seconds = (formatted(curve.reached(args.target, axis), ".0f") for axis in ("step", "seconds"))
            console.print(
                f"seed {seed}  {setup.name:28} F={setup.every}  {steps:>5} steps  {seconds:>4} s  "
                f"accuracy {curve.accuracy[-1]:.3f}",
                soft_wrap=True,
            )
            found.setdefault(f"{setup.name}, F={setup.every}", []).append(asdict(curve))
    return found


def summary(args: Args, found: dict[str, Any]) -> list[dict[str, Any]]:
    """A row per setup: means over seeds, and steps relative to random blocks of the same F and seed."""
    rows = []
    for name, saved in found.items():
        curves = [Curve(**curve) for curve in saved]
        name, _, every = name.rpartition(", F=")
        drawn = ", MATCHA" if name.endswith("MATCHA") else ""
        baseline = [Curve(**curve) for curve in found[f"random{drawn}, F={every if every != '0' else 1}"]]
        steps, seconds, sent_mb = (
            np.array([curve.reached(args.target, axis) for curve in curves]) for axis in ("step", "seconds", "sent_mb")
        )
        ratios = steps / np.array([curve.reached(args.target, "step") for curve in baseline])
        rows.append(
            {
                "line": name,
                "every": int(every),
                "steps": float(steps.mean()),
                "seconds": float(seconds.mean()),
                "sent_mb": float(sent_mb.mean()),
                "link_seconds": float((seconds + 8 * sent_mb / args.link).mean()),
                "against_random": float(ratios.mean()),
                "against_random_sd": float(ratios.std(ddof=1)) if len(ratios) > 1 else 0.0,
                "accuracy": float(np.mean([curve.accuracy[-1] for curve in curves])),
                "loss": float(np.mean([curve.loss[-1] for curve in curves])),
                "overruns": float(np.mean([curve.overruns for curve in curves])),
            }
        )
    return rows


def show(args: Args, rows: list[dict[str, Any]], console: Console) -> None:
    """Print the table."""
    table = Table(box=None, padding=(0, 1), pad_edge=False, header_style="bold")
    for column in ("", "F", "steps", "s", "link s", "against random", "accuracy"):
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    for row in rows:
        table.add_row(
            row["line"],
            str(row["every"] or "–"),
            formatted(row["steps"], ".0f"),
            formatted(row["seconds"], ".1f"),
            formatted(row["link_seconds"], ".1f"),
            f"{formatted(row['against_random'], '.2f')} ± {formatted(row['against_random_sd'], '.2f')}",
            f"{row['accuracy']:.4f}",
        )
    console.print(f"\nSteps and seconds to a training loss of {args.target:g}; test accuracy at the end.")
    console.print(table)
    if (worst := max(row["overruns"] for row in rows)) > 0.02:
        console.print(f"Up to {worst:.0%} of the local phases took longer than simulated: compare steps, not seconds.")


def formatted(value: float, spec: str) -> str:
    """A number, or a dash for NaN."""
    return "–" if np.isnan(value) else f"{value:{spec}}"


def main(args: Args) -> list[dict[str, Any]]:
    """Measure, print the table and return its rows."""
    if args.quick:
        args = replace(args, seeds=1, epochs=max(1, args.epochs // 3), target=3 * args.target)
    chosen_devices(len(speeds(args)))
    console, start = Console(highlight=False), time.perf_counter()
    found = measure(args, console)
    rows = summary(args, found)
    show(args, rows, console)
    console.print(f"{args.dataset}, speeds {args.speeds}, {args.seeds} seeds, {time.perf_counter() - start:.0f} s")
    if args.json is not None:
        arguments = {name: str(value) if isinstance(value, Path) else value for name, value in asdict(args).items()}
        write_json(args.json, {"args": arguments, "rows": rows, "curves": found})  # NaN, a missed target, as null
    return rows


if __name__ == "__main__":
    main(tyro.cli(Args, config=(tyro.conf.FlagCreatePairsOff,)))
