"""Nothing is ever unpickled, as a pickle can run any code: no such module is imported, and np.load refuses pickles."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted([*(ROOT / "hetjax").rglob("*.py"), *(ROOT / "experiments").rglob("*.py")])
UNPICKLERS = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"}


def unpickling_lines(code):
    """Lines that import a module that unpickles, or call np.load without allow_pickle=False."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names = {name.split(".")[0] for name in [*module, *(alias.name for alias in node.names)]}
            if names & UNPICKLERS:
                yield node.lineno
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if ast.unparse(node.func.value) not in ("np", "numpy"):
                continue
            keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            if node.func.attr == "load" and keywords.get("allow_pickle") != "False":
                yield node.lineno
            if keywords.get("allow_pickle") == "True":
                yield node.lineno


@pytest.mark.parametrize(
    ("code", "lines"),
    [
        ("import os, pickle", [1]),
        ("from pickle import loads", [1]),
        ("import joblib.memory", [1]),
        ("\nnp.load(path)", [2]),
        ("numpy.load(path, allow_pickle=True)", [1, 1]),
        ("np.load(path, allow_pickle=False)\njson.load(file)", []),
    ],
)
def test_the_search_itself(code, lines):
    assert list(unpickling_lines(code)) == lines


def test_no_file_unpickles():
    assert len(FILES) > 80
    found = {f"{path.relative_to(ROOT)}:{line}" for path in FILES for line in unpickling_lines(path.read_text())}
    assert not found
