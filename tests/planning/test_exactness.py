"""Unlike hosts must decide alike, to the bit: the deciding code uses only operations that are exact everywhere."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import hetjax.planning

ROOT = Path(hetjax.planning.__file__).parent
FILES = [ROOT / f"{stem}.py" for stem in ("allocation", "cost_model", "grid", "limits", "logarithm", "rounding")]
FILES += sorted((ROOT / "controllers").glob("*.py"))
# The last bit of these depends on the processor, or on the library behind it.
INEXACT = {"exp", "expm1", "log", "log1p", "log2", "log10", "power", "pow", "sin", "cos", "tanh", "cbrt", "hypot"}
INEXACT |= {"dot", "matmul", "inner", "einsum", "linalg"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_decisions_use_only_exact_operations(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.BinOp | ast.AugAssign):
            assert not isinstance(node.op, ast.Pow | ast.MatMult), f"line {node.lineno}"
        if isinstance(node, ast.Attribute):
            assert node.attr not in INEXACT, f"line {node.lineno}: {node.attr}"
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("sort", "argsort"):
            stable = any(k.arg == "kind" and getattr(k.value, "value", "") == "stable" for k in node.keywords)
            assert stable, f"line {node.lineno}: a sort that is not stable"
