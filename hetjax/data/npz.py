"""NPZ files with inputs and labels, as np.savez writes them. Pickled objects are never loaded."""

from __future__ import annotations

import zipfile
import zlib
from pathlib import Path

import numpy as np

from hetjax.data.memory import MemorySource, check_labels, labelled_images
from hetjax.data.source import Description
from hetjax.data.split import check_split, stratified

_PAIRS = (("x", "y"), ("image", "label"), ("images", "labels"))


def npz_source(file: str | Path, split: str = "train", *, classes: int | None = None) -> MemorySource:
    """Labelled inputs from the arrays x_train, y_train, x_test and y_test, or from x and y (or image and label).

    Without separate test arrays a fixed fifth of every label is the test split. uint8 inputs are scaled to [0, 1],
    others are taken as they are. The number of classes is the largest training label plus one unless it is given.
    """
    check_split(split)
    path = Path(file)
    arrays = _read(path)
    for x, y in _PAIRS:
        if {f"{x}_train", f"{y}_train"} <= arrays.keys():
            if not {f"{x}_test", f"{y}_test"} <= arrays.keys():
                raise ValueError(f"{path} has {x}_train and {y}_train, but not {x}_test and {y}_test: add them.")
            image, label, train_label = arrays[f"{x}_{split}"], arrays[f"{y}_{split}"], arrays[f"{y}_train"]
            keep = None
            break
        if {x, y} <= arrays.keys():
            image, label = arrays[x], arrays[y]
            train_label = label
            keep = stratified(label, split) if label.ndim == 1 and len(label) == len(image) else None
            break
    else:
        raise ValueError(
            f"{path} holds the arrays {sorted(arrays)}. Expected x_train, y_train, x_test and y_test, or x and y, or "
            "image and label: save them with np.savez_compressed(file, x=inputs, y=labels)."
        )
    if classes is None:
        classes = int(train_label.max(initial=0)) + 1 if np.issubdtype(train_label.dtype, np.integer) else 1
    if label.ndim == 1:  # before the split, so that an error names the row as the file numbers it
        check_labels(label, classes, str(path))
    if keep is not None:
        image, label = image[keep], label[keep]
    return labelled_images(image, label, classes, name=path.stem, origin=str(path))


def npz_samples(file: str | Path) -> MemorySource:
    """The training samples for what needs no labels: targets may be any numbers, or missing.

    Where they are no labels all rows of x count, since there is nothing to split by, or those of x_train.
    """
    path = Path(file)
    arrays = _read(path)
    for x, y in ((f"{x}{part}", f"{y}{part}") for part in ("_train", "") for x, y in _PAIRS):
        if x not in arrays:
            continue
        target = arrays.get(y)
        if target is not None and np.issubdtype(target.dtype, np.integer):
            break
        checked = labelled_images(
            arrays[x], np.zeros(arrays[x].shape[:1], np.int32), 1, name=path.stem, origin=str(path)
        )
        samples = {"image": checked.arrays["image"]}
        if target is not None:
            if target.dtype.kind not in "fb" or not np.isfinite(target).all():
                raise ValueError(f"{path}: the targets {y} have to be finite numbers. Remove or repair the others.")
            samples["label"] = target
        return MemorySource(samples, Description(path.stem, checked.description.input_shape), scale=checked.scale)
    return npz_source(path)


def _read(path: Path) -> dict[str, np.ndarray]:
    if not path.is_file():
        raise FileNotFoundError(f"There is no file {path}. Give npz:FILE the path of a file written by np.savez.")
    name = None
    try:
        content = np.load(path, allow_pickle=False)
        if isinstance(content, np.ndarray):
            raise ValueError("it is a single array, an .npy file")
        with content:
            arrays = {}
            for name in content.files:
                arrays[name] = content[name]
            return arrays
    except (ValueError, OSError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        if "allow_pickle" in str(error) and name is not None:
            raise ValueError(
                f"{path}: the array {name!r} holds Python objects, which hetjax does not unpickle (they can run code). "
                "Save plain numbers: np.stack the rows into one array before np.savez."
            ) from error
        raise ValueError(f"{path} is not a readable NPZ file ({error}). Write it again with np.savez.") from error
