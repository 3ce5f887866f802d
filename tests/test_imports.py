"""Imports go one way: plan <- run <- sync <- presets <- step <- trainer <- experiments; data, watch, models, launch are
leaves."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import hetjax

PACKAGE = Path(hetjax.__file__).parent
BOTTOM = {"arguments", "thinning"}  # anyone may import these, and they import nothing of hetjax
MAY_IMPORT = {
    "plan": {"plan"},
    "data": {"data"},
    "watch": {"watch"},
    "models": {"models", "data"},
    "launch": {"launch"},
    "run": {"run", "plan", "data", "launch"},
    "batches": {"run", "plan", "data"},
    "calibration": {"run", "plan", "data"},
    "recorder": {"run", "history"},
    "sync": {"sync", "run", "plan", "data", "history", "recorder"},
    "presets": {"sync", "run", "plan"},
    "pipeline": {"run", "plan"},
    "step": {
        "batches",
        "calibration",
        "data",
        "history",
        "nonfinite",
        "pipeline",
        "plan",
        "presets",
        "run",
        "sync",
    },
}


def imported(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
    return {name for name in names if name.startswith("hetjax.")}


@pytest.mark.parametrize("part", sorted(MAY_IMPORT))
def test_a_part_imports_only_what_lies_below_it(part):
    wrong = {
        f"{path.relative_to(PACKAGE)} imports {name}"
        for path in [*(PACKAGE / part).rglob("*.py"), *PACKAGE.glob(f"{part}.py")]
        for name in imported(path)
        if name.split(".")[1] not in MAY_IMPORT[part] | BOTTOM
    }
    assert not wrong


def test_the_bottom_imports_nothing_of_hetjax():
    assert not set().union(*(imported(PACKAGE / f"{part}.py") for part in BOTTOM))


def test_nothing_in_plan_mentions_jax():
    for path in (PACKAGE / "plan").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {name.split(".")[0] for name in names} & {"jax", "jaxlib", "flax", "optax"}, path


@pytest.mark.parametrize("modules", ["hetjax.planning, hetjax.planning.controllers", "hetjax.launch.launcher"])
def test_neither_planning_nor_the_launcher_imports_jax(modules):
    code = f"import sys, {modules}; assert 'jax' not in sys.modules, 'jax was imported'"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_every_public_name_can_be_had():
    for name in hetjax.__all__:
        assert getattr(hetjax, name) is not None
