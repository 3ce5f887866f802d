"""Make the pictures of the documentation from real runs: docs/throttled.gif, docs/lost.gif and docs/chaos.png.

    python docs/pictures.py            # all, about six minutes on two cores
    python docs/pictures.py lost       # one of them

throttled.gif  one process, four simulated devices, `hetjax train --config digits_slowdown`: worker 1 slows down at step
               60, worker 3 speeds up at step 120
lost.gif       an elastic fleet of three processes; the second is killed with SIGKILL, and the launcher starts another
chaos.png      the command of docs/faults.md: four processes, one of which is killed now and then, and replaced
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.animation import FuncAnimation, PillowWriter
from matplotlib.figure import Figure

from hetjax.report import read_run
from hetjax.report.drawing import BLUE, DARK, style, worker_color
from hetjax.report.panels import counts_panel, loss_panel

DOCS = Path(__file__).parent
HETJAX = [sys.executable, "-m", "hetjax"]
LIMIT = 600.0  # seconds for one run
AROUND = 40  # steps shown before and after each change of the members


@dataclass(frozen=True)
class Scene:
    """What a picture shows: the steps of a run, and what is said from which step on."""

    counts_SxW: np.ndarray  # zero: this worker is not there
    samples_per_s: np.ndarray
    captions: dict[int, str]  # by index of the first step


def throttled(folder: Path) -> Scene:
    """Train with worker speeds that change during the run."""
    subprocess.run([*HETJAX, "train", "--config", "digits_slowdown", "--out", folder], check=True, timeout=LIMIT)
    run = read_run(folder)
    full = run.full_S  # without the short last step of an epoch
    first = lambda step: int(np.searchsorted(run.step_S[full], step))
    captions = {
        0: "four workers of speed 1, 1, 0.5 and 0.25",
        first(60): "step 60: worker 1 is throttled to 0.4",
        first(120): "step 120: worker 3 speeds up to 1",
    }
    return Scene(np.nan_to_num(run.counts_SxW[full]), run.samples_per_s_S[full], captions)


def lost(folder: Path) -> Scene:
    """Train in an elastic fleet of three processes, kill the second, and let another one join."""
    command = [*HETJAX, "launch", "--processes", "3", "--elastic", "--transport", "host", "--restart", "1", "--"]
    command += ["hetjax", "train", "--strategy", "equal", "--batch-size", "1024", "--steps", "20000"]
    command += ["--out", str(folder)]
    launcher = subprocess.Popen(command)
    try:
        _wait_for(lambda: _steps(folder) >= AROUND, launcher)
        os.kill(_child(launcher.pid, process=1), signal.SIGKILL)
        _wait_for(lambda: _steps_after_return(folder) >= AROUND, launcher)
        launcher.send_signal(signal.SIGINT)  # all members save a checkpoint and end
        launcher.wait(LIMIT)
    finally:
        launcher.kill()
        launcher.wait()
    run = read_run(folder)
    full = run.full_S
    counts_SxW, steps_S = run.counts_SxW[full], run.step_S[full]
    fewer_S = np.isnan(counts_SxW[:, 2])  # the steps of two members
    gone = int(np.flatnonzero(fewer_S)[0])
    back = gone + int(np.flatnonzero(~fewer_S[gone:])[0])
    shown = np.unique(np.concatenate([np.arange(at - AROUND, at + AROUND) for at in (gone, back)]))
    shown = shown[(shown >= 0) & (shown < len(steps_S))]
    shown_SxW = np.zeros((len(counts_SxW), 4))  # the last is the newcomer
    shown_SxW[:gone, :3] = counts_SxW[:gone]
    shown_SxW[gone:back, [0, 2]] = counts_SxW[gone:back, :2]
    shown_SxW[back:, [0, 2, 3]] = counts_SxW[back:]
    captions = {
        0: "an elastic fleet of three like processes",
        int(np.searchsorted(shown, gone)): f"step {steps_S[gone]}: process 1 was killed, the others go on",
        int(np.searchsorted(shown, back)): f"step {steps_S[back]}: another process has joined",
    }
    return Scene(shown_SxW[shown], run.samples_per_s_S[full][shown], captions)


def _steps(folder: Path) -> int:
    try:
        return read_run(folder).steps
    except FileNotFoundError:
        return 0


def _steps_after_return(folder: Path) -> int:
    """The steps with three members since the last one with two."""
    fewer_S = np.isnan(read_run(folder).counts_SxW[:, 2])
    return int(np.argmax(fewer_S[::-1])) if fewer_S.any() else 0


def _child(launcher: int, process: int) -> int:
    """The process id of one of the launcher's processes."""
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(status.read_text().rpartition(")")[2].split()[1])
            variables = (status.parent / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if parent == launcher and f"HETJAX_PROCESS={process}".encode() in variables:
            return int(status.parent.name)
    raise RuntimeError(f"The launcher has no process {process}.")


def _wait_for(condition: Callable[[], bool], launcher: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + LIMIT
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"The run did not come so far within {LIMIT:.0f} s.")
        time.sleep(0.2)
        if launcher.poll() not in (None, 0):
            raise RuntimeError(f"The run ended with exit code {launcher.returncode}.")


def chaos(folder: Path) -> None:
    """Run the command of docs/faults.md, and draw the counts and the loss with the changes of the members."""
    folder.mkdir()
    command = next(line for line in (DOCS / "faults.md").read_text().splitlines() if "--chaos 30" in line)
    subprocess.run([*HETJAX, *command.split()[1:]], cwd=folder, check=True, timeout=LIMIT)
    run = read_run(folder / "runs" / "chaos")
    with style():
        figure = Figure(figsize=(9, 6.4), layout="constrained")
        counts, loss = figure.subplots(2, 1)
        counts_panel(counts, run)
        loss_panel(loss, run)
        figure.savefig(DOCS / "chaos.png", dpi=90)


def animate(scene: Scene, path: Path, frames: int = 60) -> None:
    """Draw a bar of samples for every worker, and samples/s below, frame by frame."""
    workers = scene.counts_SxW.shape[1]
    speed = np.convolve(np.pad(scene.samples_per_s, 2, mode="edge"), np.full(5, 0.2), mode="valid")
    with style():
        figure = Figure(figsize=(7.2, 4.0), layout="constrained")
        bars, curve = figure.subplots(2, 1, height_ratios=[3, 2])
        rects = bars.barh(range(workers), np.zeros(workers), color=[worker_color(w) for w in range(workers)])
        labels = [bars.text(0, w, "", va="center", fontweight="bold", color=DARK) for w in range(workers)]
        bars.set(xlim=(0, 1.15 * scene.counts_SxW.max()), ylim=(workers - 0.5, -0.5), xlabel="samples in this step")
        bars.set_yticks(range(workers), [f"worker {w}" for w in range(workers)])
        (line,) = curve.plot([], [], color=BLUE, linewidth=1.8)
        curve.set(xlim=(0, len(speed)), ylim=(0, 1.15 * speed.max()), xlabel="steps done", ylabel="samples/s")
        title = figure.suptitle(" ", x=0.01, ha="left", fontsize=11, fontweight="bold")

        def draw(index: int) -> list[object]:
            for rect, label, count_S in zip(rects, labels, scene.counts_SxW[: index + 1].T, strict=True):
                count = count_S[-1]
                rect.set_width(count)
                label.set_text(f" {count:.0f}" if count else " lost" if count_S.any() else "")
                label.set_x(count)
            line.set_data(range(index + 1), speed[: index + 1])
            title.set_text(scene.captions[max(k for k in scene.captions if k <= index)])
            return [*rects, *labels, line, title]

        shown = np.unique(np.linspace(0, len(speed) - 1, frames).astype(int))
        FuncAnimation(figure, draw, frames=shown.tolist(), blit=False).save(path, PillowWriter(fps=6), dpi=100)
    size = path.stat().st_size
    print(f"{path}: {size:,} bytes")
    assert size < 2**20, "too large for a page"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        for name in sys.argv[1:] or ["throttled", "lost", "chaos"]:
            if name == "chaos":
                chaos(Path(temporary) / name)
            else:
                animate({"throttled": throttled, "lost": lost}[name](Path(temporary) / name), DOCS / f"{name}.gif")
