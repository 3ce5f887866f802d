"""The report: figures and page of recorded runs, complete or damaged."""

import base64
import hashlib
import json
import re
from itertools import combinations, pairwise

import numpy as np
import pytest
from fake_run import write_fake_run
from matplotlib.colors import to_rgb, to_rgba
from matplotlib.figure import Figure
from matplotlib.text import Text

from hetjax.report import report, write_json
from hetjax.report.drawing import RED, running_median, style, thinned, worker_color
from hetjax.report.figure import draw_run, run_figure
from hetjax.report.page import result
from hetjax.report.panels import counts_panel, efficiency_panel, timeline_steps
from hetjax.report.run_folder import find_runs, read_run


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("out")
    write_fake_run(folder / "equal", balanced=False)
    write_fake_run(folder / "balanced")
    return folder, report(folder)


def test_a_figure_per_run_and_one_page(two_runs):
    folder, written = two_runs
    assert written.page == folder / "report.html"
    names = {path.relative_to(folder).as_posix() for path in written.figures}
    assert names == {"equal/run.png", "equal/run.svg", "balanced/run.png", "balanced/run.svg"}
    for path in written.figures:
        assert path.read_bytes()[:4] == (b"\x89PNG" if path.suffix == ".png" else b"<?xm")


def test_the_page_is_self_contained(two_runs):
    text = two_runs[1].page.read_text()
    sources = re.findall(r'(?:src|href)="([^"]{0,30})', text)
    assert len(sources) == 3
    assert all(source.startswith("data:image/svg+xml;base64,") for source in sources)
    assert "http:" not in text
    assert "https:" not in text
    assert "<script" not in text


