"""Submodular partitions: how time and memory grow, and what the blocks are worth beside chance.

    python experiments/bench_partition.py --dataset idx:/usr/share/datasets/fashion-mnist --json FILE    # 15 minutes
    python experiments/bench_partition.py --quick                                                        # 15 s

Expected on Fashion-MNIST, two cores: growth with the square of a class; 60,000 samples in 7 s (graph cut) to 31 s
(facility location), 0.63 GB. At equal rates every rule is closer to the whole than chance (0.36 and 0.66 of its
distances). At rates 4:2:1:1 only `parts` is (0.43 and 0.64); the published min-block is 5 to 6 times farther away.
Classes of 6,000 cut into parts lose 0.02% to 0.1% of f. A re-cut moves a third of what a cut from scratch does.

Growth: one class of n samples, kernel and greedy apart, and the exponent of a power law through the largest two. Whole:
the whole data set in a process of its own, with its peak memory (that of an idle process named too). Split: classes cut
into k-means parts first, for data beyond exact kernels, and what f loses by it. Re-cut: samples moved when the rates
change, beside a cut from scratch. Quality: distances of blocks to the whole, every rule and objective beside random
partitions (mean of several); below 1 in `over chance` is closer to the whole than a class-balanced random partition.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from hetjax.data import load
from hetjax.data.source_blocks import read_classes, read_features
from hetjax.sampling.blocks import Blocks, class_balanced_blocks, encode_classes, quotas, random_blocks
from hetjax.sampling.quality import Quality, quality
from hetjax.sampling.submodular import OBJECTIVES, RULES, recut, submodular_blocks
from hetjax.sampling.submodular.cut import assign_owners, class_kernels
from hetjax.sampling.submodular.objectives import gaussian_kernel, median_bandwidth, total_value

RATES = {"equal": [1.0, 1.0, 1.0, 1.0], "unequal": [4.0, 2.0, 1.0, 1.0]}


@dataclass(frozen=True)
class Args:
    json: Path | None = None
    """Where to write the results as JSON."""
    dataset: str = "digits"
    """What to cut; idx:DIR of Fashion-MNIST for the figures that count."""
    features: str = "raw"
    """raw, pca or pca:COMPONENTS."""
    only: str | None = None
    """Some of growth, whole, split, recut and quality, with commas between."""
    quick: bool = False
    """Digits, small classes, fewer random partitions."""


def main(args: Args) -> dict[str, Any]:
    console = Console(width=80, highlight=False)
    dataset = "digits" if args.quick else args.dataset
    source = load(dataset)
    features_DxF = read_features(source, args.features)
    classes_D = read_classes(source, features_DxF)
    console.print(f"{dataset}: {len(source):,} samples, features {args.features} of {features_DxF.shape[1]}")
    results: dict[str, Any] = {"dataset": dataset, "features": args.features, "samples": len(source)}
    benches: dict[str, Callable[[], Any]] = {
        "growth": lambda: show_growth(growth(args, features_DxF, classes_D), console),
        "whole": lambda: show_whole(whole(dataset, args.features), console),
        "split": lambda: show_split(split(features_DxF, classes_D), console),
        "recut": lambda: show_recut(moved(features_DxF, classes_D), console),
        "quality": lambda: show_quality(worth(features_DxF, classes_D, 3 if args.quick else 5), console),
    }
    for name in args.only.split(",") if args.only else benches:
        results[name] = benches[name]()
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))
    return results


def growth(args: Args, features_DxF: np.ndarray, classes_D: np.ndarray) -> list[dict[str, Any]]:
    """Seconds for one class of n samples; samples of other classes fill up where one class is too small."""
    sizes = (250, 500, 1000) if args.quick else (1500, 3000, 6000, 12000)
    order_D = np.argsort(classes_D, kind="stable")
    lines = []
    for size in (size for size in sizes if size <= len(order_D)):
        some_VxF = features_DxF[order_D[:size]]
        kernel_s, sim_VxV = timed(lambda x=some_VxF: gaussian_kernel(x, median_bandwidth(x)))
        line: dict[str, Any] = {"n": size, "kernel": kernel_s}
        for objective in OBJECTIVES:
            for name, rates in RATES.items():
                rule, rates_W = "min-block" if name == "equal" else "parts", np.array(rates)
                given = (sim_VxV, quotas(np.array([size]), rates_W)[0], rates_W, objective, rule)
                line[f"{objective}, {rule}"], _ = timed(lambda given=given: assign_owners(*given))
        lines.append(line)
    return lines


def whole(dataset: str, features: str) -> dict[str, Any]:
    """The whole data set for 4 workers, each cut in a fresh process."""
    out: dict[str, Any] = {"idle_gb": apart(_idle)}
    for objective in OBJECTIVES:
        for name, rates in RATES.items():
            out[f"{objective}, {name} rates"] = apart(_cut, dataset, features, objective, rates)
    return out


def apart(work: Callable[..., Any], *given: Any) -> Any:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(work, *given).result()


def peak_gb() -> float:
    """The most memory this process has had; its maxrss would count that of the process it was forked from too."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) / 2**20
    raise OSError("There is no VmHWM in /proc/self/status: peak memory is measured on Linux only.")


