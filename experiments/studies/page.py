"""The page of the reproduction: one table of claims, and for each its arms, a figure, and what stands in for what."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from studies.claims import Comparison, by_strength, gain, verdict
from studies.curves import SLACK

from hetjax.report.drawing import run_color, style, svg_bytes

TITLES = {
    "000": "Dynamic partition: 20% less time",
    "001": "DBS: less time, robust under disturbance",
    "002": "RCD-SGD: up to 32% faster",
    "003": "DASO: up to 34% less time",
    "004": "Hogbatch: faster and busier",
}
SETUPS = {
    "000": """Vineeth S, arXiv 2110.08941: CIFAR-10 on two GPUs, one of which sleeps for a constant time in every
step. Once per epoch the split follows p / t. Row times, delays and the exchange are those of the authors' logs;
an epoch has the 195 steps of 256 samples that theirs have. The training is an MLP on {images} instead of
ResNet-50 and VGG-16 on CIFAR-10, which is not available here. `faithful` keeps the published weights: `dp` the
mean of the workers' means, `edp` a second division by the number of workers. The original also reads overlapping
prefixes of the data; that is not repeated. All forms that weigh samples alike are the same training, so their
steps to the target agree. The second division of `edp` halves the gradient but not the weight decay, which no
learning rate makes up for. Times have 3% of noise, here and in 001, so that two workers of equal load wait for
each other; the authors' costs without it would give the oracle 21.4% at 0.2 s. Reported are the times of a step in
the authors' logs. At 0.1 s a run took 22.8% less time, but the run with equal counts had a slower GPU: with the row
time of the other runs, 14% are left. With VGG-16 the logs show no gain, and we find one: there, too, the slower worker
computes for 3 and 7 ms less in a step, but the rest of a step takes 4 and 6 ms longer once the split is unequal. Here
that rest, the exchange, is constant, so that the gain stays.""",
    "001": """Ye et al., arXiv 2007.11831: CIFAR-10 and CIFAR-100 on four workers, three of which share a GPU. The
split follows p / t once per epoch. The disturbance is theirs, on workers that are equal otherwise: in every epoch
with probability 0.1 a worker starts to lose 5 to 10 s per epoch, for 4 to 20 epochs. The paper gives no time of a
step; here an epoch of equal counts takes about a minute, and 23 s where workers are equal. The same disturbance
weighs less in epochs of a minute: there static, dbs and balanced are where the first look had them, and its oracle
gains more than costs known in the mean allow. All arms weigh samples alike, so that one training (an MLP on {images})
serves all; the time is that of {timed} epochs.""",
    "002": """He and Dube, arXiv 2211.00839: CIFAR-10 on a ring of workers with blocks by submodular selection.
