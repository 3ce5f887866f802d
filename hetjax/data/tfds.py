"""TensorFlow Datasets with random access, read from ArrayRecord files without TensorFlow."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from hetjax.data.memory import check_labels
from hetjax.data.source import Description, RowSource, fetch
from hetjax.environment import optional_package


class TfdsSource(RowSource):
    """A prepared dataset with an image (or a vector) and a class label."""

    def __init__(self, records: Any, input_key: str, label_key: str, description: Description):
        self._records = records
        self._input_key = input_key
        self._label_key = label_key
        self.description = description

    def __len__(self) -> int:
        return len(self._records)

    def rows(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        indices = self.checked_indices(indices)
        records = self._records.__getitems__(indices.tolist())
        keys = (self._input_key, self._label_key)
        chosen = {int(i): {key: record[key] for key in keys} for i, record in zip(indices, records, strict=True)}
        batch = fetch(chosen, indices)  # a dict of samples is a source, too
        image, label = batch[self._input_key], batch[self._label_key]
        assert self.description.classes is not None
        check_labels(label, self.description.classes, f"TFDS dataset {self.description.name}")
        if image.dtype == np.uint8:
            image = image * np.float32(1 / 255)
        if image.ndim == 3:
            image = image[..., None]
        return {"image": image.astype(np.float32, copy=False), "label": label.astype(np.int32)}


def tfds_source(name: str, split: str = "train", *, data_dir: str | Path | None = None) -> TfdsSource:
    """One split of a dataset that is already prepared in `data_dir` (default: TFDS_DATA_DIR, then TFDS's own default).

    Reading needs the extra `tfds`, but not TensorFlow. Preparing downloads the dataset, mostly by TensorFlow; the error
    of a missing dataset gives the command. A split may be a slice such as "train[:90%]".
    """
    tensorflow_datasets = optional_package("tensorflow_datasets", f"Reading tfds:{name}", "'hetjax[tfds]'")
    data_dir = data_dir or os.environ.get("TFDS_DATA_DIR")
    where = data_dir or tensorflow_datasets.core.constants.DATA_DIR
    try:
        builder = tensorflow_datasets.builder(name, data_dir=data_dir)
        prepared = builder.is_prepared()
    except tensorflow_datasets.core.DatasetNotFoundError:
        prepared = False
    if not prepared:
        raise FileNotFoundError(f"The TFDS dataset {name} is not prepared in {where}. {_prepare_command(name, where)}")
    try:
        records = builder.as_data_source(split=split)
    except NotImplementedError as error:
        raise ValueError(
            f"The TFDS dataset {name} in {builder.data_path} is stored as {builder.info.file_format.value}, which has "
            f"no random access. {_prepare_command(name, where)}"
        ) from error
    except ValueError as error:
        raise ValueError(f"The TFDS dataset {name} in {builder.data_path}: {error}") from error
    input_key, label_key = builder.info.supervised_keys or ("image", "label")
    features = builder.info.features
    known = features.keys() if hasattr(features, "keys") else ()
    if input_key not in known or label_key not in known or not hasattr(features[label_key], "num_classes"):
        raise ValueError(
            f"The TFDS dataset {name} in {builder.data_path} has the features {sorted(known)}: hetjax reads datasets "
            "with an image (or a vector) and a class label. Write a source of your own for others."
        )
    if len(records) == 0:
        raise ValueError(f"The split {split!r} of the TFDS dataset {name} in {builder.data_path} has no samples.")
    label = features[label_key]
    source = TfdsSource(records, input_key, label_key, Description(name, (), classes=label.num_classes))
    shape = source[0]["image"].shape  # the feature may leave sizes open
    source.description = Description(name, shape, classes=label.num_classes)
    return source


def _prepare_command(name: str, where: str | Path) -> str:
    return (
        "Prepare it once, on any machine, with pip install 'hetjax[tfds]' tensorflow-cpu and\n"
        f"  python -c \"import tensorflow_datasets as t; t.builder('{name}', data_dir='{where}', "
        "file_format='array_record').download_and_prepare()\"\n"
        "then set TFDS_DATA_DIR to that folder. Reading it needs no TensorFlow."
    )
