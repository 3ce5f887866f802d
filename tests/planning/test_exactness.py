"""Processes plan on their own and must agree to the bit: planning uses only operations that are exact everywhere."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import hetjax

PACKAGE = Path(hetjax.__file__).parent
# What runs on the host without JAX in these folders is computed by every process, except for:
FOLDERS = ("planning", "sampling", "reduce", "sync")
DECIDED_ONCE = {
    "planning/simulator.py": "no run uses it",
    "sampling/quality.py": "figures for people",
    "sampling/submodular/": "blocks are cut by one process and read from a file",
    "sync/topology.py": "process 0 sends its mixing weights to all",
}


def imports_jax(path: Path) -> bool:
    return re.search(r"^\s*(import|from) jax\b", path.read_text(), re.MULTILINE) is not None


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


HOST = [path for folder in FOLDERS for path in sorted((PACKAGE / folder).rglob("*.py")) if not imports_jax(path)]
FILES = [path for path in HOST if not name_of(path).startswith(tuple(DECIDED_ONCE))]
# Their last bit depends on the processor or on the library behind them.
INEXACT = {"exp", "expm1", "log", "log1p", "log2", "log10", "power", "pow", "sin", "cos", "tanh", "cbrt", "hypot"}
INEXACT |= {"dot", "matmul", "inner", "einsum", "linalg"}


def inexact(path: Path) -> list[str]:
    """The operations of a file whose last bit or order may differ between hosts."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.BinOp | ast.AugAssign):
            whole = isinstance(getattr(node, "right", None), ast.Constant) and isinstance(node.right.value, int)
            base = isinstance(getattr(node, "left", None), ast.Constant) and isinstance(node.left.value, int)
            exact_power = isinstance(node.op, ast.Pow) and whole and base  # of whole numbers, such as 2**31
            if isinstance(node.op, ast.Pow | ast.MatMult) and not exact_power:
                found.append(f"line {node.lineno}: {ast.unparse(node)}")
        if isinstance(node, ast.Attribute) and node.attr in INEXACT:
            found.append(f"line {node.lineno}: {node.attr}")
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("sort", "argsort"):
            stable = any(k.arg == "kind" and getattr(k.value, "value", "") == "stable" for k in node.keywords)
            if not stable:
                found.append(f"line {node.lineno}: an unstable sort")
    return found


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_decisions_use_only_exact_operations(path):
    assert inexact(path) == []


@pytest.mark.parametrize("name", DECIDED_ONCE)
def test_an_exception_is_one(name):
    assert any(inexact(path) for path in HOST if name_of(path).startswith(name))