def test_the_page_allows_only_its_own_style_and_images(two_runs):
    text = two_runs[1].page.read_text()
    (css,) = re.findall(r"<style>(.*?)</style>", text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(css.encode()).digest()).decode()
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)
    allowed = dict(rule.split(" ", 1) for rule in policy.split("; "))
    assert allowed == {
        "default-src": "'none'",
        "img-src": "data:",
        "style-src": f"'sha256-{digest}'",
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    assert text.index("Content-Security-Policy") < text.index("<title>")
    assert not re.search(r"<[^>]* (style|on\w+)=", text), "the policy blocks inline styles and handlers"


def test_the_result_comes_first_and_the_configuration_last(two_runs):
    folder, written = two_runs
    text = written.page.read_text()
    equal, balanced = (json.loads((folder / name / "summary.json").read_text()) for name in ("equal", "balanced"))
    ratio = balanced["samples_per_s"] / equal["samples_per_s"]
    assert f'<p class="headline">balanced is {ratio:.1f}x as fast as equal: ' in text
    order = ["headline", "<td>samples/s</td>", "<td>strategy</td>", "The ideal is the sum", "<h2>All runs</h2>",
             "<h2>balanced</h2>", "<h2>equal</h2>", "Differences in configuration"]  # fmt: skip
    places = [text.index(part) for part in order]
    assert places == sorted(places)


@pytest.mark.parametrize(
    ("speeds", "words"),
    [
        ((100.0, 103.0), "two is as fast as one: 103 samples/s against 100"),
        ((100.0, 240.0), "two is 2.4x as fast as one: "),
        ((996.0, 100.0), "one is 10x as fast as two: "),
        ((10.0, 1500.0), "two is 150x as fast as one: "),
        ((1.0, 23456.0), "two is 23,456x as fast as one: "),
    ],
)
def test_the_result_is_a_readable_number(tmp_path, speeds, words):
    for name, speed in zip(("one", "two"), speeds, strict=True):
        write_json(write_fake_run(tmp_path / name, steps=20) / "summary.json", {"samples_per_s": speed})
    assert result([read_run(tmp_path / name) for name in ("one", "two")]).startswith(words)


def test_equal_bests_are_not_marked(tmp_path):
    for name in ("one", "two"):
        write_fake_run(tmp_path / name, steps=5)
    assert "best" not in re.findall(r'class="(\w+)"', report(tmp_path).page.read_text())


@pytest.mark.parametrize("steps", [79, 5000])
def test_a_change_of_counts_is_drawn_where_it_was(tmp_path, steps):
    run = read_run(write_fake_run(tmp_path, change_at=12, steps=steps))
    figure = Figure()
    counts, efficiency = figure.subplots(1, 2)
    counts_panel(counts, run)
    efficiency_panel(efficiency, run)
    (layer,) = [patch for patch in counts.patches if patch.get_facecolor() == to_rgba(worker_color(3))]
    heights, edges, below = layer.get_data()
    drawn = heights - below
    jumps = edges[1:-1][np.abs(np.diff(drawn)) > 10]
    assert set(jumps) >= {11.5, 17.5}
    assert all(jump % 1 == 0.5 for jump in jumps)
    (marks,) = [line for line in efficiency.lines if line.get_marker() == "|"]
    assert list(marks.get_xdata()) == [11.5, 17.5]
    median = max(efficiency.lines, key=lambda line: line.get_linewidth())
    assert {11, 12, 17, 18} <= set(median.get_xdata())


def test_a_figure_has_one_plot_of_the_loss(two_runs):
    run = read_run(two_runs[0] / "balanced")
    with style():
        titles = [axes.get_title(loc="left") for axes in run_figure(run).axes]
    assert [title for title in titles if "Loss" in title] == ["Loss against seconds"]


def test_the_page_shows_summaries_and_differences_in_configuration(two_runs):
    folder, written = two_runs
    text = written.page.read_text()
    for name in ("equal", "balanced"):
        summary = json.loads((folder / name / "summary.json").read_text())
        assert f">{summary['samples_per_s']:,.0f}<" in text
        assert f">{summary['efficiency']:.1%}<" in text
    assert text.count('class="best"') == 3
    assert "Differences in configuration" in text
    assert "<td>controller</td>" in text
    assert "<td>batch_size</td>" not in text


def test_names_are_escaped(tmp_path):
    write_fake_run(tmp_path / "<b>x" / "a&b", steps=5)
    text = report(tmp_path / "<b>x").page.read_text()
    assert "a&amp;b" in text
    assert "<b>" not in text


@pytest.mark.parametrize("workers", [1, 4, 33])
def test_no_two_texts_of_a_figure_overlap(tmp_path, monkeypatch, workers):
    drawn = {}
    draw = Text.draw

    def recorded(text, renderer):
        draw(text, renderer)
        if text.get_visible() and text.get_text().strip():
            drawn[id(text)] = text.get_text(), text.get_window_extent(renderer).padded(-1)

    monkeypatch.setattr(Text, "draw", recorded)
    draw_run(read_run(write_fake_run(tmp_path / "balanced", workers=workers, steps=50)))
    assert len(drawn) > 30
    for (name, box), (other, beside) in combinations(drawn.values(), 2):
        assert not box.overlaps(beside), f"{name!r} overlaps {other!r}"


def test_the_timelines_show_steps_before_and_after_balancing(tmp_path):
    run = read_run(write_fake_run(tmp_path, change_at=12, steps=79))
    before, after = timeline_steps(run)
    assert list(run.step_S[before]) == [9, 10, 11]
    assert list(run.step_S[after]) == [77, 78, 79]
    equal = read_run(write_fake_run(tmp_path / "equal", balanced=False, steps=79))
    before, after = timeline_steps(equal)
    assert list(equal.step_S[before]) == [2, 3, 4], "step 1 was not timed"
    assert list(equal.step_S[after]) == [77, 78, 79]


def test_the_short_last_step_of_an_epoch_is_not_a_plan_change(tmp_path):
    run = read_run(write_fake_run(tmp_path, change_at=12, steps=120))
    assert list(run.step_S[run.changes]) == [12, 18]


def test_colors_are_stable_and_distinct():
    colors = [worker_color(worker) for worker in range(64)]
    assert len(set(colors)) == 64
    for one, next_one in pairwise(colors):
        assert np.abs(np.subtract(to_rgb(one), to_rgb(next_one))).max() > 0.15
    brightness = [np.dot(to_rgb(color), (0.2126, 0.7152, 0.0722)) for color in colors]
    assert max(brightness) < 0.9, "too pale to be seen on white"


def test_running_median_and_thinning():
    np.testing.assert_array_equal(running_median(np.array([1, 9, 2, 3, 100]), 3), [5, 2, 3, 3, 51.5])
    assert len(running_median(np.arange(7.0), 4)) == 7
    assert list(thinned(5)) == [0, 1, 2, 3, 4]
    many = thinned(100_000)
    assert (many[0], many[-1]) == (0, 99_999)
    assert len(many) <= 800


def truncated(folder):
    file = folder / "metrics.jsonl"
    file.write_bytes(file.read_bytes()[:-40])


def empty(folder):
    (folder / "metrics.jsonl").write_text("")


def garbage(folder):
    file = folder / "metrics.jsonl"
    lines = file.read_text().splitlines()
    file.write_text("\n".join([lines[0], "not json", "[1]", '{"step": "x"}', *lines[1:]]) + "\n")


def wrong_types(folder):
    (folder / "metrics.jsonl").write_text('{"step": 0, "loss": "x", "counts": [1, null], "times": 3}\n{"step": 1}\n')


def untimed(folder):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    text = "".join(json.dumps({**row, "times": [None] * 4}) + "\n" for row in rows)
    (folder / "metrics.jsonl").write_text(text)


def one_step(folder):
    file = folder / "metrics.jsonl"
    file.write_text(file.read_text().splitlines()[3] + "\n")


def no_summary(folder):
    (folder / "summary.json").unlink()


def broken_summary(folder):
    (folder / "summary.json").write_text('{"steps": ')


def odd_summary(folder):
    (folder / "summary.json").write_text('{"samples_per_s": "fast", "efficiency": null, "ideal_samples_per_s": 0}')


def summary_is_a_folder(folder):
    (folder / "summary.json").unlink()
    (folder / "summary.json").mkdir()


def nested(folder):
    with (folder / "metrics.jsonl").open("a") as file:
        file.write("[" * 100_000 + "\n")


def huge_numbers(folder):
    """No step has a count that can be drawn."""
    row = '{"counts": [1e400, Infinity], "loss": 1e308, "step_time": 1e309, "step": '
    (folder / "metrics.jsonl").write_text(f"{row}1}}\n{row}2}}\n{row}{'9' * 30}}}\n")


def fewer_workers_later(folder):
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 31, "loss": 1, "counts": [512, 512], "times": [0.1, 0.2], "step_time": 0.3}\n')


