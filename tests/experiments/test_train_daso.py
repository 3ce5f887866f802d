"""`hetjax train` with DASO in one process; with several: tests/faults/test_train_killed.py."""

import json

import pytest

from hetjax.cli import train
from hetjax.report import read_run

SAMPLES = 1438  # of digits


@pytest.mark.parametrize("flags", [[], ["--faithful"]])
@pytest.mark.slow
def test_one_process(flags, tmp_path):
    """With the default optimizer, whose state has other leaves than the parameters."""
    tiny = ["--model", "mlp", "--width", "8", "--batch-size", "500", "--devices", "2", "--epochs", "5"]
    assert train.main([*tiny, "--strategy", "daso", *flags, "--out", str(tmp_path)]) == 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["sync"], summary["steps"], summary["samples"]) == ("daso", 15, 5 * SAMPLES)
    losses = read_run(tmp_path).loss_S
    assert losses[-3:].mean() < losses[:3].mean()
