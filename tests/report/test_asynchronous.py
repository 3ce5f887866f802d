"""Asynchronous runs: utilization, update shares and staleness as read, drawn and displayed."""

import numpy as np
import pytest
from fake_run import write_fake_async_run, write_fake_run
from matplotlib.figure import Figure
from test_display import console, rendered, row

from hetjax.report import Display, report
from hetjax.report.figure import run_figure
from hetjax.report.panels import staleness_panel, updates_panel, utilization_panel
from hetjax.report.run_folder import read_run


def test_a_run_with_updates_per_worker_is_asynchronous(tmp_path):
    run = read_run(write_fake_async_run(tmp_path / "async"))
    assert run.asynchronous
    assert run.full_S.all()  # steps differ in size, and all of them count
    assert not read_run(write_fake_run(tmp_path / "sync", steps=5)).asynchronous


def test_the_panels_show_the_numbers(tmp_path):
    run = read_run(write_fake_async_run(tmp_path))
    busy, updates, stale = Figure().subplots(1, 3)
    utilization_panel(busy, run)
    assert [text.get_text() for text in busy.get_legend().get_texts()] == ["worker 0: 97%", "worker 1: 90%"]
    for line, share in zip(busy.get_lines(), (0.97, 0.9), strict=False):
        np.testing.assert_allclose(line.get_ydata(), share)
    updates_panel(updates, run)
    shares = run.summary["update_share"]
    assert {text.get_text().strip() for text in updates.texts} == {f"{w}: {s:.0%}" for w, s in enumerate(shares)}
    staleness_panel(stale, run)
    assert [int(bar.get_height()) for bar in stale.patches][:4] == [10, 100, 0, 7]
    assert int(stale.patches[-1].get_height()) == 1  # 90, beyond the last bar
    assert stale.texts[0].get_text() == "mean 1.8"  # (100 + 21 + 90) / 118


@pytest.mark.parametrize("workers", [1, 2, 12])
def test_the_page_and_figure_of_an_asynchronous_run(tmp_path, workers):
    written = report(write_fake_async_run(tmp_path, workers=workers))
    text = written.page.read_text()
    assert "utilization per worker" in text
    assert ">97%" in text
    titles = {axes.get_title() for part in run_figure(read_run(tmp_path)).subfigs for axes in part.axes}
    assert titles >= {
        "Batch size per worker", "Utilization per worker", "Share of updates per worker", "Staleness of updates",
    }  # fmt: skip


def test_a_run_without_a_summary_is_drawn(tmp_path):
    write_fake_async_run(tmp_path)
    (tmp_path / "summary.json").unlink()
    assert report(tmp_path).page.is_file()


def test_the_display_shows_update_shares_of_the_run_so_far():
    display = Display(400, console=console())
    display.log(1, row(2, updates=[1, 1], staleness=0.5))
    display.log(2, row(2, updates=[0, 2], staleness=1.5))
    display.close()
    text = rendered(display)
    assert "staleness 1.5" in text
    lines = {line.split()[0]: line.split()[-1] for line in text.splitlines() if line.split()[:1] in (["0"], ["1"])}
    assert lines == {"0": "25%", "1": "75%"}
    assert max(map(len, text.splitlines())) <= 80
    assert "busy 64% 72%  updates 25% 75%" in display.line()


def test_the_summary_line_shows_utilization_and_update_shares():
    display = Display(console=console(terminal=False))
    display.summary({"steps": 9, "utilization": [0.971, 0.9], "update_share": [0.25, 0.75]})
    assert "9 steps, busy 97% 90%, updates 25% 75%" in display.console.file.getvalue()
