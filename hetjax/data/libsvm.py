"""Sparse features in the LIBSVM format: one sample per line, `label index:value index:value ...`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hetjax.data.source import Batch, Description, RowSource, check_split, stratified_split

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix


class SparseSource(RowSource):
    """Rows of a sparse matrix, fetched as dense float32 under "image" with their class under "label".

    Args:
        features: The matrix, one row per sample. It stays sparse in memory.
        label: The class of each row, from 0.
        description: What a model needs to know about the samples.
    """

    def __init__(self, features: csr_matrix, label: np.ndarray, description: Description):
        self.features, self.label, self.description = features, label, description

    def __len__(self) -> int:
        return len(self.label)

    def rows(self, indices: np.ndarray) -> Batch:
        indices = self.checked_indices(indices)
        return {"image": self.features[indices].toarray().astype(np.float32), "label": self.label[indices]}


def libsvm_source(file: str | Path, split: str = "train", *, features: int | None = None) -> SparseSource:
    """Read a LIBSVM file, such as w8a, covtype or real-sim; gzip and bzip2 are recognized by the file's name.

    The distinct labels in ascending order (-1 and 1, or 1 and 2) become the classes 0, 1, ... If there is a file of the
    same name with the ending .t beside it, it is the test split; otherwise a fixed fifth of every label is.

    Args:
        file: The file with the training samples.
        split: "train" or "test".
        features: Number of features (default: the largest index in the training samples).

    Returns:
        The samples of the split.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it is not in this format, or its labels are no classes.
    """
    check_split(split)
    path = Path(file)
    matrix, label = _read(path, features)
    classes = np.unique(label)
    if len(classes) > 1000 or not np.array_equal(classes, np.round(classes)):
        raise ValueError(f"{path} has {len(classes):,} distinct labels such as {classes[0]:g}: expected classes.")
    test = path.with_name(f"{path.name}.t")
    if not test.is_file():
        keep = stratified_split(np.searchsorted(classes, label), split)
        matrix, label = matrix[keep], label[keep]
    elif split == "test":
        matrix, label = _read(test, matrix.shape[1])
        if unknown := sorted(set(label) - set(classes)):
            raise ValueError(f"{test} has the label {unknown[0]:g}, which {path} does not have.")
    description = Description(path.name, (matrix.shape[1],), len(classes))
    return SparseSource(matrix, np.searchsorted(classes, label).astype(np.int32), description)


def _read(path: Path, features: int | None) -> tuple[csr_matrix, np.ndarray]:
    if not path.is_file():
        raise FileNotFoundError(
            f"There is no file {path}. Download one from https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/."
        )
    from sklearn.datasets import load_svmlight_file  # importing it takes longer than importing JAX

    try:
        matrix, label = load_svmlight_file(str(path), n_features=features, dtype=np.float32, zero_based=False)
    except (ValueError, OSError, EOFError) as error:
        raise ValueError(
            f"{path} is not in the LIBSVM format ({error}): expected lines of a label and index:value pairs, with "
            "indices from 1."
        ) from error
    if not len(label):
        raise ValueError(f"{path} holds no samples.")
    if not np.isfinite(matrix.data).all():
        raise ValueError(f"{path} holds values that are not finite.")
    return matrix, label
