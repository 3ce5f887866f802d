"""From run folders to pictures: a figure in each folder and one page that compares them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from hetjax.report.figure import draw_run
from hetjax.report.page import comparison_page
from hetjax.report.run_folder import find_runs, read_run


@dataclass(frozen=True)
class Report:
    """The files that a report wrote."""

    figures: tuple[Path, ...]
    page: Path


def report(*folders: str | Path, page: str | Path | None = None) -> Report:
    """Draw `run.png` and `run.svg` in every run's folder and write one HTML page that compares the runs.

    A folder is a run's own or one with several runs directly below it. The page goes to `page`, or as report.html into
    the folder given, or into the closest folder that holds all of them.
    """
    if not folders:
        raise ValueError("Give at least one folder of a run to report on.")
    found = list(dict.fromkeys(path.resolve() for folder in folders for path in find_runs(folder)))
    common = Path(os.path.commonpath([path.parent for path in found]))
    runs = [read_run(path, str(path.relative_to(common))) for path in found]
    drawn = [draw_run(run) for run in runs]
    if page is None:
        page = (Path(folders[0]) if len(folders) == 1 else common) / "report.html"
    page = Path(page)
    page.write_text(comparison_page(runs, [svg.read_bytes() for _, svg in drawn]), encoding="utf-8")
    return Report(tuple(path for paths in drawn for path in paths), page)