The paper compares even blocks mixed in every step with submodular blocks by rate, mixed in every second step:
three changes at once. Here they come one by one, each beside random blocks, and again with MATCHA, which uses half of
the links. Speeds are 4:2:1:1, the link has 100
Mbit/s, the model is an MLP on {images} instead of a ResNet on CIFAR-10; blocks are by the published min-block
rule on 50 principal components, gradients and mixing weights as published except in the arm `weights b/B`,
hetjax's default.""",
    "003": """Coquelin et al., arXiv 2104.05588: ImageNet and CityScapes on up to 64 nodes of four GPUs.
Parameters are averaged every 8 to 1 steps and arrive some steps later. Here four nodes of two workers train an
MLP on {images} by SGD with momentum. The ratio of exchange to compute is not that of the authors' machine, so
three are charged: an all-reduce of 32 bits between nodes takes as long as the computation of a step, half, or a
tenth of it; the sum within a node is free. The published method sends 16 bits while nodes block and 32 while they
do not; ours sends 16 in between. Two simple controls also send less: an all-reduce with 16 bits, and local SGD,
which is DASO that waits for every average.""",
    "004": """Ma and Rusu, arXiv 2004.08771: a CPU of 48 Hogwild threads and a GPU update one model without a
barrier. The paper compares with the GPU alone at a large batch, where it makes few updates. The omitted control
is the GPU alone at the best of five smaller batches (chosen on the tuning seed), and the same batch divided
between both by `balanced`, charged from its first step. Data are {sparse}; the model has one hidden layer of 32
units. The GPU computes a row 44 times as fast as all threads of the CPU together, so that these make 98% of the
updates of Hogbatch, as reported; a batch costs it 1 ms besides. Updates are not scaled by their batch in
`Hogbatch`, as published, and are in the other two. Hogbatch and Adaptive Hogbatch run for three times and twice
the epochs of the others. `busy` is the share of time in which CPU and GPU compute, or the one that is used:
"busier" holds for both methods, as the GPU alone leaves the CPU idle, but the verdict is on time. The order of
updates is the same for all seeds; samples and initial parameters are not.""",
}
INTRO = """# Reproduction

Every headline of the five papers whose methods hetjax implements, run again together with the controls that the paper
left out. This page is made by

    python experiments/reproduce.py

{spent}`--only 000,003` runs some claims and leaves the others on the page as they are.

Training is real; time is virtual. A step is charged with the slowest worker's startup + rows x row_time / speed,
plus bytes / link for what it has to wait for. Laws, schedules, mixing and batch rules are hetjax's own functions.
The target is a training loss. One more seed, which enters no figure, chooses it and the learning rates: the target is
{slack:.0%} above the loss that the paper's control reaches there in the first two thirds of its run, and each arm gets
the learning rate that takes it to the target in the fewest steps. There are as many learning rates to choose from as
seeds. Differences are paired, seed by seed, and given with their standard error. A target that one of the seeds misses
counts as missed. In 000 to 003 all arms process the same samples, so that their losses at the end compare them at
equal samples.

**The rule of the verdict.** An arm is better than another if its time (to the target; for 001 that of the whole
run, which is the same training for all arms) is lower by more than 1% and by more than two standard errors.
"Reproduced": the method is better than the paper's control and than the strongest omitted control. "Only against
the paper's control": better than the former, not than the latter; weaker omitted controls that it beats are named. "Not
reproduced": not better than the paper's control. Where the paper reports no gain, the verdict says whether we find one.
Omitted controls are what one would try instead: fixed shares (`static`), `dbs` every 5 steps (dbs@5), `balanced`,
random blocks, all-reduce, 16 bits, a smaller batch; the strongest comes first. The oracle of 000 and 001 is a bound,
not a control: it knows the costs of every step. "Easier targets" are 10% and 25% higher.

"""
EASIER = (1.0, 1.1, 1.25)  # targets as multiples of that of the comparison
# Seconds of the run against equal counts, as first calculated in virtual time, for comparison.
_DISTURBED = {"static": 0.7, "dbs": -5.6, "balanced": -7.3, "oracle": -12.0}
FIRST_LOOK = {
    ("000", "ResNet-50, 0.2 s"): {"static": -14.9, "dp": -18.2, "balanced": -21.3, "oracle": -21.5},
    ("001", "rates 1/3, 1/3, 1/3, 1"): {"static": -30.1, "dbs": -30.9, "balanced": -31.2},
    ("001", "equal workers, disturbed"): _DISTURBED,
    ("001", "the same, in epochs of a minute"): _DISTURBED,
}


def percent(difference: tuple[float, float]) -> str:
    """A relative difference with its standard error."""
    mean, error = difference
    if np.isnan(mean):
        return "neither reaches the target"
    if np.isinf(mean):
        return "target not reached"
    if (mean, error) == (-1.0, 0.0):
        return "only it reaches the target"
    return f"{100 * mean:+.1f}% ± {100 * error:.1f}"


def summary_rows(found: Sequence[Comparison]) -> list[list[str]]:
    """The cells of the table of claims."""
    rows = []
    for one in found:
        rows.append(
            [
                one.claim,
                one.setting,
                f"{one.method} against {one.control}",
                one.reported,
                percent(gain(one, one.method, one.control)),
                "; ".join(f"{name}: {percent(gain(one, one.method, name))}" for name in by_strength(one)),
                verdict(one),
                with_easier_targets(one),
            ]
        )
    return rows


def with_easier_targets(one: Comparison) -> str:
    """The verdicts with easier targets, where they differ from that with the target; "" if it has none."""
    if one.measure != "seconds_S":
        return ""
    verdicts = {factor: verdict(one.with_target(factor)) for factor in EASIER}
    others = [f"{factor - 1:.0%}: {found}" for factor, found in verdicts.items() if found != verdicts[1.0]]
    return "; ".join(others) or "the same"


HEADER = ["claim", "setting", "arms", "reported", "ours", "against omitted controls", "what survives", "easier targets"]


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    line = lambda cells: "| " + " | ".join(cells) + " |"
    return "\n".join([line(header), "|" + "---|" * len(header), *map(line, rows)]) + "\n"


