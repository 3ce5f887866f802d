"""Fixtures shared by the tests of experiments/."""

import pytest

from hetjax import report


@pytest.fixture
def no_figures(tmp_path, monkeypatch):
    """Skip the report of a run: it has its own tests, and drawing takes as long as a tiny training."""
    files = report.ReportFiles((tmp_path / "run.png",), tmp_path / "report.html")
    monkeypatch.setattr(report, "report", lambda *_, **__: files)