def _idle() -> float:
    return peak_gb()


def _cut(dataset: str, features: str, objective: str, rates: list[float]) -> dict[str, Any]:
    source = load(dataset)
    read_s, features_DxF = timed(lambda: read_features(source, features))
    classes_D = read_classes(source, features_DxF)
    cut_s, blocks = timed(lambda: submodular_blocks(features_DxF, classes_D, rates, objective=objective))
    return {"rule": blocks.settings["rule"], "features_s": read_s, "cut_s": cut_s, "peak_gb": peak_gb()}


def split(features_DxF: np.ndarray, classes_D: np.ndarray) -> list[dict[str, Any]]:
    """Time and f with classes cut into ever smaller parts first; f always of the whole classes."""
    codes_D, sizes_L = encode_classes(classes_D)
    few_D = np.flatnonzero(codes_D < 2)  # two classes tell as much as ten
    features_DxF, classes_D = features_DxF[few_D], classes_D[few_D]
    largest, lines = int(sizes_L.max()), []
    for parts in (1, 2, 4, 8):
        for objective in OBJECTIVES:
            limit = -(-largest // parts)
            cut = lambda n=limit, f=objective: submodular_blocks(
                features_DxF, classes_D, RATES["unequal"], objective=f, largest=n
            )
            seconds, blocks = timed(cut)
            lines.append({"parts": parts, "objective": objective, "seconds": seconds, "blocks": blocks})
    for members, sim_VxV, _ in class_kernels(features_DxF, classes_D, "median"):
        for line in lines:
            line["f"] = line.get("f", 0.0) + total_value(line["objective"], sim_VxV, line["blocks"].owner_D[members])
    for line in lines:
        whole_f = next(x["f"] for x in lines if x["objective"] == line["objective"])
        line["lost"] = 1.0 - line["f"] / whole_f
        del line["blocks"]
    return lines


def moved(features_DxF: np.ndarray, classes_D: np.ndarray) -> list[dict[str, Any]]:
    few_D = np.flatnonzero(encode_classes(classes_D)[0] < 2)
    features_DxF, classes_D = features_DxF[few_D], classes_D[few_D]
    lines = []
    for objective in OBJECTIVES:
        old = submodular_blocks(features_DxF, classes_D, RATES["equal"], objective=objective)
        for rates in (RATES["unequal"], [1.0, 1.0, 1.0, 0.5], [1.0, 1.0, 1.0, 0.0]):
            new = recut(old, features_DxF, rates)
            line = {"objective": objective, "rates": rates, "samples": old.size, "moved": new.moved}
            lines.append(line | {"fresh_moved": new.fresh_moved, "lost": new.lost})
    return lines


def worth(features_DxF: np.ndarray, classes_D: np.ndarray, seeds: int) -> dict[str, Any]:
    """Every rule and objective beside chance, at equal and unequal rates."""
    out = {}
    for name, rates in RATES.items():
        partitions: dict[str, Blocks] = {}
        for seed in range(seeds):
            partitions[f"random {seed}"] = random_blocks(classes_D, np.array(rates), seed)
            partitions[f"class-balanced {seed}"] = class_balanced_blocks(classes_D, np.array(rates), seed)
        for objective in OBJECTIVES:
            for rule in RULES:
                partitions[f"{objective}, {rule}"] = submodular_blocks(
                    features_DxF, classes_D, rates, objective=objective, rule=rule
                )
        found = quality(features_DxF, partitions)
        kinds = {partition.rstrip(" 0123456789") for partition in found}
        mean = {kind: averaged([q for p, q in found.items() if p.startswith(kind)]) for kind in sorted(kinds)}
        chance = mean["class-balanced"]
        for line in mean.values():
            ratios = [line[key] / chance[key] for key in ("mean", "within", "covariance")]
            line["over_chance"] = math.prod(ratios) ** (1 / len(ratios))
        out[name] = {"rates": rates, "partitions": mean}
    return out


def averaged(found: list[Quality]) -> dict[str, float]:
    """Means over the blocks, and over the partitions where there are several of a kind."""
    over = lambda values: float(np.mean(list(values)))
    return {
        "mean": over(q.mean_distance_W.mean() for q in found),
        "worst": over(q.mean_distance_W.max() for q in found),
        "within": over(q.within_distance_W.mean() for q in found),
        "covariance": over(q.covariance_distance_W.mean() for q in found),
        **{f: over(q.values[f].sum() for q in found) for f in OBJECTIVES},
    }


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    began = time.perf_counter()
    done = work()
    return time.perf_counter() - began, done


def show_growth(lines: list[dict[str, Any]], console: Console) -> dict[str, Any]:
    names = [name for name in lines[0] if name != "n"]
    short = {"facility-location": "location", "graph-cut": "cut"}
    label = lambda name: "\n".join(short.get(part, part) for part in name.split(", "))
    table = plain_table("one class of", *map(label, names))
    for line in lines:
        table.add_row(f"{line['n']:,}", *(f"{line[name]:.2f} s" for name in names))
    last, before = lines[-1], lines[-2]
    power = {name: math.log(last[name] / before[name]) / math.log(last["n"] / before["n"]) for name in names}
    table.add_row("exponent of n", *(f"{power[name]:.1f}" for name in names))
    console.print(table, "")
    return {"seconds": lines, "exponent": power}


def show_whole(found: dict[str, Any], console: Console) -> dict[str, Any]:
    table = plain_table("the whole, 4 workers", "rule", "features", "cut", "peak memory")
    for name, line in found.items():
        if name != "idle_gb":
            seconds = (f"{line['features_s']:.1f} s", f"{line['cut_s']:.1f} s")
            table.add_row(name, line["rule"], *seconds, f"{line['peak_gb']:.2f} GB")
    table.add_row("an idle process", "", "", "", f"{found['idle_gb']:.2f} GB")
    console.print(table, "")
    return found


def show_split(lines: list[dict[str, Any]], console: Console) -> list[dict[str, Any]]:
    table = plain_table("classes cut into", "objective", "seconds", "f", "lost")
    for line in lines:
        shown = (line["objective"], f"{line['seconds']:.1f}", f"{line['f']:,.1f}", f"{line['lost']:.3%}")
        table.add_row(f"{line['parts']} or more" if line["parts"] > 1 else "1: exact", *shown)
    console.print(table, "")
    return lines


def show_recut(lines: list[dict[str, Any]], console: Console) -> list[dict[str, Any]]:
    table = plain_table("re-cut from equal to", "objective", "moved", "from scratch", "f lost")
    for line in lines:
        share = [f"{line[key] / line['samples']:.1%}" for key in ("moved", "fresh_moved")]
        table.add_row(", ".join(f"{r:g}" for r in line["rates"]), line["objective"], *share, f"{line['lost']:.3%}")
    console.print(table, "")
    return lines


def show_quality(found: dict[str, Any], console: Console) -> dict[str, Any]:
    for name, case in found.items():
        table = plain_table(f"{name} rates", "over chance", "mean", "worst", "within", "covar.", "f location")
        for partition, line in sorted(case["partitions"].items(), key=lambda item: item[1]["over_chance"]):
            numbers = [f"{line[key]:.4f}" for key in ("mean", "worst", "within", "covariance")]
            table.add_row(partition, f"{line['over_chance']:.2f}", *numbers, f"{line['facility-location']:,.0f}")
        console.print(table, "")
    return found


def plain_table(*columns: str) -> Table:
    table = Table(box=None, padding=(0, 1), pad_edge=False, header_style="bold")
    for place, column in enumerate(columns):
        table.add_column(column, justify="left" if place == 0 else "right")
    return table


if __name__ == "__main__":
    main(tyro.cli(Args))