def mean_error(values_S: np.ndarray, digits: int) -> str:
    """Mean and standard error over seeds; a dash if a seed has no value."""
    if not np.isfinite(values_S).all():
        reached = int(np.isfinite(values_S).sum())
        return f"– ({reached} of {len(values_S)} seeds)"
    error = values_S.std(ddof=1) / len(values_S) ** 0.5 if len(values_S) > 1 else 0.0
    return f"{values_S.mean():,.{digits}f} ± {error:,.{digits}f}"


def arms_table(one: Comparison) -> str:
    """All arms of a comparison."""
    more = list(dict.fromkeys(name for arm in one.arms.values() for name in arm.more))
    header = ["arm", "rate", "steps to target", "s to target", "s of the run", "loss at the end", *more]
    header.append(f"s {_measured(one)} against {one.control}")
    typical = one.arms[one.control].run_S.mean()
    digits = 2 if typical < 20 else 1 if typical < 200 else 0
    rows = []
    for name, arm in one.arms.items():
        cells = [name, f"{arm.rate:.3g}", mean_error(arm.steps_S, 0)]
        cells += [mean_error(values, digits) for values in (arm.seconds_S, arm.run_S)]
        cells += [mean_error(arm.loss_SxE[:, -1], 4), *(arm.more.get(key, "") for key in more)]
        rows.append([*cells, "" if name == one.control else percent(gain(one, name, one.control))])
    return markdown_table(header, rows)


def figure_of(found: Sequence[Comparison]) -> bytes:
    """Time relative to the paper's control, and the loss over time, one row for each setting."""
    groups = distinct(found)
    with style():
        figure = Figure(figsize=(11, 3.4 * len(groups)), layout="constrained")
        axes_Gx2 = figure.subplots(len(groups), 2, squeeze=False)
        for (bars, lines), one in zip(axes_Gx2, groups, strict=True):
            _bars(bars, one)
            _lines(lines, one, [other.method for other in found if other.arms is one.arms])
        return svg_bytes(figure)


def _bars(axes: Axes, one: Comparison) -> None:
    names = list(one.arms)
    for k, name in enumerate(names):
        mean, error = gain(one, name, one.control)
        if np.isfinite(mean) and mean != -1.0:
            axes.barh(k, 100 * mean, xerr=100 * error, color=_color(names, name), height=0.7)
        else:
            reached_S = np.isfinite(one.arms[name].seconds_S)
            text = f" {reached_S.sum()} of {len(reached_S)} seeds reach the target"
            axes.annotate(text, (0, k), va="center", fontsize=8)
    axes.axvline(0, color="#333333", linewidth=0.8)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlabel(f"time {_measured(one)} against {one.control}, %")
    axes.set_title(f"{one.claim}: {one.setting}")


def _lines(axes: Axes, one: Comparison, methods: Sequence[str]) -> None:
    names = list(one.arms)
    shown = dict.fromkeys([one.control, *methods, *one.omitted])
    for name in shown:
        arm = one.arms[name]
        dashes = "--" if name in one.omitted else "-"
        axes.plot(
            arm.clock_SxE.mean(axis=0),
            arm.loss_SxE.mean(axis=0),
            dashes,
            color=_color(names, name),
            label=name,
            linewidth=1.6,
        )
    axes.axhline(one.target, color="#333333", linewidth=0.8, linestyle=":")
    axes.set_yscale("log")
    axes.set_xlabel("virtual seconds")
    axes.set_ylabel("training loss")
    axes.legend(fontsize=8, frameon=False)


def _measured(one: Comparison) -> str:
    return "to the target" if one.measure == "seconds_S" else "of the run"


def _color(names: Sequence[str], name: str) -> str:
    return run_color(names.index(name))


def distinct(found: Sequence[Comparison]) -> list[Comparison]:
    """Comparisons with arms of their own: two methods of one setting share a table and a figure."""
    seen: dict[int, Comparison] = {}
    for one in found:
        seen.setdefault(id(one.arms), one)
    return list(seen.values())


def targets_table(found: Sequence[Comparison]) -> str:
    """What survives with easier targets, at the learning rates tuned for the first: "" if no verdict has a target."""
    rows = []
    for one in found:
        if one.measure == "seconds_S":
            easier = [one.with_target(factor) for factor in EASIER]
            against = lambda own, control: percent(gain(own, own.method, control))
            cells = [
                f"{against(own, own.control)}; {against(own, by_strength(own)[0])}: {verdict(own)}" for own in easier
            ]
            rows.append([one.setting, one.method, *cells])
    header = ["setting", "method", "the target", *(f"{factor - 1:.0%} higher" for factor in EASIER[1:])]
    intro = (
        "\n**Where the target decides**: the method against the paper's control; against the strongest omitted one: "
        "what survives\n\n"
    )
    return intro + markdown_table(header, rows) if rows else ""


