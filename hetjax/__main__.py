"""The command line of the package: python -m hetjax check | report | launch | partition."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console

from hetjax.launch.options import Options, split_program


def report(folders: tyro.conf.Positional[tuple[Path, ...]], page: Path | None = None) -> None:
    """Compare runs: a picture in every run's folder and one self-contained HTML page.

    Args:
        folders: folders that training runs wrote, or folders with several of them
        page: where the page goes; report.html in the folder that holds them all unless told
    """
    from hetjax.report import report as draw

    drawn = draw(*folders, page=page)
    for path in (*drawn.figures, drawn.page):
        print(path)


def check(devices: Annotated[int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="")] = None) -> None:
    """What to type first on new hardware: are the devices seen, do they agree, how fast is each?

    Args:
        devices: how many; on a CPU so many fake ones, 4 unless told
    """
    from hetjax.cli.check import check as examine

    examine(devices, Console())


def launch(options: Annotated[Options, tyro.conf.arg(name="")]) -> Options:
    """Start a program in several processes of this machine as one run: launch [FLAGS] -- PROGRAM [ARGUMENTS].

    CPU quotas can slow processes down while they run. When one dies the others are ended, and all can be started
    again from the last checkpoint. None is left behind.
    """
    return options  # started in `main`, which knows what came after --


def partition(
    dataset: tyro.conf.Positional[str],
    rates: Annotated[str | None, tyro.conf.arg(metavar="LIST", help_behavior_hint="")] = None,
    workers: Annotated[int, tyro.conf.arg(metavar="INT")] = 4,
    objective: Annotated[str | None, tyro.conf.arg(metavar="NAME", help_behavior_hint="")] = None,
    rule: Annotated[str | None, tyro.conf.arg(metavar="NAME", help_behavior_hint="")] = None,
    features: Annotated[str | None, tyro.conf.arg(metavar="NAME", help_behavior_hint="")] = None,
    bandwidth: Annotated[float | None, tyro.conf.arg(metavar="FLOAT", help_behavior_hint="")] = None,
    pseudo_classes: Annotated[int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="")] = None,
    out: Path = Path("blocks.npz"),
    recut: Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")] = None,
    compare: bool = False,
    seed: int = 0,
) -> None:
    """Cut a data set into one block per worker that each stand for the whole (submodular greedy, arXiv 2211.00839).

    Args:
        dataset: digits, synthetic, idx:DIR, npz:FILE (labels, other targets or none) or tfds:NAME
        rates: of the workers, such as 4,2,1,1; the blocks follow them
        workers: instead of rates: so many of equal rate
        objective: facility-location (unless told) or graph-cut
        rule: who chooses next: min-block (published), per-rate, fill, parts; unless told auto: min-block at equal
            rates, else parts
        features: what similarity is measured on: raw, pca (unless told), pca:COMPONENTS, or MODULE:FUNCTION of a batch
        bandwidth: of the Gaussian kernel; the median distance within each class unless told
        pseudo_classes: so many by k-means in place of labels; 10 unless told where there are none
        out: file of the blocks; a picture is put beside it
        recut: file of earlier blocks of the same data: move as few of their samples as the new rates need
        compare: cut by every objective and rule too, for the report; without it only random and class-balanced blocks
            are beside these
        seed: of random partitions and pseudo-classes
    """
    from hetjax.cli.partition import cut, parse_rates

    cut(
        dataset,
        parse_rates(rates, workers),
        out,
        Console(),
        objective=objective,
        rule=rule,
        features=features,
        bandwidth=bandwidth,
        pseudo_classes=pseudo_classes,
        compare=compare,
        old=recut,
        seed=seed,
    )


COMMANDS: dict[str, Callable[..., Any]] = {"check": check, "report": report, "launch": launch, "partition": partition}


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, 1 where a check failed, 2 for a mistake of the user; `launch` has its program's."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    arguments, program = split_program(arguments) if arguments[:1] == ["launch"] else (arguments, [])
    try:
        wanted = tyro.extras.subcommand_cli_from_dict(
            COMMANDS,
            prog="python -m hetjax",
            description="Tools around training with hetjax.",
            args=arguments,
            config=(tyro.conf.FlagCreatePairsOff,),
        )
        if isinstance(wanted, Options):
            from hetjax.launch.launcher import launch as start

            return start(wanted, program)
    except AssertionError as failed:
        print(f"failed: {failed}", file=sys.stderr)
        return 1
    except (ValueError, TypeError, OSError, ImportError, MemoryError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
