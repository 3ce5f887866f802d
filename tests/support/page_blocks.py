"""Code blocks and commands of a page of the documentation, and whether those commands and their flags exist."""

import contextlib
import io
import re
import shlex
from pathlib import Path

from hetjax.__main__ import COMMANDS, main
from hetjax.cli import train
from hetjax.launch.options import split_program

ROOT = Path(__file__).parents[2]
NOT_OURS = {"pip", "pytest", ".ci/run", "apt", "mkdocs"}


def blocks(text, language):
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def commands(text):
    """The commands of a page's shell blocks, and of indented and quoted lines that start a program of ours."""
    text = text.replace("\\\n", " ")
    lines = [line for block in blocks(text, "bash") for line in block.splitlines()]
    lines += re.findall(r"(?:^    |`)((?:python (?:docs|experiments)/|hetjax )[^`\n]+)", text, re.MULTILINE)
    found = [shlex.split(part, comments=True) for line in lines for part in line.split("&&")]
    return [command for command in found if command]


def check_command(command):
    """Parse a command of hetjax, wherever it stands in the line; of other programs of ours, look for file and flags."""
    if command[0] in NOT_OURS:
        return
    if "hetjax" in command:
        check_hetjax(command[command.index("hetjax") + 1 :])
        return
    scripts = [word for word in command if word.endswith(".py")]
    assert scripts, f"unknown command {command}"
    source = (ROOT / scripts[0]).read_text(encoding="utf-8")
    for word in command[command.index(scripts[0]) + 1 :]:
        if word.startswith("--"):
            assert word[2:].replace("-", "_") in source or f'"{word}"' in source, f"{scripts[0]} has no {word}"


def check_hetjax(words):
    if not words or words[0] not in COMMANDS:
        raise AssertionError(f"there is no command hetjax {' '.join(words)}")
    if words[0] == "train":
        train.read_config([word for word in words[1:] if word != "--resume"])  # there is no run to resume here
        return
    own, program = split_program(words)
    known = help_of(own[0])
    for word in own[1:]:
        if word.startswith("--"):
            assert word.partition("=")[0] in known, f"hetjax {own[0]} has no {word}"
    if program[:1] == ["hetjax"]:
        check_hetjax(program[1:])


def help_of(command):
    """The flags that --help of a command lists."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        main([command, "--help"])
    return set(re.findall(r"--[a-z][a-z-]*", printed.getvalue()))
