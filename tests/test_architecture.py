"""docs/architecture.md names files and classes that exist, and every part of the package."""

import ast
import re
from pathlib import Path

import hetjax

PACKAGE = Path(hetjax.__file__).parent
TEXT = (PACKAGE.parent / "docs" / "architecture.md").read_text()
QUOTED = re.findall(r"`([^`\n]+)`", TEXT)


def test_every_file_it_names_exists():
    named = {name for name in QUOTED if re.fullmatch(r"[a-z_/]+(\.py|/)", name)}
    assert {name for name in named if "/" in name.rstrip("/")}
    known = [path.relative_to(PACKAGE.parent).as_posix() for path in PACKAGE.parent.rglob("*.py")]
    missing = {name for name in named if not any(f"/{name}" in f"/{path}" for path in known)}
    assert not missing


def test_every_class_it_names_exists():
    classes = {
        node.name
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    }
    named = {name.split(".")[0] for name in QUOTED if re.fullmatch(r"[A-Z][a-z]\w*(\.\w+)?", name)}
    assert named
    assert named <= classes


def test_it_names_every_part_of_the_package():
    parts = {f"{path.name}/" for path in PACKAGE.iterdir() if (path / "__init__.py").is_file()}
    parts |= {path.name for path in PACKAGE.glob("*.py") if path.stem != "__init__"}
    assert parts <= set(QUOTED)
