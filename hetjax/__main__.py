"""The command line of the package: hetjax, or python -m hetjax."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from typing import Any, NoReturn

import tyro

from hetjax import processes
from hetjax.cli import commands
from hetjax.launch.options import Options, split_program

COMMANDS: dict[str, Callable[..., Any]] = {
    "train": commands.train,
    "check": commands.check,
    "compile": commands.compile,
    "report": commands.report,
    "launch": commands.launch,
    "key": commands.key,
    "rendezvous": commands.rendezvous,
    "partition": commands.partition,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns 0, 1 if a check failed, 2 for a usage error, or the exit code of a launched program."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if arguments[:1] == ["train"]:  # it has flags, and exit codes, of its own
        from hetjax.cli import train

        return train.main(arguments[1:])
    if arguments and not arguments[0].startswith("-") and arguments[0] not in COMMANDS:
        near = get_close_matches(arguments[0], COMMANDS, 1)
        meant = f"did you mean {near[0]!r}?" if near else f"use one of {', '.join(COMMANDS)}."
        print(f"error: {arguments[0]!r} is no command: {meant}", file=sys.stderr)
        return 2
    arguments, program = split_program(arguments) if arguments[:1] == ["launch"] else (arguments, [])
    try:
        result = tyro.extras.subcommand_cli_from_dict(
            COMMANDS,
            prog="hetjax",
            description="Data-parallel JAX training on devices of unequal and changing speed.",
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


def program(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run a command and end this process, together with the others that it has joined."""
    try:
        code = main(arguments)
    except Exception:
        traceback.print_exc()
        code = 1
    if processes.link() is not None:
        from hetjax.fleet import leave

        leave(code, together=code in (0, 130))
    sys.exit(code)


if __name__ == "__main__":
    program()
