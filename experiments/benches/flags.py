"""Flags that the benches share, shown in --help without the parser's placeholders."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import tyro

from hetjax.launch.options import Switch, optional

__all__ = ["File", "JsonFile", "Numbers", "Switch", "Text", "Whole", "from_flags"]

JsonFile = Annotated[Path | None, tyro.conf.arg(name="json", metavar="FILE", help_behavior_hint="")]
File = Annotated[Path | None, optional("PATH")]
Text = Annotated[str | None, optional("NAMES")]
Numbers = Annotated[tuple[float, ...] | None, optional("FLOAT [FLOAT ...]")]
Whole = Annotated[int | None, optional("INT")]


def from_flags(program: Callable[..., Any], **options: Any) -> Any:
    """Call a bench, or make its dataclass of options, with the flags of the command line."""
    return tyro.cli(program, config=(tyro.conf.FlagCreatePairsOff,), **options)
