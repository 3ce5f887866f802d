"""The documentation is true: its Python runs, its commands and flags exist, its table of strategies is complete."""

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import plain_flax
import pytest
import quick_compiles
from page_blocks import blocks, check_command, commands

import hetjax
from hetjax.presets import PRESETS
from hetjax.sync import REGISTRY

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
NAMES = [page.relative_to(ROOT / "docs").as_posix() for page in PAGES]


def text_of(name):
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


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
    if "hetjax.devices(" in text_of(name):  # as a user's program: without the devices of the tests
        code = "\n\n".join(blocks(text_of(name), "python"))
        env = {**os.environ, "XLA_FLAGS": quick_compiles.FLAGS}
        subprocess.run([sys.executable, "-c", code], env=env, check=True, timeout=280)
        return
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
    listed = re.findall(r"^::: (?:\S+\.)?(\w+)$|^### (\w+)$", text_of("api.md"), re.MULTILINE)
    assert {entry or heading for entry, heading in listed} >= set(hetjax.__all__)


def code_of_pages_and_notebooks():
    yield from (block for page in [*PAGES, ROOT / "README.md"] for block in blocks(page.read_text(), "python"))
    for path in sorted((ROOT / "colab").glob("*.ipynb")):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        yield from ("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")


def test_every_name_of_a_public_module_that_pages_and_notebooks_use_is_in_the_reference():
    pattern = r"(?:\bhetjax\.|(?<![\w.]))(checkpoint|fleet|report)\.([A-Za-z]\w*)"
    used = {found for code in code_of_pages_and_notebooks() for found in re.findall(pattern, code)}
    assert {("checkpoint", "restore"), ("report", "JsonlTracker")} <= used
    listed = set(re.findall(r"^::: (?:\S+\.)?(\w+)$", text_of("api.md"), re.MULTILINE))
    assert not {f"{module}.{name}" for module, name in used if name not in listed}


def test_every_page_is_in_the_navigation():
    listed = set(re.findall(r"([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE))
    assert listed == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_the_pictures_of_a_page_exist_and_are_small(name):
    for picture in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", text_of(name)):
        file = (ROOT / "docs" / name).parent / picture
        assert file.stat().st_size < 2**20, picture


def test_the_table_of_faults_is_that_of_the_results():
    spec = importlib.util.spec_from_file_location("faults", ROOT / "docs" / "faults.py")
    faults = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(faults)
    results = json.loads(faults.RESULTS.read_text(encoding="utf-8"))
    assert faults.table(results) in text_of("faults.md")
    known = {"median_s": 0.3, "p95_s": 0.39, "worst_s": 0.4, "standstill_median_s": 0.2}
    results["seconds"] |= {"kill": {"events": 2, **known}, "join": {"events": 20, **known}}
    rows = {line.split(" | ")[0]: line for line in faults.table(results).splitlines()}
    assert rows["| killed, reported by its launcher"].endswith("| 2 | 0.30 s | 0.40 s | 0.20 s |")
    assert rows["| another one joins, until it trains"].endswith("| 20 | 0.30 s | 0.39 s (95%) | 0.20 s |")
