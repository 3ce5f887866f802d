"""Processes plan on their own and must agree to the bit: planning uses only operations that are exact everywhere."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import hetjax

PACKAGE = Path(hetjax.__file__).parent
# What processes compute on their own and must agree on; not the simulator, which no run uses.
FILES = sorted({*(PACKAGE / "planning").rglob("*.py"), *(PACKAGE / "sampling").glob("*.py")})
FILES += [PACKAGE / "sync" / "daso" / "schedule.py", PACKAGE / "sync" / "hogbatch" / "rules.py"]
FILES = [path for path in FILES if path.stem not in ("simulator", "quality")]
# Their last bit depends on the processor or on the library behind them.
INEXACT = {"exp", "expm1", "log", "log1p", "log2", "log10", "power", "pow", "sin", "cos", "tanh", "cbrt", "hypot"}
INEXACT |= {"dot", "matmul", "inner", "einsum", "linalg"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_decisions_use_only_exact_operations(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.BinOp | ast.AugAssign):
            whole = isinstance(getattr(node, "right", None), ast.Constant) and isinstance(node.right.value, int)
            base = isinstance(getattr(node, "left", None), ast.Constant) and isinstance(node.left.value, int)
            exact_power = isinstance(node.op, ast.Pow) and whole and base  # of whole numbers, such as 2**31
            assert exact_power or not isinstance(node.op, ast.Pow | ast.MatMult), f"line {node.lineno}"
        if isinstance(node, ast.Attribute):
            assert node.attr not in INEXACT, f"line {node.lineno}: {node.attr}"
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("sort", "argsort"):
            stable = any(k.arg == "kind" and getattr(k.value, "value", "") == "stable" for k in node.keywords)
            assert stable, f"line {node.lineno}: an unstable sort"
