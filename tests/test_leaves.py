"""Data, models and watch are leaves: they can be used, and tested, without the planning and the core."""

import ast
from pathlib import Path

import pytest

import hetjax

ROOT = Path(hetjax.__file__).parent
LEAVES = ("data", "models", "watch")
BOTTOM = ("arguments", "thinning")
FILES = [path for leaf in LEAVES for path in sorted((ROOT / leaf).glob("**/*.py"))]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_leaf_imports_nothing_above_it(path):
    imported = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            imported |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            imported.add(node.module)
    inside = {name for name in imported if name == "hetjax" or name.startswith("hetjax.")}
    assert {name for name in inside if name.partition(".")[2].partition(".")[0] not in LEAVES + BOTTOM} == set()


@pytest.mark.parametrize("leaf", LEAVES)
def test_every_file_says_what_it_is_for(leaf):
    for path in (ROOT / leaf).glob("**/*.py"):
        said = ast.get_docstring(ast.parse(path.read_text()))
        assert said, path
