"""A task: a dataset and a model by name, made to fit each other, behind the contract of the core."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flax import nnx

from hetjax import zoo as models
from hetjax.adapters.batch_norm import BatchNorm
from hetjax.adapters.contract import Example
from hetjax.adapters.flax_models import FlaxModel, from_nnx
from hetjax.arguments import MOST_SEED, whole
from hetjax.data import RowSource, load
from hetjax.devices import memory


@dataclass(frozen=True)
class Task:
    """What to train on, what to test on, and the model with its first parameters."""

    train: RowSource
    test: RowSource
    model: FlaxModel


def make_task(
    dataset: str, model: str, *, seed: int = 0, norm: str | None = None, augment: str = "none", **options: Any
) -> Task:
    """`dataset` as `hetjax.data.load` knows it, `model` one of `hetjax.zoo.MODELS`, `options` of its constructor.

    norm: 'batch' for hetjax's count-weighted BatchNorm or 'group' for GroupNorm, in models that normalise.
    augment: 'shift' moves training images by up to a pixel, or 'none'.
    """
    train, test = load(dataset, "train"), load(dataset, "test")
    if train.description != test.description:
        raise ValueError(
            f"The training samples of {dataset} are {train.description}, its test samples {test.description}: they "
            "have to be alike."
        )
    if norm is not None:
        if norm not in ("batch", "group"):
            raise ValueError(f"There is no norm {norm!r}: choose 'batch' or 'group'.")
        options["norm"] = BatchNorm if norm == "batch" else "group"
    whole("seed", seed, 0, MOST_SEED)
    make = lambda: models.make(model, train.description, nnx.Rngs(seed), **options)
    _check_fits(model, nnx.eval_shape(make), train.description.classes)
    network = make()
    if augment not in ("none", "shift"):
        raise ValueError(f"There is no augmentation {augment!r}: choose 'none' or 'shift'.")
    if augment == "shift" and len(train.description.input_shape) != 3:
        raise ValueError(f"Only images can be shifted, and the samples of {dataset} are none: leave augment out.")
    if train.description.vocab is not None:
        return Task(train, test, from_nnx(network, _text_loss))
    return Task(train, test, from_nnx(network, _shifted_image_loss if augment == "shift" else _image_loss))


def _check_fits(name: str, shapes: nnx.Module, classes: int | None) -> None:
    """Refuse a model whose parameters alone are more than the memory of this machine, before they are made."""
    params, room = memory.size(nnx.state(shapes, nnx.Param)), memory.host()
    if room is not None and params > room:
        many = f", or renumber the labels, which make {classes:,} classes" if classes and classes > 10**6 else ""
        raise ValueError(
            f"The parameters of the {name} would take {memory.gib(params)}, and this machine has {memory.gib(room)} of "
            f"memory. Use a smaller width{many}."
        )


def _image_loss(model: Any, example: dict[str, Any], rngs: nnx.Rngs | None) -> Example:
    score = models.classification(model(example["image"], rngs=rngs), example["label"])
    return Example(score.loss, None, {"accuracy": score.correct})


def _shifted_image_loss(model: Any, example: dict[str, Any], rngs: nnx.Rngs | None) -> Example:
    """In training (where there are random streams) on an image moved by chance, in evaluation as it is."""
    if rngs is not None:
        example = {**example, "image": models.shift(example["image"], rngs.augment())}
    return _image_loss(model, example, rngs)


def _text_loss(model: Any, example: dict[str, Any], rngs: nnx.Rngs | None) -> Example:
    """Summed over the window's targets and weighted by their number, so that the loss divides by tokens."""
    score = models.next_token(model(example["tokens"], rngs=rngs), example["targets"], example["weights"])
    return Example(score.loss, score.weight, {"accuracy": score.correct})
