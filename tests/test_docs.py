"""The documentation is true: its Python runs, its commands and flags exist, its table of strategies is complete."""

import contextlib
import io
import re
import shlex
from pathlib import Path

import numpy as np
import plain_flax
import pytest

import hetjax
from hetjax.__main__ import COMMANDS, main
from hetjax.cli import train
from hetjax.launch.options import split_program
from hetjax.presets import PRESETS
from hetjax.sync import REGISTRY

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
NAMES = [page.relative_to(ROOT / "docs").as_posix() for page in PAGES]
NOT_OURS = {"pip", "pytest", ".ci/run", "apt", "mkdocs"}


def text_of(name):
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


def blocks(text, language):
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def commands(text):
    """The commands of a page's shell blocks, and of indented and quoted lines that start a program of ours."""
    lines = [line for block in blocks(text, "bash") for line in block.replace("\\\n", " ").splitlines()]
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
        train.read_config(words[1:])
        return
    own, program = split_program(words)
    known = help_of(own[0])
    for word in own[1:]:
        if word.startswith("--"):
            assert word.partition("=")[0] in known, f"hetjax {own[0]} has no {word}"
    if own[0] == "launch" and program[0] == "hetjax":
        check_hetjax(program[1:])


def help_of(command):
    """The flags that --help of a command lists."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), pytest.raises(SystemExit):
        main([command, "--help"])
    return set(re.findall(r"--[a-z][a-z-]*", printed.getvalue()))


@pytest.mark.parametrize("name", [name for name in NAMES if commands(text_of(name))])
def test_the_commands_of_a_page_exist(name):
    for command in commands(text_of(name)):
        check_command(command)


@pytest.mark.parametrize(
    "command",
    ["hetjax trian", "hetjax train --no-such-flag", "hetjax launch --no-such-flag -- hetjax check", "python docs/no.py",
     "hetjax launch -- hetjax train --no-such-flag", "python experiments/bench_step.py --no-such-flag", "rm -r x"],
)  # fmt: skip
def test_a_command_that_does_not_exist_is_found(command, capsys):
    with pytest.raises((AssertionError, SystemExit, OSError)):
        check_command(shlex.split(command))


def after_block(name, number, block, names, plain):
    """What must hold after a block of porting.md: the ported script gives the result of the plain one."""
    if name != "porting.md":
        return
    if number == 0:
        plain["model"] = names["model"]
        assert np.isfinite(float(names["loss"]))
    elif number == 1:
        plain_flax.assert_same_model(names["model"], plain["model"])
        assert int(names["optimizer"].step[...]) == 10
    if "wrt=nnx.LoRAParam" in block:
        plain_flax.assert_same_model(names["tuned"].base, names["model"], rtol=0, atol=0)
    if "hetjax.frozen" in block:
        backbone = hetjax.unfrozen(names["state"].params)["backbone"]
        np.testing.assert_array_equal(backbone, np.ones((8, 16)))
        assert names["record"].step == 10


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in NAMES if blocks(text_of(name), "python")])
def test_the_python_of_a_page_runs(name, tmp_path, monkeypatch, capsys):
    """All blocks of a page, one after the other, in one namespace."""
    monkeypatch.chdir(tmp_path)
    names, plain = {}, {}
    for number, block in enumerate(blocks(text_of(name), "python")):
        exec(compile(block, f"{name}, block {number + 1}", "exec"), names)
        after_block(name, number, block, names, plain)


def test_the_table_lists_all_strategies_and_each_has_a_page():
    pattern = r"^\| \[`([\w-]+)`\]\(([\w-]+\.md)\) \| (\w+) \| (\w+) \| ([\w-]+) \| (.*) \|$"
    rows = re.findall(pattern, text_of("strategies/index.md"), re.MULTILINE)
    controller = lambda s: s.controller if REGISTRY[s.sync].stepped else "none"
    expected = [(name, controller(s), s.partition, s.sync, s.idea) for name, s in PRESETS.items()]
    assert [(name, *rest) for name, _, *rest in rows] == expected
    for name, page, *_ in rows:
        assert name in text_of(f"strategies/{page}")


def test_every_public_name_is_in_the_reference():
    listed = {name.rpartition(".")[2] for name in re.findall(r"^::: (\S+)$", text_of("api.md"), re.MULTILINE)}
    listed = {{"chosen_devices": "devices"}.get(name, name) for name in listed}
    assert listed >= set(hetjax.__all__)


def test_every_page_is_in_the_navigation():
    listed = set(re.findall(r"([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE))
    assert listed == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_the_pictures_of_a_page_exist_and_are_small(name):
    for picture in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", text_of(name)):
        file = (ROOT / "docs" / name).parent / picture
        assert file.stat().st_size < 2**20, picture
