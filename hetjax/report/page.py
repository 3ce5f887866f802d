"""The report: a figure in every run folder, and one self-contained HTML page that compares the runs."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from hetjax.report.drawing import THOUSANDS, curve, run_color, style, svg_bytes
from hetjax.report.figure import draw_run
from hetjax.report.run_folder import RecordedRun, find_runs, read_run

# key of summary.json, heading, format: results first, configuration last
SUMMARIES = (
    ("samples_per_s", "samples/s", "{:,.0f}"),
    ("ideal_samples_per_s", "ideal samples/s", "{:,.0f}"),
    ("efficiency", "efficiency", "{:.1%}"),
    ("test_accuracy", "test accuracy", "{:.4f}"),
    ("final_loss", "final loss", "{:.4f}"),
    ("wall_s", "seconds", "{:,.1f}"),
    ("steps", "steps", "{:,}"),
    ("samples", "samples", "{:,}"),
    ("plan_changes", "plan changes", "{:,}"),
    ("recompiles_after_warmup", "recompiles after warm-up", "{:,}"),
    ("updates", "updates", "{:,}"),
    ("update_share", "share of updates per worker", "{:.0%}"),
    ("utilization", "utilization per worker", "{:.0%}"),
    ("data_wait_share", "time waiting for data", "{:.1%}"),
    ("overruns", "overruns", "{:,}"),
    ("workers", "workers", "{:,}"),
    ("strategy", "strategy", "{}"),
    ("controller", "controller", "{}"),
    ("partition", "partition", "{}"),
    ("sync", "sync", "{}"),
    ("engine", "engine", "{}"),
    ("wire", "numbers between processes", "{}"),
)
_HIGHER_IS_BETTER = ("samples_per_s", "efficiency", "test_accuracy")
_IDEAL = (
    "The ideal is the sum of what each worker reaches with the same engine while all of them run at once, without "
    "waiting for each other and without exchange. Efficiency is samples/s over the ideal."
)

_CSS = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 76rem; padding: 0 1rem; color: #222; }
h1 { font-size: 1.1rem; color: #555; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
.headline { font-size: 1.7rem; line-height: 1.25; font-weight: 600; margin: .4rem 0 1.5rem; }
.note { color: #555; max-width: 46rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .7rem; border-bottom: 1px solid #ddd; text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; font-weight: 600; }
td.best { background: #E4F3EC; font-weight: 600; }
img { max-width: 100%; height: auto; }
.warning { color: #B00020; }
.dot { display: inline-block; width: .8em; height: .8em; border-radius: 50%; margin-right: .5em; }
"""


def comparison_page(runs: Sequence[RecordedRun], figures: Sequence[bytes]) -> str:
    """Return the HTML page, with the SVG figure of each run embedded.

    It loads nothing from elsewhere and runs no script: its content security policy allows its own style and images.
    """
    title = html.escape("hetjax: " + (runs[0].name if len(runs) == 1 else f"{len(runs)} runs compared"))
    parts = [f"<h1>{title}</h1>"]
    parts += [f'<p class="headline">{html.escape(sentence)}</p>' for sentence in filter(None, [result(runs)])]
    parts += [_summaries(runs)]
    if any(run.ideal is not None for run in runs):
        parts.append(f'<p class="note">{_IDEAL}</p>')
    if len(runs) > 1:
        with style():
            overlay = svg_bytes(_overlay(runs))
        parts += ["<h2>All runs</h2>", _image(overlay, "throughput and loss of all runs")]
    for run, figure in zip(runs, figures, strict=True):
        parts += [f"<h2>{html.escape(run.name)}</h2>", _image(figure, f"run {run.name}")]
        parts += [f'<p class="warning">{html.escape(warning)}</p>' for warning in run.warnings]
        parts += [_members(run)]
    parts += [_differences(runs)]
    css = _CSS + "".join(f".run{index} {{ background: {run_color(index)}; }}\n" for index in range(len(runs)))
    allowed = base64.b64encode(hashlib.sha256(css.encode()).digest()).decode()
    policy = f"default-src 'none'; img-src data:; style-src 'sha256-{allowed}'; base-uri 'none'; form-action 'none'"
    head = f'<meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{policy}">'
    head += f'<meta name="viewport" content="width=device-width"><title>{title}</title>'
    start = f'<!DOCTYPE html>\n<html lang="en"><head>{head}<style>{css}</style></head><body>'
    return "\n".join([start, *parts, "</body></html>\n"])


def result(runs: Sequence[RecordedRun]) -> str | None:
    """Return the result in one sentence: how much faster the fastest run is than the slowest; None if unknown."""
    speeds = [(run.summary["samples_per_s"], run) for run in runs if _positive(run.summary.get("samples_per_s"))]
    if not speeds:
        return None
    slow, slowest = min(speeds, key=lambda pair: pair[0])
    fast, fastest = max(speeds, key=lambda pair: pair[0])
    sentence = f"{fast:,.0f} samples/s"
    if len(speeds) > 1:
        sentence = f"{fastest.name} is {_times(fast / slow)} {slowest.name}: {sentence} against {slow:,.0f}"
    efficiency = fastest.summary.get("efficiency")
    return sentence + (f", {efficiency:.0%} of the ideal" if _positive(efficiency) else "")


def _times(ratio: float) -> str:
    if ratio < 1.05:
        return "as fast as"
    return f"{ratio:.1f}x as fast as" if ratio < 9.95 else f"{ratio:,.0f}x as fast as"


def _positive(value: Any) -> bool:
    return isinstance(value, (int, float)) and 0 < value < np.inf