def first_look_table(found: Sequence[Comparison]) -> str:
    """The seconds of the run beside those of the first look; "" if it had none of these settings."""
    rows = []
    for one in found:
        by_run = replace(one, measure="run_S")
        for name, first in FIRST_LOOK.get((one.claim, one.setting), {}).items():
            rows.append([one.setting, name, f"{first:+.1f}%", percent(gain(by_run, name, one.control))])
    header = ["setting", "arm", "first look", "here"]
    return "\n**Seconds of the run against equal**\n\n" + markdown_table(header, rows) if rows else ""


def section(claim: str, found: Sequence[Comparison], words: dict[str, str]) -> str:
    """The part of the page on one claim."""
    own = distinct(found)
    text = f"## {claim} {TITLES[claim]}\n\n{SETUPS[claim].format(**words)}\n\n{words['scale']}\n\n"
    text += f"![Time and loss of the arms of {claim}](reproduction/{claim}.svg)\n"
    for one in own:
        text += f"\n**{one.setting}**, target loss {one.target:.3g}\n\n{arms_table(one)}"
    return text + targets_table(found) + first_look_table(own)


SPENT = "It took {:.1f} minutes and {:.1f} of CPU time"
QUICK = "with `--quick` {:.1f} and {:.1f}"


def spent_words(full: tuple[float, float], quick: tuple[float, float] | None) -> str:
    """A sentence on the seconds and CPU seconds that a claim took, and of its quick run if there was one."""
    minutes = lambda text, seconds: text.format(*(one / 60 for one in seconds))
    return minutes(SPENT, full) + (f"; {minutes(QUICK, quick)}." if quick else ".")


def total_spent(sections: Iterable[str]) -> str:
    """A sentence on what all sections together took, from those of `spent_words`; "" if one has none."""
    pattern = (SPENT + "; " + QUICK).replace("{:.1f}", r"(\d+\.\d)")
    found = [re.search(pattern, text) for text in sections]
    minutes = [[float(one) for one in match.groups()] for match in found if match]
    if len(minutes) < len(found):
        return ""
    full, cpu, quick, quick_cpu = np.sum(minutes, axis=0)
    cores = len(os.sched_getaffinity(0))
    return (
        f"in {full + quick:.0f} minutes on {cores} cores, with {cpu + quick_cpu:.0f} of CPU time. It begins with "
        f"the runs of `--quick`,\na check that all works: {quick:.1f} minutes, {quick_cpu:.1f} of CPU time. "
    )


def parts_of(page: str) -> tuple[dict[str, list[str]], dict[str, str]]:
    """The rows of the table of claims, and the sections, of a page; both by claim."""
    head, *found = re.split(r"^(?=## \d{3} )", page, flags=re.MULTILINE)
    sections = {text[3:6]: text.strip("\n") + "\n" for text in found}
    rows = {claim: [line for line in head.splitlines() if line.startswith(f"| {claim} |")] for claim in sections}
    return rows, sections


def write_page(found: Sequence[Comparison], folder: Path, words_of: dict[str, dict[str, str]]) -> Path:
    """Write reproduction.md and its figures into a folder; claims that were not run stay on the page as they are.

    Args:
        found: all comparisons.
        folder: of the page; figures go to its folder `reproduction`.
        words_of: claim -> what SETUPS leaves open (images, sparse, timed), and the scale of the run.

    Returns:
        The page.
    """
    page, figures = folder / "reproduction.md", folder / "reproduction"
    figures.mkdir(parents=True, exist_ok=True)
    rows, sections = parts_of(page.read_text(encoding="utf-8") if page.exists() else "")
    for claim, words in words_of.items():
        own = [one for one in found if one.claim == claim]
        (figures / f"{claim}.svg").write_bytes(figure_of(own))
        rows[claim] = markdown_table(HEADER, summary_rows(own)).splitlines()[2:]
        sections[claim] = section(claim, own, words)
    head = markdown_table(HEADER, []) + "".join(f"{row}\n" for claim in sorted(rows) for row in rows[claim])
    intro = INTRO.format(slack=SLACK - 1, spent=total_spent(sections.values()))
    text = intro + head + "".join(f"\n{sections[claim]}" for claim in sorted(sections))
    page.write_text(text, encoding="utf-8")
    return page
