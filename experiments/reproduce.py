"""Run the headlines of the five papers again, each with the control that it left out.

    python experiments/reproduce.py [--quick] [--only 000,003] [--out docs]

000  dynamic partition (arXiv 2110.08941)      003  DASO (arXiv 2104.05588)
001  DBS (arXiv 2007.11831)                    004  Hogbatch (arXiv 2004.08771)
002  RCD-SGD (arXiv 2211.00839)

Training is real, time is virtual: see docs/reproduction.md, the page that a full run writes, for the rules and the
results. Less than 30 minutes on two cores, --quick less than 3. A full run begins with the quick ones, to fail early.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benches.flags import File, Switch, Text, Whole, from_flags
from rich import box
from rich.console import Console
from rich.table import Table
from studies.asynchrony import hogbatch
from studies.balancing import dynamic_batch_size, dynamic_partition
from studies.claims import Comparison
from studies.curves import FASHION, Scale
from studies.hierarchy import daso
from studies.neighbors import rcd_sgd
from studies.page import spent_words, summary_rows, write_page

SEEDS, QUICK_SEEDS = 5, 3
MISSING = (
    "Fashion-MNIST is not installed (Debian: apt-get install dataset-fashion-mnist): the digits of scikit-learn stand "
    "in, which are easier and fewer."
)
SPARSE = ("w8a", "covtype")


def show(found: list[Comparison], console: Console) -> None:
    """Print one line per comparison."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for column in ("", "setting", "reported", "ours", "against omitted controls", "what survives", "easier targets"):
        table.add_column(column, no_wrap=column == "")
    for claim, setting, _, *rest in summary_rows(found):
        table.add_row(claim, setting, *rest)
    console.print(table)


Spent = tuple[float, float]  # seconds, and seconds of CPU time


def timed(claim: Callable[..., list[Comparison]], *args: Any) -> tuple[list[Comparison], Spent]:
    """Run a claim; also the time it took."""
    wall, cpu = time.perf_counter(), time.process_time()
    found = claim(*args)
    return found, (time.perf_counter() - wall, time.process_time() - cpu)


def words_of(scale: Scale, files: dict[str, Path], spent: Spent, quick_spent: Spent | None) -> dict[str, str]:
    """What the page says about the data and the scale of a claim."""
    real, others = ([kind for kind in SPARSE if (kind in files) is given] for given in (True, False))
    sparse = [f"the real {' and '.join(real)}"] if real else []
    sparse += [f"generated in the shape of {' and '.join(others)}"] if others else []
    quick = "A quick run, with smaller data and fewer epochs: its verdicts mean little. " if scale.quick else ""
    return {
        "images": "Fashion-MNIST" if FASHION.is_dir() else "the digits of scikit-learn",
        "sparse": ", and ".join(sparse),
        "timed": str(scale.epochs(60)),
        "scale": f"{quick}{scale.seeds} seeds. {spent_words(spent, quick_spent)}",
    }


def main(
    quick: Switch = False,
    only: Text = None,
    out: File = None,
    seeds: Whole = None,
    w8a: File = None,
    covtype: File = None,
) -> int:
    """Reproduce the claims, print a table, and write the page.

    Args:
        quick: smaller data, fewer epochs and seeds: a check that it runs; its verdicts mean little.
        only: claims to run, comma-separated; all if empty.
        out: folder of the page (default: docs, with --quick runs/reproduction); other claims on it are kept.
        seeds: of each arm, and learning rates to try (default: 5, in quick runs 3).
        w8a: LIBSVM file to use instead of generated data of its shape.
        covtype: the same for covtype.
    """
    console, progress = Console(soft_wrap=False), Console(stderr=True, highlight=False)
    files = {kind: path for kind, path in (("w8a", w8a), ("covtype", covtype)) if path is not None}
    claims: dict[str, Callable[..., list[Comparison]]] = {
        "000": dynamic_partition,
        "001": dynamic_batch_size,
        "002": rcd_sgd,
        "003": daso,
        "004": partial(hogbatch, files=files),
    }
    chosen = sorted({part.strip() for part in (only or "").split(",") if part.strip()} or claims)
    wrong = [f"There is no claim {name!r}. Choose from {', '.join(claims)}." for name in chosen if name not in claims]
    wrong += [
        f"There is no file {path}: expected {kind} in the LIBSVM format."
        for kind, path in files.items()
        if not path.is_file()
    ]
    if seeds is not None and seeds < 1:
        wrong.append(f"--seeds is {seeds}: expected at least 1.")
    if wrong:
        console.print(f"error: {wrong[0]}", highlight=False, soft_wrap=True)
        return 2
    if not FASHION.is_dir():
        console.print(MISSING, highlight=False)
    quick_scale = Scale(seeds or QUICK_SEEDS, quick=True)
    scale = quick_scale if quick else Scale(seeds or SEEDS)
    began, found, words = time.perf_counter(), list[Comparison](), dict[str, dict[str, str]]()
    log = lambda text: progress.print(f"{time.perf_counter() - began:6.0f} s  {text}")
    quick_spent = {} if quick else {name: timed(claims[name], quick_scale, log)[1] for name in chosen}
    for name in chosen:
        own, spent = timed(claims[name], scale, log)
        found += own
        words[name] = words_of(scale, files, spent, quick_spent.get(name))
    show(found, console)
    folder = out or (Path("runs/reproduction") if quick else Path(__file__).parents[1] / "docs")
    page = write_page(found, folder, words)
    console.print(f"{time.perf_counter() - began:.0f} s; {page}", highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(from_flags(main))