def _summaries(runs: Sequence[RecordedRun]) -> str:
    """Return the table of summaries, one column per run, the best speed, efficiency and accuracy marked."""
    lines = []
    for key, heading, form in SUMMARIES:
        values = [run.summary.get(key) for run in runs]
        if all(value is None for value in values):
            continue
        shown = [_shown(value, form) for value in values]
        best = _best(values, shown) if key in _HIGHER_IS_BETTER else None
        marks = [' class="best"' if text == best else "" for text in shown]
        cells = [f"<td{mark}>{html.escape(text)}</td>" for mark, text in zip(marks, shown, strict=True)]
        lines.append(f"<tr><td>{heading}</td>{''.join(cells)}</tr>")
    return _table(runs, lines)


def _table(runs: Sequence[RecordedRun], lines: list[str]) -> str:
    dots = [f'<span class="dot run{index}"></span>' for index in range(len(runs))]
    names = "".join(f"<th>{dot}{html.escape(run.name)}</th>" for dot, run in zip(dots, runs, strict=True))
    return '<div class="wide"><table>\n' + "\n".join([f"<tr><th></th>{names}</tr>", *lines]) + "\n</table></div>"


def _best(values: Sequence[Any], shown: Sequence[str]) -> str | None:
    """Return the best value as shown; None if there is nothing to compare, or if several runs show the same."""
    known = [(value, text) for value, text in zip(values, shown, strict=True) if isinstance(value, (int, float))]
    _, best = max(known, default=(0, ""))
    return best if len(known) > 1 and shown.count(best) == 1 else None


def _shown(value: Any, form: str) -> str:
    if value is None:
        return "–"
    try:
        if isinstance(value, list):  # one number per worker
            shown = [form.format(one) for one in value[:8]]
            return ", ".join(shown + ["…"] * (len(value) > 8))
        return form.format(value)
    except (ValueError, TypeError):
        return str(value)


def _members(run: RecordedRun) -> str:
    """Return the table of changes of an elastic fleet's members; "" if there were none."""
    lines = [
        f"<tr><td>{step}</td><td>{html.escape(change.sign)}</td><td>{change.seconds:.2f}</td>"
        f"<td>{html.escape(change.reason)}</td></tr>"
        for step, changes in zip(run.step_S, run.members_S, strict=True)
        for change in changes
    ]
    head = "<tr><th>step</th><th>members</th><th>seconds</th><th>reason</th></tr>"
    return '<div class="wide"><table>\n' + "\n".join([head, *lines]) + "\n</table></div>" if lines else ""


def _differences(runs: Sequence[RecordedRun]) -> str:
    """Return the table of configuration values that differ between the runs."""
    lines = []
    for key in sorted({key for run in runs for key in run.config}):
        values = [json.dumps(run.config[key]) if key in run.config else "–" for run in runs]
        if len(set(values)) > 1:
            cells = "".join(f"<td>{html.escape(value)}</td>" for value in values)
            lines.append(f"<tr><td>{html.escape(key)}</td>{cells}</tr>")
    return "<h2>Differences in configuration</h2>\n" + _table(runs, lines) if lines else ""


def _overlay(runs: Sequence[RecordedRun]) -> Figure:
    figure = Figure(figsize=(12, 3.8), layout="constrained")
    speed, loss = figure.subplots(1, 2)
    for index, run in enumerate(runs):
        color = run_color(index)
        known = run.full_S & np.isfinite(run.samples_per_s_S)
        curve(speed, run.step_S[known], run.samples_per_s_S[known], color, raw=False)
        known = np.isfinite(run.loss_S) & np.isfinite(run.seconds_S)
        curve(loss, run.seconds_S[known], run.loss_S[known], color, label=run.name, raw=False)
    speed.set(title="Samples per second", xlabel="step", ylim=(0, None))
    speed.yaxis.set_major_formatter(THOUSANDS)
    speed.xaxis.set_major_locator(MaxNLocator(integer=True))
    loss.set(title="Loss against seconds", xlabel="seconds", ylabel="loss")
    loss.xaxis.set_major_formatter(THOUSANDS)
    figure.legend(loc="outside lower center", ncols=min(6, len(runs)), frameon=False)
    return figure


def _image(svg: bytes, description: str) -> str:
    """Embed the SVG as an image rather than inline, because element ids of inline SVGs would collide."""
    data = base64.b64encode(svg).decode()
    return f'<p><img alt="{html.escape(description)}" src="data:image/svg+xml;base64,{data}"></p>'


@dataclass(frozen=True)
class ReportFiles:
    """Paths of the files written by `report`.

    Attributes:
        figures: The figures.
        page: The page, in HTML.
    """

    figures: tuple[Path, ...]
    page: Path


def report(*folders: str | Path, page: str | Path | None = None) -> ReportFiles:
    """Write `run.png` and `run.svg` to every run folder, and one HTML page that compares the runs.

    Args:
        *folders: run folders; runs in the folders directly below them are compared, too.
        page: path of the page (default: report.html in the given folder, or in the closest common parent of several).

    Returns:
        The paths of the figures and of the page.

    Raises:
        ValueError: no folder was given.
        FileNotFoundError: a folder holds no recorded run.
    """
    if not folders:
        raise ValueError("No run folder was given: give at least one folder.")
    found = list(dict.fromkeys(path.resolve() for folder in folders for path in find_runs(folder)))
    common = Path(os.path.commonpath([path.parent for path in found]))
    runs = [read_run(path, str(path.relative_to(common))) for path in found]
    drawn = [draw_run(run) for run in runs]
    if page is None:
        page = (Path(folders[0]) if len(folders) == 1 else common) / "report.html"
    page = Path(page)
    page.write_text(comparison_page(runs, [svg.read_bytes() for _, svg in drawn]), encoding="utf-8")
    return ReportFiles(tuple(path for paths in drawn for path in paths), page)
