"""TFDS: a dataset prepared by TFDS is read with random access, all without TensorFlow."""

import io
import shutil
import subprocess
import sys

import numpy as np
import pytest

from hetjax.data import fetch, load

tensorflow_datasets = pytest.importorskip("tensorflow_datasets", reason="needs the extra 'tfds'")


class TinyVectors(tensorflow_datasets.core.GeneratorBasedBuilder):
    """Twenty training and seven test samples of bytes."""

    VERSION = tensorflow_datasets.core.Version("1.0.0")

    def _info(self):
        features = tensorflow_datasets.features
        return tensorflow_datasets.core.DatasetInfo(
            builder=self,
            features=features.FeaturesDict(
                {
                    "image": features.Tensor(shape=(8, 8, 1), dtype=np.uint8),
                    "label": features.ClassLabel(num_classes=3),
                }
            ),
            supervised_keys=("image", "label"),
        )

    def _split_generators(self, dl_manager):
        return {"train": self._generate_examples(20), "test": self._generate_examples(7)}

    def _generate_examples(self, samples):
        for i in range(samples):
            yield i, {"image": np.full((8, 8, 1), 10 * i, np.uint8), "label": i % 3}


class TinyPictures(TinyVectors):
    """The same as PNG, as most image datasets are stored."""

    def _info(self):
        features = tensorflow_datasets.features
        return tensorflow_datasets.core.DatasetInfo(
            builder=self,
            features=features.FeaturesDict(
                {"image": features.Image(shape=(8, 8, 1)), "label": features.ClassLabel(num_classes=3)}
            ),
            supervised_keys=("image", "label"),
        )

    def _generate_examples(self, samples):
        image = pytest.importorskip("PIL.Image")
        for i in range(samples):
            file = io.BytesIO()
            image.fromarray(np.full((8, 8), 10 * i, np.uint8)).save(file, "png")
            yield i, {"image": io.BytesIO(file.getvalue()), "label": i % 3}


@pytest.fixture(scope="module", params=[TinyVectors, TinyPictures])
def prepared(request, tmp_path_factory):
    """The folder and name of a dataset on disk."""
    folder = tmp_path_factory.mktemp("tfds")
    builder = request.param(data_dir=folder, file_format="array_record")
    builder.download_and_prepare(file_format="array_record")
    return folder, builder.name


def test_every_sample_is_read(prepared):
    folder, name = prepared
    source = load(f"tfds:{name}", data_dir=folder)
    assert len(source) == 20
    assert source.description.input_shape == (8, 8, 1)
    assert source.description.classes == 3
    batch = fetch(source, np.arange(20))
    assert batch["image"].dtype == np.float32
    assert batch["label"].dtype == np.int32
    level = np.round(batch["image"] * 255).astype(int)
    assert (level == level[:, :1, :1]).all()
    np.testing.assert_array_equal(np.sort(level[:, 0, 0, 0]), np.arange(0, 200, 10))
    np.testing.assert_array_equal(level[:, 0, 0, 0] // 10 % 3, batch["label"])


def test_random_access_and_splits(prepared, monkeypatch):
    folder, name = prepared
    monkeypatch.setenv("TFDS_DATA_DIR", str(folder))
    source = load(f"tfds:{name}", "test")
    assert len(source) == 7
    picked = fetch(source, np.array([6, 1, 6]))
    np.testing.assert_array_equal(picked["image"][0], picked["image"][2])
    np.testing.assert_array_equal(picked["image"][1], source[1]["image"])
    assert len(load(f"tfds:{name}", "train[:50%]")) == 10
    with pytest.raises(IndexError):
        source[7]
    with pytest.raises(ValueError, match="Unknown split 'valid'"):
        load(f"tfds:{name}", "valid")


def test_the_error_of_an_unprepared_dataset_gives_the_command(tmp_path):
    for name in ("no_such_dataset", "mnist"):
        with pytest.raises(
            FileNotFoundError, match=rf"{name} is not prepared in {tmp_path}(.|\n)*download_and_prepare"
        ):
            load(f"tfds:{name}", data_dir=tmp_path)


def test_the_error_of_a_dataset_without_random_access_gives_the_command(prepared, tmp_path):
    folder, name = prepared
    copy = shutil.copytree(folder, tmp_path / "copy")
    info = copy / name / "1.0.0" / "dataset_info.json"
    info.write_text(info.read_text().replace("array_record", "tfrecord"))
    with pytest.raises(ValueError, match=r"stored as tfrecord, which has no random access(.|\n)*array_record"):
        load(f"tfds:{name}", data_dir=copy)


def test_reading_imports_no_tensorflow(prepared):
    folder, name = prepared
    code = (
        "import sys, hetjax.data as d; assert 'tensorflow_datasets' not in sys.modules; "
        f"len(d.load('tfds:{name}', data_dir={str(folder)!r})[0]); assert 'tensorflow' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=280)


def test_the_default_data_dir_is_named(monkeypatch):
    monkeypatch.delenv("TFDS_DATA_DIR", raising=False)
    with pytest.raises(FileNotFoundError, match=r"no_such_dataset is not prepared in .*tensorflow_datasets"):
        load("tfds:no_such_dataset")
