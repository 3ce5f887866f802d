"""The main job on blocks: made from simulated, given or measured rates, read from a file, kept for a resumed run."""

import json

import jax
import numpy as np
import pytest
import train
import train_blocks
import train_config
import train_setup
from rich.console import Console

from hetjax.plan.blocks import Blocks
from hetjax.strategies import resolve
from hetjax.watch import read_run

pytestmark = pytest.mark.slow

TINY = ["--model", "mlp", "--width", "8", "--batch-size", "64"]


def blocks_for(folder, *flags):
    """What `train.py --partition submodular` with these flags trains on."""
    config = train_config.parse([*TINY, "--partition", "submodular", *flags], train_config.Config())
    simulation, devices = train_setup.find_devices(config)
    task, (_, strategy) = train_setup.make_task_of(config), resolve(**train_setup.method(config))
    return train_blocks.partition_of(config, strategy, task, devices, simulation, folder, Console(quiet=True))


def test_a_run_of_rcd_sgd_as_published(tmp_path):
    flags = ["--strategy", "rcd-sgd", "--faithful", "--steps", "8", "--speeds", "1,0.5", "--row-time", "0.05"]
    assert train.main([*TINY, *flags, "--out", str(tmp_path)]) == 0
    blocks = Blocks.load(tmp_path / "blocks.npz")
    assert (blocks.settings["rule"], blocks.settings["carry"]) == ("min-block", False)
    assert np.abs(read_run(tmp_path).counts_SxW - 64 * blocks.sizes_W / 1438).max() < 2
    told = json.loads((tmp_path / "summary.json").read_text())
    assert (told["partition"], told["controller"], told["sync"]) == ("submodular", "static", "decentralised")


def test_blocks_follow_the_simulated_speeds_and_a_resumed_run_keeps_them(tmp_path):
    flags = ["--speeds", "1,1,0.5,0.25", "--out", str(tmp_path)]
    blocks = blocks_for(tmp_path, *flags)
    assert blocks.sizes_W.tolist() == [523, 523, 261, 131]
    assert blocks.settings["rule"] == "parts"
    blocks.renamed(mark="kept").save(tmp_path / "blocks.npz")
    assert blocks_for(tmp_path, *flags, "--resume").settings["mark"] == "kept"
    assert "mark" not in blocks_for(tmp_path, "--speeds", "1,1", "--resume").settings  # other workers, other blocks
    assert blocks_for(tmp_path, "--speeds", "1,1", "--resume").workers == 2


def test_rates_are_given_or_measured(tmp_path):
    flags = ["--devices", "2", "--objective", "graph-cut", "--features", "raw"]
    given = blocks_for(tmp_path, *flags, "--rates", "3,1")
    assert given.sizes_W.tolist() in ([1078, 360], [1079, 359])
    assert (given.settings["objective"], given.settings["features"]) == ("graph-cut", "raw")
    rates_W = blocks_for(tmp_path, *flags).rates_W
    assert rates_W.max() == 1
    np.testing.assert_allclose(rates_W * 20, np.round(rates_W * 20))


def test_blocks_from_a_file_and_no_blocks_at_all(tmp_path):
    mine = Blocks(np.arange(1438) % 3 % 2, np.zeros(1438), [2, 1])
    mine.save(tmp_path / "mine.npz")
    found = blocks_for(tmp_path, "--devices", "2", "--blocks", str(tmp_path / "mine.npz"))
    assert np.array_equal(found.owner_D, mine.owner_D)
    assert not (tmp_path / "blocks.npz").exists()
    name = train_blocks.partition_of(
        train_config.Config(), resolve("dbs")[1], None, jax.devices(), None, tmp_path, None
    )
    assert name == "proportional"


def test_without_a_method_blocks_are_one_run_and_not_a_comparison():
    assert not train_config.parse(["--partition", "submodular"], train_config.Config()).compares
    with pytest.raises(ValueError, match="for good"):
        resolve("balanced", partition="submodular")
