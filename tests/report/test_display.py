"""The display: fits 80 columns in a terminal, prints plain lines elsewhere."""

import io

import pytest
from rich.console import Console

from hetjax.report import Display


def row(workers=4, **changes):
    counts = [100 // (worker % 4 + 1) for worker in range(workers)]
    return {
        "epoch": 1,
        "loss": 0.4321,
        "counts": counts,
        "times": [0.08 + 0.01 * (worker % 3) for worker in range(workers)],
        "step_time": 0.125,
        "samples_per_s": 4321.0,
        "changed": False,
        "reason": "",
        **changes,
    }


def console(width=80, height=24, terminal=True):
    return Console(file=io.StringIO(), width=width, height=height, force_terminal=terminal, color_system=None)


def rendered(display):
    with display.console.capture() as captured:
        display.console.print(display.render())
    return captured.get()


def shown(workers=4, width=80, height=24, title="digits, cnn, balanced", **changes):
    display = Display(400, title=title, ideal=5000.0, console=console(width, height))
    display.log(120, row(workers, **changes))
    display.close()
    return rendered(display)


@pytest.mark.parametrize("workers", [1, 4, 8, 32, 64])
def test_the_display_fits_80_columns_and_the_height(workers):
    long = "worker 2 slower: " + "a very long reason " * 10
    lines = shown(workers, changed=True, reason=long, title="t" * 200).splitlines()
    assert max(map(len, lines)) <= 80
    assert len(lines) <= 23


def test_the_display_shows_progress_and_every_worker():
    text = shown(changed=True, reason="worker 3 slower")
    for part in ("step 120/400", "epoch 1", "loss 0.4321", "4,321 samples/s", "efficiency 86%", "worker 3 slower"):
        assert part in text
    for worker, (count, busy, time) in enumerate(
        [("100", "64%", "80.0 ms"), ("50", "72%", "90.0 ms"), ("33", "80%", "100.0 ms"), ("25", "64%", "80.0 ms")]
    ):
        line = next(line for line in text.splitlines() if line.split()[:1] == [str(worker)])
        assert line.split()[1] == count
        assert busy in line
        assert time in line


def test_busier_workers_have_longer_bars():
    lines = shown(times=[0.125, 0.0625, 0.03125, None]).splitlines()[-4:]
    bars = [line.count("━") for line in lines]
    assert bars[0] > bars[1] > bars[2] > bars[3] == 0
    assert "untimed" in lines[3]


def test_workers_that_do_not_fit_are_summarized():
    text = shown(64)
    counts = row(64)["counts"]
    line = next(line for line in text.splitlines() if "more workers" in line)
    hidden = int(line.split("more")[0].split()[-1])
    assert int(line.split()[1]) == sum(counts[64 - hidden :])
    assert "busy 64% to 80%" in line


def test_the_time_left_is_extrapolated_from_the_steps_of_this_process():
    now = [100.0]
    display = Display(110, console=console(), clock=lambda: now[0])
    display.log(11, row())  # a resumed run: its first step is not number 1
    now[0] += 5 * 2.0
    display.log(16, row())
    display.close()
    assert "3:08 left" in rendered(display), "94 steps of 2 s"


def test_a_nonfinite_loss_is_shown_as_such():
    assert "loss not finite" in shown(loss=float("nan"))


def test_the_display_before_the_first_step():
    assert "waiting" in rendered(Display(console=console()))


def test_plain_lines_are_printed_at_intervals_and_for_the_first_and_last_step():
    now = [0.0]
    out = console(terminal=False)
    display = Display(100, ideal=5000.0, every=5, console=out, clock=lambda: now[0])
    for step in range(1, 101):
        now[0] = step * 0.1
        display.log(step, row())
    display.summary({"steps": 100, "wall_s": 9.9, "samples_per_s": 4321.0, "efficiency": 0.93, "test_accuracy": 0.97})
    display.close()
    lines = out.file.getvalue().splitlines()
    assert [line.split()[1] for line in lines[:-1]] == ["1/100", "51/100", "100/100"]
    assert lines[1] == "step 51/100  epoch 1  loss 0.4321  4,321 samples/s  efficiency 86%  counts 100 50 33 25"
    assert lines[-1] == "done: 100 steps, 9.9 s, 4,321 samples/s, 93% of the ideal, test accuracy 0.9700"
    assert "\x1b" not in out.file.getvalue()


def test_a_change_of_the_members_is_printed_at_once():
    display = Display(100, every=5.0, console=console(terminal=False), clock=lambda: 0.0)
    display.log(1, row())
    display.log(2, row(changed=True, reason="worker 3 slower"))
    display.log(3, row(changed=True, reason="Member 1 left. 0.12 s.", members=[{"left": [1], "came": []}]))
    first, second = display.console.file.getvalue().splitlines()
    assert first.startswith("step 1/100")
    assert second == "step 3: Member 1 left. 0.12 s."


def test_a_line_gives_the_range_of_many_counts():
    out = console(terminal=False)
    Display(console=out).log(1, row(32))
    assert "counts 25 to 100" in out.file.getvalue()


def test_the_live_display_is_redrawn_and_stops_at_the_summary():
    out = console()
    display = Display(2, console=out)
    display.log(1, row())
    display.log(2, row())
    display.summary({"steps": 2})
    display.close()
    assert "step 2/2" in out.file.getvalue()
    assert out.file.getvalue().rstrip().endswith("2 steps")