@pytest.mark.parametrize(
    ("damage", "warning"),
    [
        (truncated, "last line of metrics.jsonl is truncated"),
        (empty, "contains no finished step"),
        (garbage, r"3 of 33 lines of metrics.jsonl are unreadable \(first: line 2\)"),
        (wrong_types, None),
        (untimed, None),
        (one_step, None),
        (no_summary, "no summary.json: the run has not finished"),
        (broken_summary, "summary.json is unreadable"),
        (odd_summary, None),
        (summary_is_a_folder, "summary.json is unreadable"),
        (nested, "last line of metrics.jsonl is truncated"),
        (huge_numbers, "last line of metrics.jsonl is truncated"),
        (fewer_workers_later, None),
    ],
)
def test_a_damaged_run_is_drawn_as_far_as_possible(tmp_path, damage, warning):
    folder = write_fake_run(tmp_path / "run", steps=30)
    damage(folder)
    written = report(folder)
    text = written.page.read_text()
    assert written.figures[0].stat().st_size > 5000
    warnings = re.findall(r'class="warning">([^<]*)', text)
    assert len(warnings) == (warning is not None)
    if warning is not None:
        assert re.search(warning, warnings[0])


def test_of_a_step_written_twice_the_last_row_counts(tmp_path):
    rows = [{"step": 0, "loss": 1}, {"step": 1, "loss": 2}, {"step": 1, "loss": 3}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    np.testing.assert_array_equal(read_run(tmp_path).loss_S, [1, 3])


def test_a_folder_without_a_run_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no metrics\.jsonl in .*nowhere"):
        report(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"no metrics\.jsonl"):
        find_runs(tmp_path)
    with pytest.raises(ValueError, match="at least one folder"):
        report()


def test_a_run_is_compared_with_those_below_its_folder(tmp_path):
    for folder in (tmp_path, tmp_path / "equal", tmp_path / "balanced"):
        write_fake_run(folder, steps=5)
    assert find_runs(tmp_path) == [tmp_path, tmp_path / "balanced", tmp_path / "equal"]


def test_runs_of_the_same_name_are_distinguished_by_folder(tmp_path):
    for parent in ("a", "b"):
        write_fake_run(tmp_path / parent / "balanced", steps=5)
    written = report(tmp_path / "a", tmp_path / "b" / "balanced", page=tmp_path / "page.html")
    text = written.page.read_text()
    assert written.page == tmp_path / "page.html"
    assert "a/balanced" in text
    assert "b/balanced" in text


KILLED = {"step": 39, "generation": 2, "members": [0, 2, 3], "left": [1], "came": [], "seconds": 0.28,
          "reason": "Member 1 was lost: its process was killed by SIGKILL."}  # fmt: skip
JOINED = {"step": 79, "generation": 3, "members": [0, 2, 3, 4], "left": [], "came": [4], "seconds": 0.1,
          "reason": "Member 4 joined."}  # fmt: skip


def test_changes_of_the_members_are_marked_and_listed(tmp_path):
    folder = write_fake_run(tmp_path / "run", members={40: [KILLED], 80: [JOINED, KILLED | {"left": [2]}]})
    run = read_run(folder)
    assert [len(changes) for changes in run.members_S if changes] == [1, 2]
    with style():
        figure = run_figure(run)
    counts, efficiency, *_, loss = [axes for part in figure.subfigs for axes in part.axes]
    red = lambda axes: [line.get_xdata()[0] for line in axes.lines if line.get_color() == RED and len(line.get_xdata())]
    assert red(counts) == red(efficiency) == [39.5, 79.5]
    assert red(loss) == [run.seconds_S[39], run.seconds_S[79]]
    texts = [text.get_text().strip() for text in loss.findobj(Text) if text.get_color() == RED]
    assert texts == ["\N{MINUS SIGN}1, 0.3 s", "+4 \N{MINUS SIGN}2, 0.4 s"]
    page = report(folder).page.read_text()
    for words in (
        "<td>40</td><td>\N{MINUS SIGN}1</td><td>0.28</td>",
        "<td>80</td><td>+4</td><td>0.10</td>",
        KILLED["reason"],
    ):
        assert words in page


def test_damaged_changes_of_the_members_are_left_out(tmp_path):
    folder = write_fake_run(tmp_path, members={3: [{"left": None}], 4: "?", 5: [JOINED]})
    assert [len(changes) for changes in read_run(folder).members_S[:5]] == [0, 0, 0, 0, 1]
