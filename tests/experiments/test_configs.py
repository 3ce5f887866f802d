"""Every named experiment states its command, run time and expected result, and runs for one step."""

import ast
import gzip
import json

import numpy as np
import pytest

from hetjax.cli import train
from hetjax.cli.training import configs

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", configs.names())
def test_a_config_states_what_to_expect(name):
    docstring = ast.get_docstring(ast.parse((configs.CONFIGS / f"{name}.py").read_text()))
    for word in ("command   ", "run time  ", "expected  ", f"hetjax train --config {name}"):
        assert word in docstring


@pytest.mark.parametrize("name", configs.names())
def test_a_config_takes_one_step(name, tmp_path, no_figures):
    flags = ["--config", name, "--steps", "1", "--width", "4", "--batch-size", "32", "--out", str(tmp_path / "run")]
    if name == "fashion_mnist":
        flags += ["--dataset", f"idx:{tiny_idx(tmp_path)}"]
    if name == "text_transformer":
        (tmp_path / "text").write_bytes(b"to be or not to be " * 400)
        flags += ["--dataset", f"text:{tmp_path / 'text'}"]
    if configs.named(name).compares:
        flags += ["--strategy", "balanced"]  # one run is enough
    if configs.named(name).workers.trace is None:
        flags += ["--devices", "2"]
    assert train.main(flags) == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["steps"] == 1
    assert 32 - summary["workers"] <= summary["samples"] <= 32  # shards: up to one sample per worker less
    assert np.isfinite(summary["final_loss"])


def tiny_idx(folder):
    """Write 64 images of noise in the files of Fashion-MNIST."""
    rng = np.random.default_rng(0)
    for split in ("train", "t10k"):
        image, label = rng.integers(0, 256, (64, 28, 28), np.uint8), np.arange(64, dtype=np.uint8) % 10
        for array, name in ((image, "images-idx3"), (label, "labels-idx1")):
            sizes = b"".join(size.to_bytes(4, "big") for size in array.shape)
            content = bytes([0, 0, 8, array.ndim]) + sizes + array.tobytes()
            (folder / f"{split}-{name}-ubyte.gz").write_bytes(gzip.compress(content))
    return folder
