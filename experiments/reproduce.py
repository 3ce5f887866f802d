"""Run the headlines of the five papers again, each with the control that it left out.

    python experiments/reproduce.py [--quick] [--only 000,003] [--out docs]

000  dynamic partition (arXiv 2110.08941)      003  DASO (arXiv 2104.05588)
001  DBS (arXiv 2007.11831)                    004  Hogbatch (arXiv 2004.08771)
002  RCD-SGD (arXiv 2211.00839)

Training is real, time is virtual: see docs/reproduction.md, the page that a full run writes, for the rules and the
results. Less than 30 minutes on two cores, --quick less than 3.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import tyro
from rich import box
from rich.console import Console
from rich.table import Table
from studies.asynchrony import hogbatch
from studies.balancing import dynamic_batch_size, dynamic_partition
from studies.claims import Comparison
from studies.curves import FASHION, Scale
from studies.hierarchy import daso
from studies.neighbors import rcd_sgd
from studies.page import summary_rows, write_page

MISSING = (
    "Fashion-MNIST is not installed (Debian: apt-get install dataset-fashion-mnist): the digits of scikit-learn stand "
    "in, which are easier and fewer."
)


def show(found: list[Comparison], console: Console) -> None:
    """Print one line per comparison."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for column in ("", "setting", "reported", "ours", "omitted control", "against it", "what survives"):
        table.add_column(column, no_wrap=column == "")
    for claim, setting, _, *rest in summary_rows(found):
        table.add_row(claim, setting, *rest)
    console.print(table)


def main(
    quick: bool = False,
    only: str = "",
    out: Path | None = None,
    seeds: int | None = None,
    w8a: Path | None = None,
    covtype: Path | None = None,
) -> int:
    """Reproduce the claims, print a table, and write the page.

    Args:
        quick: smaller data, fewer epochs and seeds: a check that it runs; its verdicts mean little.
        only: claims to run, comma-separated; all if empty.
        out: folder of the page (default: docs for a full run, runs/reproduction otherwise).
        seeds: of each arm (default: 5, with --quick 3).
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
    chosen = [part.strip() for part in only.split(",") if part.strip()] or list(claims)
    if unknown := [name for name in chosen if name not in claims]:
        console.print(f"error: There is no claim {unknown[0]!r}. Choose from {', '.join(claims)}.", highlight=False)
        return 2
    if not FASHION.is_dir():
        console.print(MISSING, highlight=False)
    scale = Scale(seeds or (3 if quick else 5), quick)
    began, found = time.perf_counter(), list[Comparison]()
    log = lambda text: progress.print(f"{time.perf_counter() - began:6.0f} s  {text}")
    for name in chosen:
        found += claims[name](scale, log)
    seconds = time.perf_counter() - began
    show(found, console)
    words: dict[str, Any] = {
        "images": "Fashion-MNIST" if FASHION.is_dir() else "the digits of scikit-learn",
        "sparse": "w8a and covtype" if len(files) == 2 else "generated in the shape of w8a and covtype",
        "timed": scale.epochs(60),
    }
    full = not quick and set(chosen) == set(claims)
    folder = out or (Path(__file__).parents[1] / "docs" if full else Path("runs/reproduction"))
    page = write_page(found, folder, words, scale.seeds, seconds / 60)
    console.print(f"{seconds:.0f} s; {page}", highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(tyro.cli(main))
