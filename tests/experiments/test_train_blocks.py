"""`hetjax train` on blocks: cut for simulated, given or measured rates, read from a file, kept by a resumed run."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import quick_compiles
from rich.console import Console

from hetjax.cli import train
from hetjax.cli.training import configs, partitions, setup
from hetjax.data import load
from hetjax.data.source_blocks import make_blocks, read_features
from hetjax.presets import choose
from hetjax.report import read_run
from hetjax.sampling.blocks import Blocks
from hetjax.sampling.submodular import recut

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
TINY = ["--model", "mlp", "--width", "8", "--batch-size", "64"]


def blocks_for(folder, *flags, screen=None):
    """Return the blocks that `train.py --partition submodular` uses with these flags and saves after its first step."""
    config = configs.parse([*TINY, "--partition", "submodular", *flags], configs.Config())
    simulation, devices = setup.find_devices(config)
    task, chosen = setup.make_task_of(config), choose(**setup.method(config))
    console = Console(file=screen or io.StringIO())
    blocks = partitions.partition_of(config, chosen, task, devices, simulation, folder, console)
    partitions.keep(config, folder, blocks)
    return blocks


def test_a_run_of_rcd_sgd_as_published(tmp_path, no_figures):
    flags = ["--strategy", "rcd-sgd", "--faithful", "--steps", "8", "--speeds", "1,0.5", "--row-time", "0.05"]
    assert train.main([*TINY, *flags, "--out", str(tmp_path)]) == 0
    blocks = Blocks.load(tmp_path / "blocks.npz")
    assert (blocks.settings["rule"], blocks.settings["carry"]) == ("min-block", False)
    assert np.abs(read_run(tmp_path).counts_SxW - 64 * blocks.sizes_W / 1438).max() < 2
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["partition"], summary["controller"], summary["sync"]) == ("submodular", "static", "decentralized")


def test_blocks_follow_the_simulated_speeds_and_a_resumed_run_keeps_them(tmp_path):
    flags = ["--speeds", "1,1,0.5,0.25", "--out", str(tmp_path)]
    blocks = blocks_for(tmp_path, *flags)
    assert blocks.sizes_W.tolist() == [523, 523, 261, 131]
    assert blocks.settings["rule"] == "parts"
    blocks.with_settings(mark="kept").save(tmp_path / "blocks.npz")
    screen = io.StringIO()
    assert blocks_for(tmp_path, *flags, "--resume", screen=screen).settings["mark"] == "kept"
    assert "mark" not in blocks_for(tmp_path, *flags, "--objective", "graph-cut", "--resume").settings
    assert screen.getvalue() == ""


def test_a_resumed_run_moves_few_samples_to_its_new_rates(tmp_path):
    flags, screen = ["--resume", "--out", str(tmp_path)], io.StringIO()
    old = blocks_for(tmp_path, "--speeds", "1,1,0.5,0.25", screen=screen)
    assert "1438/1438" in screen.getvalue()  # the progress bar
    found = blocks_for(tmp_path, *flags, "--speeds", "1,0.5,0.5,0.25", screen=screen)
    expected = recut(old, read_features(load("digits")), [1, 0.5, 0.5, 0.25])
    assert np.array_equal(found.owner_D, expected.blocks.owner_D)
    assert expected.summary in screen.getvalue()
    assert np.array_equal(Blocks.load(tmp_path / "blocks.npz").owner_D, found.owner_D)
    fewer = blocks_for(tmp_path, *flags, "--speeds", "2,1")  # remaining workers lose no sample
    assert fewer.workers == 2
    assert np.array_equal(fewer.owner_D[found.owner_D < 2], found.owner_D[found.owner_D < 2])
    more = blocks_for(tmp_path, *flags, "--speeds", "2,1,1")
    assert more.sizes_W.tolist() in ([719, 360, 359], [719, 359, 360])
    assert (more.owner_D != fewer.owner_D).sum() == more.sizes_W[2]


def test_survivors_of_an_elastic_run_keep_their_blocks(tmp_path, monkeypatch):
    """Process 1 of 3 is lost: 0 and 2 keep their rates and blocks, also with blocks from a file."""
    file = str(tmp_path / "file")
    for source in (["--rates", "4,2,1"], ["--speeds", "4,2,1"], ["--blocks", file]):
        folder = tmp_path / source[0]
        monkeypatch.delenv("HETJAX_LOST", raising=False)
        monkeypatch.delenv("HETJAX_PROCESSES", raising=False)
        before = blocks_for(folder, *source, "--devices", "3")
        before.save(file)
        monkeypatch.setenv("HETJAX_LOST", "1")
        monkeypatch.setenv("HETJAX_PROCESSES", "2")
        after = blocks_for(folder, *source, "--devices", "2", "--resume")
        assert after.rates_W.tolist() == [4, 1]
        for old, new in ((0, 0), (2, 1)):
            assert set(before.indices[old]) < set(after.indices[new])


def test_a_resumed_run_does_not_measure_the_same_workers_again(tmp_path, monkeypatch):
    flags = ["--devices", "2", "--speeds", "real", "--out", str(tmp_path)]
    old = blocks_for(tmp_path, *flags, "--rates", "3,1")
    monkeypatch.setattr(partitions, "measured", lambda *_: pytest.fail("measured"))
    assert np.array_equal(blocks_for(tmp_path, *flags, "--resume").owner_D, old.owner_D)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (
            ["--rates", "2,1"],
            "--rates: only for --partition submodular, but this run has the partition 'global'",
        ),
        (["--strategy", "dbs", "--blocks", "b.npz"], "--blocks: only for --partition submodular"),
        (
            ["--strategy", "balanced", "--objective", "graph-cut", "--features", "raw"],
            "--objective, --features: only for",
        ),
        (["--strategy", "rcd-sgd", "--blocks", "b.npz", "--rates", "2,1"], "--rates: describes how to cut blocks"),
        (["--partition", "submodular", "--rates", "2,1", "--speeds", "1,1,1"], "2 rates for 3 workers"),
    ],
)
def test_flags_without_effect_are_rejected(flags, sentence, tmp_path, capsys):
    assert train.main([*TINY, *flags, "--out", str(tmp_path / "run")]) == 2
    assert sentence in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_two_processes_train_on_the_blocks_of_the_first_as_one_process_does(tmp_path, monkeypatch, no_figures):
    (tmp_path / "of_first.py").write_text(
        "from hetjax import processes\ndef pixels(batch):\n    assert processes.first()\n    return batch['image']\n"
    )
    flags = [*TINY, "--strategy", "rcd-sgd", "--rates", "3,1", "--features", "of_first:pixels", "--steps", "4"]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}", "TMPDIR": str(tmp_path)}
    environment["XLA_FLAGS"] = quick_compiles.FLAGS  # one device per process
    program = [str(ROOT / "experiments" / "train.py"), *flags, "--out", str(tmp_path / "two")]
    done = subprocess.run(
        [sys.executable, "-m", "hetjax", "launch", "--processes", "2", "--", *program],
        env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    monkeypatch.syspath_prepend(str(tmp_path))
    assert train.main([*flags, "--devices", "2", "--out", str(tmp_path / "one")]) == 0
    owners = [Blocks.load(tmp_path / run / "blocks.npz").owner_D for run in ("one", "two")]
    assert np.array_equal(*owners)
    assert np.array_equal(owners[0], make_blocks(load("digits"), [3, 1], features="raw").owner_D)
    one, two = read_run(tmp_path / "one"), read_run(tmp_path / "two")
    assert np.array_equal(one.counts_SxW, two.counts_SxW)
    assert one.counts_SxW[:, 0].sum() > 2.5 * one.counts_SxW[:, 1].sum()
    np.testing.assert_allclose(one.loss_S, two.loss_S, rtol=1e-4)


def test_rates_are_given_or_measured(tmp_path):
    flags = ["--devices", "2", "--objective", "graph-cut", "--features", "raw"]
    given = blocks_for(tmp_path, *flags, "--rates", "3,1")
    assert given.sizes_W.tolist() in ([1078, 360], [1079, 359])
    assert (given.settings["objective"], given.settings["features"]) == ("graph-cut", "raw")
    rates_W = blocks_for(tmp_path, *flags).rates_W
    assert rates_W.max() == 1
    np.testing.assert_allclose(rates_W * 20, np.round(rates_W * 20))


def test_blocks_from_a_file_and_a_partition_without_blocks(tmp_path):
    mine = Blocks(np.arange(1438) % 3 % 2, np.zeros(1438), [2, 1])
    mine.save(tmp_path / "mine.npz")
    found = blocks_for(tmp_path, "--devices", "2", "--blocks", str(tmp_path / "mine.npz"))
    assert np.array_equal(found.owner_D, mine.owner_D)
    assert not (tmp_path / "blocks.npz").exists()
    mine.with_settings(data="of others").save(tmp_path / "mine.npz")
    with pytest.raises(ValueError, match="cut from other samples"):
        blocks_for(tmp_path, "--devices", "2", "--blocks", str(tmp_path / "mine.npz"))
    name = partitions.partition_of(configs.Config(), choose("dbs"), None, jax.devices(), None, tmp_path, None)
    assert name == "proportional"


def test_blocks_without_a_strategy_are_a_single_run():
    assert not configs.parse(["--partition", "submodular"], configs.Config()).compares
    with pytest.raises(ValueError, match="a fixed block"):
        choose("balanced", partition="submodular")
