"""The command line of the package: python -m hetjax check | compile | report | launch | key | partition."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import tyro

from hetjax import processes
from hetjax.cli import commands
from hetjax.launch.options import Options, split_program

COMMANDS: dict[str, Callable[..., Any]] = {
    "check": commands.check,
    "compile": commands.compile,
    "report": commands.report,
    "launch": commands.launch,
    "key": commands.key,
    "partition": commands.partition,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns 0, 1 if a check failed, 2 for a usage error, or the exit code of a launched program."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    arguments, program = split_program(arguments) if arguments[:1] == ["launch"] else (arguments, [])
    try:
        result = tyro.extras.subcommand_cli_from_dict(
            COMMANDS,
            prog="python -m hetjax",
            description="Tools for training with hetjax.",
            args=arguments,
            config=(tyro.conf.FlagCreatePairsOff,),
        )
        if isinstance(result, Options):
            from hetjax.launch.launcher import launch

            return launch(result, program)
    except AssertionError as failed:
        print(f"failed: {failed}", file=sys.stderr)
        return 1
    except (ValueError, TypeError, OSError, ImportError, MemoryError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    code = main()
    if processes.link() is not None:  # a command that joined other processes
        from hetjax.fleet import leave

        leave(code, together=code == 0)
    sys.exit(code)
