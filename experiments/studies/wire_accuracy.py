"""Do 16 and 8 bits between processes, or delayed updates, change the accuracy? Paired over seeds against float32.

    python -m hetjax launch --processes 2 -- experiments/studies/wire_accuracy.py --json FILE [--seeds 5] [--quick]

Two processes train the same small CNN on images and the same small transformer on text, once per format and seed: same
initial parameters, same order of samples. Differences in test accuracy are paired by seed, in points, with the 95%
interval of Student's t. A difference is demonstrated small if the whole interval lies within 0.5 points. With
`--figure FILE` the training losses of the first seed are drawn.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro

from hetjax.launch.options import Switch, optional

FASHION = Path("/usr/share/datasets/fashion-mnist")
ARMS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"wire": "bfloat16"},
    "int8": {"wire": "int8"},
    "delay": {"delay": 1},
    "int8+delay": {"wire": "int8", "delay": 1},
}
QUANTILE = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365}  # of Student's t by number of pairs
BOUND = 0.5  # points
MEAN_OF = 20  # steps of a point of the figure


@dataclass(frozen=True)
class Options:
    """The command line."""

    json: Annotated[Path | None, optional("FILE")] = None
    """write results to this file; seeds that are in it are not run again"""
    models: str = "cnn,transformer"
    seeds: int = 5
    steps: int = 600
    arms: str = ",".join(ARMS)
    """formats to compare with float32, comma-separated"""
    figure: Annotated[Path | None, optional("FILE")] = None
    """draw the losses of the first seed"""
    quick: Switch = False
    """two seeds, few steps: a check that it runs"""


def interval(differences: Sequence[float]) -> tuple[float, float]:
    """Mean of paired differences, and half the width of its 95% interval."""
    values = np.asarray(differences, float)
    return float(values.mean()), float(QUANTILE[len(values)] * values.std(ddof=1) / len(values) ** 0.5)


def verdict(differences: Sequence[float]) -> str:
    """Whether the interval shows that a difference is small."""
    mean, half = interval(differences)
    if abs(mean) + half <= BOUND:
        return "within"
    return "outside" if abs(mean) - half > BOUND else "open"


def train_and_test(model: str, seed: int, options: dict[str, Any], steps: int) -> dict[str, Any]:
    """Test loss and accuracy, in percent, after training in all processes; and means of the losses on the way."""
    import optax

    from hetjax import Chunked
    from hetjax.trainer import Trainer
    from hetjax.zoo.tasks import make_task

    if model == "transformer":
        task, rate, batch = make_task("text", "transformer", seed=seed, width=64, dropout=0.1), 2e-3, 32
    else:
        dataset = f"idx:{FASHION}" if FASHION.is_dir() else "digits"
        task, rate, batch = make_task(dataset, "cnn", seed=seed, widths=(8, 16), dropout=0.1), 4e-3, 128
    schedule = optax.warmup_cosine_decay_schedule(0.0, rate, steps // 10, steps)
    given = {"controller": "equal", "engine": Chunked(rungs=[batch // 2]), "seed": seed, **options}
    with Trainer(task.model, optax.adam(schedule), batch_size=batch, **given) as trainer:
        state, history = trainer.fit(trainer.init(task.model.params, task.model.model_state), task.train, steps=steps)
        tested = trainer.evaluate(state, task.test)
    means = np.array(history.losses[: steps // MEAN_OF * MEAN_OF]).reshape(-1, MEAN_OF).mean(axis=1)
    return {"loss": float(tested["loss"]), "accuracy": 100 * float(tested["accuracy"]), "losses": means.tolist()}


def draw(found: dict[str, Any], path: Path) -> None:
    """The losses of the first seed of every model and arm."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.2 * len(found), 2.8), layout="constrained")
    for axes, (model, by_arm) in zip(figure.subplots(1, len(found), squeeze=False)[0], found.items(), strict=True):
        for arm, runs in by_arm.items():
            losses = runs["0"]["losses"]
            axes.plot(MEAN_OF * (np.arange(len(losses)) + 0.5), losses, label=arm, linewidth=1)
        axes.set(title=model, xlabel="step", yscale="log")
        for formatter in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
            formatter("{x:g}")
        axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.axes[0].set_ylabel(f"training loss, mean of {MEAN_OF} steps")
    figure.savefig(path)


def main(args: Options) -> int:
    """Run all arms; process 0 writes and prints."""
    from hetjax import processes
    from hetjax.fleet.distributed import initialize, leave

    initialize(wait_limit=300)
    seeds, steps = (2, 20) if args.quick else (args.seeds, args.steps)
    found: dict[str, Any] = {}
    if processes.first() and args.json is not None and args.json.exists():
        found = json.loads(args.json.read_text())
    found = processes.gather(found)[0]
    arms = ["float32", *(name for name in args.arms.split(",") if name != "float32")]
    for seed, model, arm in itertools.product(range(seeds), args.models.split(","), arms):
        runs = found.setdefault(model, {}).setdefault(arm, {})
        if str(seed) in runs:
            continue
        runs[str(seed)] = train_and_test(model, seed, ARMS[arm], steps)
        if processes.first():
            print(f"{model}, seed {seed}, {arm}: accuracy {runs[str(seed)]['accuracy']:.2f}%", flush=True)
            if args.json is not None:
                args.json.write_text(json.dumps(found, indent=1) + "\n")
    for model, by_arm in found.items() if processes.first() else ():
        for arm, runs in by_arm.items():
            if arm != "float32" and len(runs) > 1:
                pairs = [run["accuracy"] - by_arm["float32"][seed]["accuracy"] for seed, run in runs.items()]
                mean, half = interval(pairs)
                print(f"{model}, {arm} against float32: {mean:+.2f} ± {half:.2f} points, {verdict(pairs)} {BOUND}")
    if processes.first() and args.figure is not None:
        draw(found, args.figure)
    leave(0, together=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options, config=(tyro.conf.FlagCreatePairsOff,))))
