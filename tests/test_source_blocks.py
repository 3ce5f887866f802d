"""Blocks of a source: what is compared, what the classes are, and the command that does it all."""

from __future__ import annotations

import numpy as np
import pytest

from hetjax.__main__ import main
from hetjax.data import MemorySource, load
from hetjax.plan.blocks import Blocks
from hetjax.plan.submodular import principal_components, submodular_blocks
from hetjax.source_blocks import make_blocks, named_features, read_classes, read_features


def arrays(size=60, **more):
    rng = np.random.default_rng(0)
    return {"image": rng.integers(0, 255, (size, 4, 4), np.uint8), "label": np.arange(size) % 3} | more


def mean_and_spread(batch):
    """An embedding for the command line to find."""
    flat = batch["image"].reshape(len(batch["image"]), -1)
    return np.stack([flat.mean(1), flat.std(1)], axis=1)


def test_features_are_the_inputs_as_the_model_sees_them():
    source = MemorySource(arrays(1500))
    raw = read_features(source, "raw")
    np.testing.assert_array_equal(raw, (source.arrays["image"] * np.float32(1 / 255)).reshape(1500, 16))
    np.testing.assert_array_equal(read_features(source, "pca:5"), principal_components(raw, 5))
    np.testing.assert_allclose(read_features(source, mean_and_spread)[:, 0], raw.mean(1), rtol=1e-6)
    assert named_features("test_source_blocks:mean_and_spread")(source.rows(np.arange(2))).shape == (2, 2)
    assert named_features("pca:5") == "pca:5"


class OneByOne:
    """A source without `rows`."""

    def __init__(self, image, label):
        self.image, self.label = image, label

    def __len__(self):
        return len(self.image)

    def __getitem__(self, index):
        return {"image": self.image[index], "label": self.label[index]}


def test_labels_targets_and_nothing_at_all():
    data = arrays()
    assert np.array_equal(read_classes(MemorySource(data), None), data["label"])
    assert np.array_equal(read_classes(OneByOne(data["image"], data["label"]), None), data["label"])
    targets = np.repeat([0.1, 7.3], 30)
    found = read_classes(MemorySource(arrays(label=targets)), None, seed=1)
    assert all(np.unique(targets[found == c]).size == 1 for c in np.unique(found))
    two = read_features(MemorySource(data), "raw")
    two[:30] += 100
    unlabelled = read_classes(MemorySource({"image": data["image"]}), two, 2)
    assert sorted(np.bincount(unlabelled).tolist()) == [30, 30]
    assert len({*unlabelled[:30]}) == 1


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


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        ({"kind": "best"}, "no 'best' blocks"),
        ({"features": "pixels"}, "no features 'pixels'"),
        ({"features": "raw:3"}, "no features 'raw:3'"),
        ({"features": lambda batch: np.zeros(3)}, "expected one row each"),
        ({"source": {"tokens": np.zeros((9, 4))}}, "without 'image'"),
    ],
)
def test_bad_wishes_are_explained(asked, sentence):
    with pytest.raises(ValueError, match=sentence):
        make_blocks(**{"source": arrays(), "rates": [1, 1]} | asked)


@pytest.mark.parametrize("text", ["nowhere:f", "numpy:nothing", "numpy:pi"])
def test_an_embedding_that_is_not_there_is_explained(text):
    with pytest.raises(ValueError, match=f"{text}"):
        named_features(text)


def test_the_command_cuts_compares_and_cuts_again(tmp_path, capsys):
    np.savez(tmp_path / "small.npz", x=arrays(150)["image"], y=arrays(150)["label"])
    out, again = tmp_path / "blocks.npz", tmp_path / "again.npz"
    assert main(["partition", f"npz:{tmp_path / 'small.npz'}", "--rates", "2,1", "--out", str(out), "--compare"]) == 0
    told = capsys.readouterr().out
    for words in ("facility-location min-block", "graph-cut parts", "random", "class-balanced", "blocks.png"):
        assert words in told
    blocks = Blocks.load(out)
    assert blocks.sizes_W.tolist() == [80, 40]
    assert (tmp_path / "blocks.png").stat().st_size > 10_000
    arguments = ["--rates", "1,1", "--recut", str(out), "--out", str(again)]
    assert main(["partition", f"npz:{tmp_path / 'small.npz'}", *arguments]) == 0
    moved = int((Blocks.load(again).owner_D != blocks.owner_D).sum())
    assert f"{moved} samples moved" in capsys.readouterr().out
    assert Blocks.load(again).sizes_W.tolist() == [60, 60]


def test_the_command_explains_mistakes(tmp_path, capsys):
    for arguments, sentence in (
        (["digits", "--rates", "fast"], "expected numbers with commas"),
        (["digits", "--workers", "0"], "at least 1"),
        (["digits", "--rule", "best"], "There is no rule 'best'"),
        (["text"], "without 'image'"),
        (["digits", "--recut", str(tmp_path / "none.npz")], "There is no file"),
    ):
        assert main(["partition", *arguments, "--out", str(tmp_path / "b.npz")]) == 2
        assert sentence in capsys.readouterr().err
