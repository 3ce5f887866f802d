"""TensorFlow Datasets by random access: read from ArrayRecord files without TensorFlow."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from hetjax.data.memory import check_labels
from hetjax.data.source import Description, RowSource, fetch


class TfdsSource(RowSource):
    """The samples of a prepared dataset with an image (or a vector) and a class label."""

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
        wanted = (self._input_key, self._label_key)
        chosen = {int(i): {key: record[key] for key in wanted} for i, record in zip(indices, records, strict=True)}
        batch = fetch(chosen, indices)  # a dict of samples is a source too: stacking and its errors are the same
        image, label = batch[self._input_key], batch[self._label_key]
        assert self.description.classes is not None
        check_labels(label, self.description.classes, f"TFDS dataset {self.description.name}")
        if image.dtype == np.uint8:
            image = image * np.float32(1 / 255)
        if image.ndim == 3:
            image = image[..., None]
        return {"image": image.astype(np.float32, copy=False), "label": label.astype(np.int32)}


def tfds_source(name: str, split: str = "train", *, data_dir: str | Path | None = None) -> TfdsSource:
    """One split of a dataset that was prepared before, found below `data_dir` (or TFDS_DATA_DIR, or TFDS's default).

    Reading needs the extra `tfds` and no TensorFlow. Preparing downloads, and needs TensorFlow for most datasets; see
    the command in the errors below. A split may be a slice such as "train[:90%]".
    """
    try:
        import tensorflow_datasets
    except ImportError as error:
        raise ImportError(
            f"Reading tfds:{name} needs TensorFlow Datasets ({error}). Install the extra: pip install 'hetjax[tfds]'."
        ) from error
    data_dir = data_dir or os.environ.get("TFDS_DATA_DIR")
    where = data_dir or tensorflow_datasets.core.constants.DATA_DIR
    try:
        builder = tensorflow_datasets.builder(name, data_dir=data_dir)
        prepared = builder.is_prepared()
    except tensorflow_datasets.core.DatasetNotFoundError:
        prepared = False
    if not prepared:
        raise FileNotFoundError(f"The TFDS dataset {name} is not prepared in {where}. {_how_to_prepare(name, where)}")
    try:
        records = builder.as_data_source(split=split)
    except NotImplementedError as error:
        raise ValueError(
            f"The TFDS dataset {name} in {builder.data_path} is stored as {builder.info.file_format.value}, which has "
            f"no random access. {_how_to_prepare(name, where)}"
        ) from error
    except ValueError as error:
        raise ValueError(f"The TFDS dataset {name} in {builder.data_path}: {error}") from error
    input_key, label_key = builder.info.supervised_keys or ("image", "label")
    features = builder.info.features
    known = features.keys() if hasattr(features, "keys") else ()
    if input_key not in known or label_key not in known or not hasattr(features[label_key], "num_classes"):
        raise ValueError(
            f"The TFDS dataset {name} in {builder.data_path} has the features {sorted(known)}: hetjax reads datasets "
            "with an image (or a vector) and a class label. Wrap the others in a source of your own."
        )
    if len(records) == 0:
        raise ValueError(f"The split {split!r} of the TFDS dataset {name} in {builder.data_path} has no samples.")
    label = features[label_key]
    source = TfdsSource(records, input_key, label_key, Description(name, (), classes=label.num_classes))
    shape = source[0]["image"].shape  # the feature may leave sizes open; a sample does not
    source.description = Description(name, shape, classes=label.num_classes)
    return source


def _how_to_prepare(name: str, where: str | Path) -> str:
    return (
        "Prepare it once, on any machine, with pip install 'hetjax[tfds]' tensorflow-cpu and\n"
        f"  python -c \"import tensorflow_datasets as t; t.builder('{name}', data_dir='{where}', "
        "file_format='array_record').download_and_prepare()\"\n"
        "then set TFDS_DATA_DIR to that folder. Reading it needs no TensorFlow."
    )
