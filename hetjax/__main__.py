"""The command line of the package: python -m hetjax check | report | launch."""

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
    from hetjax.watch import report as draw

    drawn = draw(*folders, page=page)
    for path in (*drawn.figures, drawn.page):
        print(path)


def check(devices: Annotated[int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="")] = None) -> None:
    """What to type first on new hardware: are the devices seen, do they agree, how fast is each?

    Args:
        devices: how many; on a CPU so many fake ones, 4 unless told
    """
    from hetjax.check import check as examine

    examine(devices, Console())


def launch(options: Annotated[Options, tyro.conf.arg(name="")]) -> Options:
    """Start a program in several processes of this machine as one run: launch [FLAGS] -- PROGRAM [ARGUMENTS].

    CPU quotas can slow processes down while they run. When one dies the others are ended, and all can be started
    again from the last checkpoint. None is left behind.
    """
    return options  # started in `main`, which knows what came after --


COMMANDS: dict[str, Callable[..., Any]] = {"check": check, "report": report, "launch": launch}


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
    except (ValueError, TypeError, OSError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
