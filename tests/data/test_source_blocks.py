"""Blocks of a source: its features and classes, and the command `hetjax partition`."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from hetjax.__main__ import main
from hetjax.data import MemorySource, load
from hetjax.data.source_blocks import (
    fingerprint,
    make_blocks,
    parse_features,
    read_classes,
    read_features,
    shared_blocks,
)
from hetjax.sampling.blocks import Blocks
from hetjax.sampling.submodular import principal_components, recut, submodular_blocks
from hetjax.sampling.submodular.features import k_means


def arrays(size=60, **more):
    rng = np.random.default_rng(0)
    return {"image": rng.integers(0, 255, (size, 4, 4), np.uint8), "label": np.arange(size) % 3} | more


def mean_and_spread(batch):
    """An embedding that the command line imports."""
    flat = batch["image"].reshape(len(batch["image"]), -1)
    return np.stack([flat.mean(1), flat.std(1)], axis=1)


def test_features_are_the_scaled_inputs():
    source = MemorySource(arrays(1500), scale={"image": 1 / 255})
    raw = read_features(source, "raw")
    np.testing.assert_array_equal(raw, (source.arrays["image"] * np.float32(1 / 255)).reshape(1500, 16))
    np.testing.assert_array_equal(read_features(source, "pca:5"), principal_components(raw, 5))
    np.testing.assert_allclose(read_features(source, mean_and_spread)[:, 0], raw.mean(1), rtol=1e-6)
    assert parse_features("test_source_blocks:mean_and_spread")(source.rows(np.arange(2))).shape == (2, 2)
    assert parse_features("pca:5") == "pca:5"


class OneByOne:
    """A source without `rows`."""

    def __init__(self, image, label):
        self.image, self.label = image, label

    def __len__(self):
        return len(self.image)

    def __getitem__(self, index):
        return {"image": self.image[index], "label": self.label[index]}


def test_classes_from_labels_targets_or_features():
    data = arrays()
    assert np.array_equal(read_classes(MemorySource(data), None), data["label"])
    assert np.array_equal(read_classes(OneByOne(data["image"], data["label"]), None), data["label"])
    targets = np.repeat([0.1, 7.3], 30)
    found = read_classes(MemorySource(arrays(label=targets)), None, seed=1)
    assert all(np.unique(targets[found == c]).size == 1 for c in np.unique(found))
    three = read_classes(MemorySource(arrays(label=np.repeat([0.1, 7.3, 9.0], 20))), np.zeros((60, 1)), 3)
    assert [len({*three[lo : lo + 20]}) for lo in (0, 20, 40)] == [1, 1, 1]  # by targets, also with a given number
    assert len({*three}) == 3
    with pytest.raises(ValueError, match="61 pseudo-classes"):
        read_classes(MemorySource(data), np.zeros((60, 1)), 61)
    two = read_features(MemorySource(data), "raw")
    two[:30] += 100
    unlabeled = read_classes(MemorySource({"image": data["image"]}), two, 2)
    assert sorted(np.bincount(unlabeled).tolist()) == [30, 30]
    assert len({*unlabeled[:30]}) == 1


@pytest.mark.parametrize("kind", ["submodular", "random", "class-balanced"])
def test_blocks_of_every_kind_follow_the_rates(kind):
    blocks = make_blocks(arrays(), [3, 2, 1], kind)
    assert blocks.sizes_W.tolist() == [30, 20, 10]
    assert blocks.workers == 3


def test_submodular_blocks_of_a_source_are_those_of_its_features():
    source = load("digits")
    few = MemorySource({name: values[:200] for name, values in source.arrays.items()})
    blocks = make_blocks(few, [2, 1], features="raw", objective="graph-cut", rule="fill")
    expected = submodular_blocks(
        read_features(few, "raw"), few.arrays["label"], [2, 1], objective="graph-cut", rule="fill"
    )
    assert np.array_equal(blocks.owner_D, expected.owner_D)
    assert blocks.settings["features"] == "raw"


def test_blocks_record_the_name_of_their_embedding():
    name = make_blocks(arrays(), [2, 1], features=mean_and_spread).settings["features"]
    assert parse_features(name) is mean_and_spread


def test_shared_blocks_of_one_process_are_unchanged():
    blocks = make_blocks(arrays(), [0.1, 0.7], features="raw")
    shared = shared_blocks(lambda: blocks)
    assert np.array_equal(shared.owner_D, blocks.owner_D)
    assert np.array_equal(shared.classes_D, blocks.classes_D)
    assert shared.rates_W.tolist() == [0.1, 0.7]
    assert shared.settings == blocks.settings
    assert shared_blocks(lambda: None) is None


def test_a_fingerprint_depends_on_samples_not_on_the_kind_of_source():
    data = arrays(1500)
    changed = data["image"].copy()
    changed[1400, 0, 0] ^= 1
    one = fingerprint(MemorySource(data))
    assert one == fingerprint(OneByOne(data["image"], data["label"]))
    assert one != fingerprint(MemorySource(data | {"image": changed}))
    assert one != fingerprint(MemorySource(data | {"label": data["label"][::-1]}))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kind": "best"}, "no 'best' blocks"),
        ({"features": "pixels"}, "no features 'pixels'"),
        ({"features": "raw:3"}, "no features 'raw:3'"),
        ({"features": lambda batch: np.zeros(3)}, "expected one row per sample"),
        ({"source": {"tokens": np.zeros((9, 4))}}, "without 'image'"),
    ],
)
def test_invalid_arguments_are_rejected(arguments, message):
    with pytest.raises(ValueError, match=message):
        make_blocks(**{"source": arrays(), "rates": [1, 1]} | arguments)


@pytest.mark.parametrize("text", ["nowhere:f", "numpy:nothing", "numpy:pi"])
def test_a_missing_embedding_is_named(text):
    with pytest.raises(ValueError, match=f"{text}"):
        parse_features(text)


def test_command_partitions_compares_and_recuts(tmp_path, capsys, monkeypatch):
    np.savez(tmp_path / "small.npz", x=arrays(150)["image"], y=arrays(150)["label"])
    out, again = tmp_path / "blocks.npz", tmp_path / "again.npz"
    assert main(["partition", f"npz:{tmp_path / 'small.npz'}", "--rates", "2,1", "--out", str(out), "--compare"]) == 0
    output = capsys.readouterr().out
    for words in ("facility-location min-block", "graph-cut parts", "random", "class-balanced", "blocks.png"):
        assert words in output
    blocks = Blocks.load(out)
    assert blocks.sizes_W.tolist() == [80, 40]
    assert (tmp_path / "blocks.png").stat().st_size > 10_000
    monkeypatch.setattr("hetjax.report.blocks.draw", lambda out, *_: (out, out))  # drawn once is enough
    arguments = ["--rates", "1,1", "--recut", str(out), "--out", str(again)]
    assert main(["partition", f"npz:{tmp_path / 'small.npz'}", *arguments]) == 0
    moved = int((Blocks.load(again).owner_D != blocks.owner_D).sum())
    assert f"{moved} samples moved" in capsys.readouterr().out
    assert Blocks.load(again).sizes_W.tolist() == [60, 60]


def test_command_rejects_invalid_arguments(tmp_path, capsys):
    few = tmp_path / "few.npz"
    np.savez(few, x=np.zeros((40, 3), np.float32), y=np.arange(40) % 2)
    for arguments, message in (
        (["digits", "--rates", "fast"], "expected numbers separated by commas"),
        (["digits", "--workers", "0"], "at least 1"),
        (["digits", "--workers", "999999999999"], "--workers is 999999999999: expected a whole number"),
        (["digits", "--rates", ",".join(["1"] * 2000)], "The number of --rates is 2000"),
        (["digits", "--seed=-1"], "--seed is -1"),
        ([f"npz:{few}", "--workers", "50"], "There are 50 workers for 32 samples"),
        (["digits", "--rule", "best"], "There is no rule 'best'"),
        (["text"], "without 'image'"),
        (["digits", "--recut", str(tmp_path / "none.npz")], "There is no blocks file"),
    ):
        assert main(["partition", *arguments, "--out", str(tmp_path / "b.npz")]) == 2
        assert message in capsys.readouterr().err


def test_command_checks_the_output_path_first(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("hetjax.cli.partition.submodular_blocks", None)
    for out, message in ((tmp_path / "nowhere" / "b.npz", "there is no such folder"), (tmp_path, "is a folder")):
        assert main(["partition", "digits", "--out", str(out)]) == 2
        assert message in capsys.readouterr().err


@pytest.fixture
def no_figure(monkeypatch):
    """Drawing takes longer than everything else."""
    monkeypatch.setattr("hetjax.report.blocks.draw", lambda out, *_: (out, out))


def partition(tmp_path, name, *flags, **saved):
    """Run the command on these arrays and load its blocks."""
    np.savez(tmp_path / "data.npz", **saved)
    assert main(["partition", f"npz:{tmp_path / 'data.npz'}", *flags, "--out", str(tmp_path / name)]) == 0
    return Blocks.load(tmp_path / name)


def test_command_takes_an_embedding_a_bandwidth_and_pseudo_classes(tmp_path, no_figure):
    data = arrays(60)
    flags = ["--features", "test_source_blocks:mean_and_spread", "--bandwidth", "0.2", "--pseudo-classes", "4"]
    flags += ["--objective", "graph-cut", "--rule", "per-rate", "--rates", "2,1", "--seed", "5"]
    found = partition(tmp_path, "b.npz", *flags, x_train=data["image"], y_train=data["label"], x_test=0, y_test=0)
    x = mean_and_spread({"image": data["image"] * np.float32(1 / 255)}).astype(np.float32)
    classes = k_means(x, 4, 5)
    expected = submodular_blocks(x, classes, [2, 1], objective="graph-cut", rule="per-rate", bandwidth=0.2)
    assert np.array_equal(found.owner_D, expected.owner_D)
    assert np.array_equal(np.unique(found.classes_D, return_counts=True)[1], np.bincount(classes))
    assert found.settings["bandwidths"] == [0.2] * 4


@pytest.mark.parametrize("targets", [None, np.repeat([0.5, 20.0, 3.25], [30, 20, 10])])
def test_command_needs_no_labels(tmp_path, no_figure, targets):
    image = np.random.default_rng(1).normal(size=(60, 3)) + np.repeat([0.0, 50.0, 100.0], [10, 20, 30])[:, None]
    saved = {"x": image} if targets is None else {"x": image, "y": targets}
    found = partition(tmp_path, "b.npz", "--pseudo-classes", "3", "--rates", "4,1", "--features", "raw", **saved)
    bounds = [0, 10, 30, 60] if targets is None else [0, 30, 50, 60]  # all rows, grouped by features or by targets
    for lo, hi in pairwise(bounds):
        assert len({*found.classes_D[lo:hi]}) == 1
        assert np.bincount(found.owner_D[lo:hi]).tolist() == [(hi - lo) * 4 // 5, (hi - lo) // 5]


def test_command_rejects_targets_that_are_not_finite(tmp_path, capsys):
    np.savez(tmp_path / "data.npz", x=arrays(20)["image"], y=np.full(20, np.nan))
    assert main(["partition", f"npz:{tmp_path / 'data.npz'}"]) == 2
    assert "the targets y have to be finite numbers" in capsys.readouterr().err


def test_recut_keeps_the_features_and_the_data_of_the_file(tmp_path, no_figure, capsys):
    data = {"x_train": arrays(60)["image"], "y_train": arrays(60)["label"], "x_test": 0, "y_test": 0}
    old = partition(tmp_path, "old.npz", "--rates", "2,1", "--features", "raw", "--bandwidth", "0.5", **data)
    again = ["--recut", str(tmp_path / "old.npz"), "--rates", "1,2"]
    found = partition(tmp_path, "new.npz", *again, **data)
    raw = read_features(MemorySource(arrays(60), scale={"image": 1 / 255}), "raw")
    assert np.array_equal(found.owner_D, recut(old, raw, [1, 2]).blocks.owner_D)
    assert found.settings["features"] == "raw"
    for flags, message in (
        (["--features", "pca"], "old.npz was made with the features raw, but --features is pca"),
        (["--objective", "graph-cut"], "--objective cannot be given with --recut"),
        (["--rule", "fill", "--compare"], "--rule, --compare cannot"),
        (["--bandwidth", "1"], "--bandwidth cannot"),
        (["--pseudo-classes", "3"], "--pseudo-classes cannot"),
    ):
        assert main(["partition", f"npz:{tmp_path / 'data.npz'}", *again, *flags]) == 2
        assert message in capsys.readouterr().err
    np.savez(tmp_path / "data.npz", **data | {"x_train": data["x_train"][::-1]})
    assert main(["partition", f"npz:{tmp_path / 'data.npz'}", *again]) == 2
    assert "old.npz were cut from other samples" in capsys.readouterr().err
    submodular_blocks(raw, np.zeros(60), [1, 1]).save(tmp_path / "old.npz")
    assert main(["partition", f"npz:{tmp_path / 'data.npz'}", *again]) == 2
    assert "does not record its features" in capsys.readouterr().err
