"""Submodular partitions: how time and memory grow, and how the blocks compare with random ones.

    python experiments/bench_partition.py --dataset idx:/usr/share/datasets/fashion-mnist --json FILE    # 15 minutes
    python experiments/bench_partition.py --quick                                                        # 15 s

growth    seconds for one class of n samples, kernel and greedy separately, and the exponent of n
whole     the whole dataset for 4 workers, each cut in a fresh process, with its peak memory
split     classes split by k-means first, for data beyond exact kernels, and what f loses by it
recut     samples that move when the rates change, beside a partition from scratch
quality   distances of blocks to the dataset, every rule and objective beside random partitions (mean of several);
          `over chance` is the ratio to class-balanced random blocks: below 1 is closer to the dataset

Expected on Fashion-MNIST: time grows with the square of a class; at unequal rates only the rule `parts` is closer than
random blocks. Measured figures are in docs/benchmarks.md.
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
from benches.flags import JsonFile, Switch, Text, from_flags
from rich.console import Console
from rich.table import Table

from hetjax.data import load
from hetjax.data.source_blocks import read_classes, read_features
from hetjax.sampling.blocks import Blocks, class_balanced_blocks, encode_classes, quotas, random_blocks
from hetjax.sampling.quality import Quality, quality
from hetjax.sampling.submodular import OBJECTIVES, RULES, recut, submodular_blocks
from hetjax.sampling.submodular.greedy import assign_owners, class_kernels
from hetjax.sampling.submodular.objectives import gaussian_kernel, median_bandwidth, total_value

RATES = {"equal": [1.0, 1.0, 1.0, 1.0], "unequal": [4.0, 2.0, 1.0, 1.0]}


@dataclass(frozen=True)
class Args:
    """Benchmark submodular partitions."""

    json: JsonFile = None
    """File for the results as JSON."""
    dataset: str = "digits"
    """Dataset to partition; idx:DIR of Fashion-MNIST for the published figures."""
    features: str = "raw"
    """raw, pca or pca:COMPONENTS."""
    only: Text = None
    """Comma-separated subset of growth, whole, split, recut and quality."""
    quick: Switch = False
    """Digits, small classes, fewer random partitions."""


def main(args: Args) -> dict[str, Any]:
    """Run the chosen benchmarks, print their tables, and return their results."""
    console = Console(width=80, highlight=False)
    dataset = "digits" if args.quick else args.dataset
    source = load(dataset)
    features_DxF = read_features(source, args.features)
    classes_D = read_classes(source, features_DxF)
    console.print(f"{dataset}: {len(source):,} samples, {features_DxF.shape[1]} features ({args.features})")
    results: dict[str, Any] = {"dataset": dataset, "features": args.features, "samples": len(source)}
    benches: dict[str, Callable[[], Any]] = {
        "growth": lambda: show_growth(growth(args, features_DxF, classes_D), console),
        "whole": lambda: show_whole(full_dataset(dataset, args.features), console),
        "split": lambda: show_split(split(features_DxF, classes_D), console),
        "recut": lambda: show_recut(recut_costs(features_DxF, classes_D), console),
        "quality": lambda: show_quality(compare_quality(features_DxF, classes_D, 3 if args.quick else 5), console),
    }
    for name in args.only.split(",") if args.only else benches:
        results[name] = benches[name]()
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))
    return results


def growth(args: Args, features_DxF: np.ndarray, classes_D: np.ndarray) -> list[dict[str, Any]]:
    """Seconds for one class of n samples, filled up from other classes if it is too small."""
    sizes = (250, 500, 1000) if args.quick else (1500, 3000, 6000, 12000)
    order_D = np.argsort(classes_D, kind="stable")
    rows = []
    for size in (size for size in sizes if size <= len(order_D)):
        some_VxF = features_DxF[order_D[:size]]
        kernel_s, sim_VxV = timed(lambda x=some_VxF: gaussian_kernel(x, median_bandwidth(x)))
        row: dict[str, Any] = {"n": size, "kernel": kernel_s}
        for objective in OBJECTIVES:
            for name, rates in RATES.items():
                rule, rates_W = "min-block" if name == "equal" else "parts", np.array(rates)
                given = (sim_VxV, quotas(np.array([size]), rates_W)[0], rates_W, objective, rule)
                row[f"{objective}, {rule}"], _ = timed(lambda given=given: assign_owners(*given))
        rows.append(row)
    return rows


def full_dataset(dataset: str, features: str) -> dict[str, Any]:
    """Seconds and peak memory for the whole dataset and 4 workers, each in a fresh process."""
    out: dict[str, Any] = {"idle_gb": in_fresh_process(peak_gb)}
    for objective in OBJECTIVES:
        for name, rates in RATES.items():
            out[f"{objective}, {name} rates"] = in_fresh_process(
                _partition_dataset, dataset, features, objective, rates
            )
    return out


def in_fresh_process(work: Callable[..., Any], *given: Any) -> Any:
    """Call a function in a new process."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(work, *given).result()


