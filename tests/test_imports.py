"""Imports go one way: every folder and file of the package has its place in ORDER and imports only from below."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import hetjax

PACKAGE = Path(hetjax.__file__).parent

# From the bottom up: a part imports from itself and from earlier rows only.
ORDER = [
    {"arguments", "environment", "headline", "plain_state", "processes", "thinning"},
    {"planning", "devices", "interrupt", "profiling", "state"},
    {"sampling"},
    {"reduce", "report"},
    {"fleet"},
    {"adapters", "data", "launch"},
    {"engines"},
    {"simulation"},
    {"history"},
    {"sync", "checkpoint", "nonfinite"},
    {"presets", "pipeline"},
    {"recovery"},
    {"sessions", "evaluation"},
    {"step"},
    {"loops"},
    {"trainer"},
    {"zoo"},
    {"cli"},
    {"__main__"},
]
HEIGHT = {room: height for height, row in enumerate(ORDER) for room in row}
# The processes of a mesh's devices, and those of a TPU that is only described.
KNOW_JAX_PROCESSES = {"devices/workers.py", "devices/targets.py"}
WITHOUT_JAX = (
    "planning",
    "sampling",
    "launch",
    "arguments",
    "environment",
    "headline",
    "plain_state",
    "thinning",
    "report",
)
ONLY_FOR_COMMANDS = {"report", "zoo", "cli", "launch"}  # imported by commands and experiments, not by the library
COMMANDS = {"cli", "__main__"} | ONLY_FOR_COMMANDS


def files() -> list[Path]:
    return [path for path in sorted(PACKAGE.rglob("*.py")) if path != PACKAGE / "__init__.py"]


def part_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path) -> list[tuple[str, ast.AST]]:
    """Every module or name that a file imports, at any depth."""
    found: list[tuple[str, ast.AST]] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}, line {node.lineno}: a relative import"
            found += [(f"{node.module}.{alias.name}", node) for alias in node.names]
        elif isinstance(node, ast.Import):
            found += [(alias.name, node) for alias in node.names]
    return found


def test_every_part_has_its_place_in_the_order():
    assert {part_of(path) for path in files()} == HEIGHT.keys()


@pytest.mark.parametrize("part", sorted(HEIGHT))
def test_a_part_imports_only_what_lies_below_it(part):
    wrong = []
    for path in (path for path in files() if part_of(path) == part):
        for name, node in imports(path):
            other = name.split(".")[1] if name.startswith("hetjax.") else part
            below = HEIGHT.get(other, -1) < HEIGHT[part] and (other not in ONLY_FOR_COMMANDS or part in COMMANDS)
            if other != part and not below:
                wrong.append(f"{path.relative_to(PACKAGE)}, line {node.lineno}: imports {name}")
    assert not wrong


@pytest.mark.parametrize("part", ["planning", "sampling"])
def test_planning_and_sampling_never_import_jax(part):
    for path in (PACKAGE / part).rglob("*.py"):
        names = {name.split(".")[0] for name, _ in imports(path)}
        assert not names & {"jax", "jaxlib", "flax", "optax"}, path


def test_planning_sampling_and_the_launcher_start_without_jax():
    modules = [
        ".".join(("hetjax", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__")
        for path in files()
        if part_of(path) in WITHOUT_JAX and path.stem != "child"  # that one is a program
    ]
    code = f"import sys, {', '.join(modules)}; assert 'jax' not in sys.modules, 'jax was imported'"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=280)


def test_only_devices_of_a_mesh_are_asked_for_their_process():
    """With the transport 'host' every process is JAX's process 0 of 1: `hetjax.processes` knows better."""
    allowed = {PACKAGE / path for path in KNOW_JAX_PROCESSES}
    assert all(asks_jax_for_processes(path) for path in allowed)
    others = {*files(), *(PACKAGE.parent / "experiments").rglob("*.py")}.difference(allowed)
    wrong = [f"{path}, line {line}" for path in sorted(others) for line in asks_jax_for_processes(path)]
    assert not wrong
    for notebook in (PACKAGE.parent / "colab").glob("*.ipynb"):
        assert not re.search("process_index|process_count", notebook.read_text()), notebook


def asks_jax_for_processes(path: Path) -> list[int]:
    """The lines of a file with an attribute or an import `process_index` or `process_count`."""
    asked = {"process_index", "process_count"}
    nodes = list(ast.walk(ast.parse(path.read_text())))
    read = [node.lineno for node in nodes if isinstance(node, ast.Attribute) and node.attr in asked]
    return read + [node.lineno for name, node in imports(path) if name.split(".")[-1] in asked]


def test_a_class_name_stands_for_one_thing():
    found: dict[str, str] = {}
    for path in files():
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                assert node.name not in found, f"{node.name} in {found[node.name]} and in {path}"
                found[node.name] = str(path)


def test_every_public_name_can_be_had():
    for name in hetjax.__all__:
        assert getattr(hetjax, name) is not None
