"""The command line of the package: python -m hetjax check | report."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console


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


COMMANDS: dict[str, Callable[..., Any]] = {"check": check, "report": report}


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, 1 where a check failed, 2 for a mistake of the user."""
    try:
        tyro.extras.subcommand_cli_from_dict(
            COMMANDS, prog="python -m hetjax", description="Tools around training with hetjax.", args=arguments
        )
    except AssertionError as failed:
        print(f"failed: {failed}", file=sys.stderr)
        return 1
    except (ValueError, TypeError, OSError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