def peak_gb() -> float:
    """Peak memory of this process; ru_maxrss would include the process it was forked from."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) / 2**20
    raise OSError("There is no VmHWM in /proc/self/status: peak memory can only be measured on Linux.")


def _partition_dataset(dataset: str, features: str, objective: str, rates: list[float]) -> dict[str, Any]:
    source = load(dataset)
    read_s, features_DxF = timed(lambda: read_features(source, features))
    classes_D = read_classes(source, features_DxF)
    cut_s, blocks = timed(lambda: submodular_blocks(features_DxF, classes_D, rates, objective=objective))
    return {"rule": blocks.settings["rule"], "features_s": read_s, "cut_s": cut_s, "peak_gb": peak_gb()}


def split(features_DxF: np.ndarray, classes_D: np.ndarray) -> list[dict[str, Any]]:
    """Seconds and f with classes split into ever smaller parts first; f is that of the unsplit classes."""
    codes_D, sizes_L = encode_classes(classes_D)
    few_D = np.flatnonzero(codes_D < 2)  # two classes show as much as ten
    features_DxF, classes_D = features_DxF[few_D], classes_D[few_D]
    largest, rows = int(sizes_L.max()), []
    for parts in (1, 2, 4, 8):
        for objective in OBJECTIVES:
            limit = -(-largest // parts)
            cut = lambda n=limit, f=objective: submodular_blocks(
                features_DxF, classes_D, RATES["unequal"], objective=f, largest=n
            )
            seconds, blocks = timed(cut)
            rows.append({"parts": parts, "objective": objective, "seconds": seconds, "blocks": blocks})
    for members, sim_VxV, _ in class_kernels(features_DxF, classes_D, "median"):
        for row in rows:
            row["f"] = row.get("f", 0.0) + total_value(row["objective"], sim_VxV, row["blocks"].owner_D[members])
    for row in rows:
        whole_f = next(x["f"] for x in rows if x["objective"] == row["objective"])
        row["lost"] = 1.0 - row["f"] / whole_f
        del row["blocks"]
    return rows


def recut_costs(features_DxF: np.ndarray, classes_D: np.ndarray) -> list[dict[str, Any]]:
    """Samples that a re-cut and a partition from scratch move, for several new rates."""
    few_D = np.flatnonzero(encode_classes(classes_D)[0] < 2)
    features_DxF, classes_D = features_DxF[few_D], classes_D[few_D]
    rows = []
    for objective in OBJECTIVES:
        old = submodular_blocks(features_DxF, classes_D, RATES["equal"], objective=objective)
        for rates in (RATES["unequal"], [1.0, 1.0, 1.0, 0.5], [1.0, 1.0, 1.0, 0.0]):
            new = recut(old, features_DxF, rates)
            row = {"objective": objective, "rates": rates, "samples": old.size, "moved": new.moved}
            rows.append(row | {"fresh_moved": new.fresh_moved, "lost": new.lost})
    return rows


def compare_quality(features_DxF: np.ndarray, classes_D: np.ndarray, seeds: int) -> dict[str, Any]:
    """Every rule and objective beside random partitions, at equal and unequal rates."""
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
        mean = {kind: mean_quality([q for p, q in found.items() if p.startswith(kind)]) for kind in sorted(kinds)}
        baseline = mean["class-balanced"]
        for row in mean.values():
            ratios = [row[key] / baseline[key] for key in ("mean", "within", "covariance")]
            row["over_chance"] = math.prod(ratios) ** (1 / len(ratios))
        out[name] = {"rates": rates, "partitions": mean}
    return out


def mean_quality(found: list[Quality]) -> dict[str, float]:
    """Means over blocks and over partitions."""
    over = lambda values: float(np.mean(list(values)))
    return {
        "mean": over(q.mean_distance_W.mean() for q in found),
        "worst": over(q.mean_distance_W.max() for q in found),
        "within": over(q.within_distance_W.mean() for q in found),
        "covariance": over(q.covariance_distance_W.mean() for q in found),
        **{f: over(q.values[f].sum() for q in found) for f in OBJECTIVES},
    }


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """Call a function; return its seconds and its result."""
    start = time.perf_counter()
    result = work()
    return time.perf_counter() - start, result


def show_growth(rows: list[dict[str, Any]], console: Console) -> dict[str, Any]:
    names = [name for name in rows[0] if name != "n"]
    short = {"facility-location": "location", "graph-cut": "cut"}
    label = lambda name: "\n".join(short.get(part, part) for part in name.split(", "))
    table = plain_table("one class of", *map(label, names))
    for row in rows:
        table.add_row(f"{row['n']:,}", *(f"{row[name]:.2f} s" for name in names))
    last, before = rows[-1], rows[-2]
    power = {name: math.log(last[name] / before[name]) / math.log(last["n"] / before["n"]) for name in names}
    table.add_row("exponent of n", *(f"{power[name]:.1f}" for name in names))
    console.print(table, "")
    return {"seconds": rows, "exponent": power}


def show_whole(found: dict[str, Any], console: Console) -> dict[str, Any]:
    table = plain_table("whole dataset, 4 workers", "rule", "features", "cut", "peak memory")
    for name, row in found.items():
        if name != "idle_gb":
            seconds = (f"{row['features_s']:.1f} s", f"{row['cut_s']:.1f} s")
            table.add_row(name, row["rule"], *seconds, f"{row['peak_gb']:.2f} GB")
    table.add_row("idle process", "", "", "", f"{found['idle_gb']:.2f} GB")
    console.print(table, "")
    return found


def show_split(rows: list[dict[str, Any]], console: Console) -> list[dict[str, Any]]:
    table = plain_table("classes split into", "objective", "seconds", "f", "lost")
    for row in rows:
        shown = (row["objective"], f"{row['seconds']:.1f}", f"{row['f']:,.1f}", f"{row['lost']:.3%}")
        table.add_row(f"{row['parts']} or more" if row["parts"] > 1 else "1: exact", *shown)
    console.print(table, "")
    return rows


def show_recut(rows: list[dict[str, Any]], console: Console) -> list[dict[str, Any]]:
    table = plain_table("re-cut from equal to", "objective", "moved", "from scratch", "f lost")
    for row in rows:
        share = [f"{row[key] / row['samples']:.1%}" for key in ("moved", "fresh_moved")]
        table.add_row(", ".join(f"{r:g}" for r in row["rates"]), row["objective"], *share, f"{row['lost']:.3%}")
    console.print(table, "")
    return rows


def show_quality(found: dict[str, Any], console: Console) -> dict[str, Any]:
    for name, case in found.items():
        table = plain_table(f"{name} rates", "over chance", "mean", "worst", "within", "covar.", "f location")
        for partition, row in sorted(case["partitions"].items(), key=lambda item: item[1]["over_chance"]):
            numbers = [f"{row[key]:.4f}" for key in ("mean", "worst", "within", "covariance")]
            table.add_row(partition, f"{row['over_chance']:.2f}", *numbers, f"{row['facility-location']:,.0f}")
        console.print(table, "")
    return found


def plain_table(*columns: str) -> Table:
    table = Table(box=None, padding=(0, 1), pad_edge=False, header_style="bold")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left")
    return table


if __name__ == "__main__":
    main(from_flags(Args))
