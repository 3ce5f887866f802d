"""A task: a dataset and a model by name, sized to fit each other, with the loss of one example."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from hetjax.adapters.batch_norm import BatchNorm
from hetjax.adapters.contract import Example
from hetjax.adapters.flax_models import FlaxModel, from_nnx
from hetjax.arguments import MOST_SEED, whole
from hetjax.data import RowSource, load
from hetjax.data.source import Description
from hetjax.devices import memory
from hetjax.zoo.images import CNN, MLP, ResNet
from hetjax.zoo.layers import shift
from hetjax.zoo.transformer import Transformer


class Score(NamedTuple):
    """One example's loss and number of right answers, both summed over its answers, and the weight of these."""

    loss: jax.Array
    weight: jax.Array
    correct: jax.Array


def classification(logits_C: jax.Array, label: jax.Array) -> Score:
    """Cross-entropy -log softmax(logits)[label]; weight 1."""
    loss = -jax.nn.log_softmax(logits_C)[label]
    correct = (jnp.argmax(logits_C) == label).astype(loss.dtype)
    return Score(loss, jnp.ones_like(loss), correct)


def next_token(logits_TxV: jax.Array, targets_T: jax.Array, weights_T: jax.Array) -> Score:
    """Weighted sum over the places of a window of -log softmax(logits)[target]; the weight is sum(weights)."""
    loss_T = -jnp.take_along_axis(jax.nn.log_softmax(logits_TxV), targets_T[:, None], axis=-1)[:, 0]
    correct_T = (jnp.argmax(logits_TxV, axis=-1) == targets_T).astype(loss_T.dtype)
    return Score(jnp.sum(weights_T * loss_T), jnp.sum(weights_T), jnp.sum(weights_T * correct_T))


MODELS: dict[str, Any] = {"mlp": MLP, "cnn": CNN, "resnet": ResNet, "transformer": Transformer}


def make_model(name: str, description: Description, rngs: nnx.Rngs, **options: Any) -> nnx.Module:
    """The model `name` for samples like `description`; `options` go to its constructor (dtype, dropout, width, ...).

    Every model takes one input and optional `rngs` for dropout, and returns float32 logits.
    """
    if name not in MODELS:
        raise ValueError(f"There is no model {name!r}. Expected one of {', '.join(MODELS)}.")
    model = MODELS[name]
    known = [option for option in inspect.getfullargspec(model.__init__).kwonlyargs if option != "rngs"]
    for option in options:
        if option not in known:
            raise TypeError(f"The {name} has no option {option!r}. It has {', '.join(known)}.")
    shape = description.input_shape
    if name == "transformer":
        if description.vocab is None:
            raise _unfit(name, "text: tokens, targets and weights (--dataset text)", description)
        return Transformer(shape[0], description.vocab, rngs=rngs, **options)
    if description.classes is None:
        raise _unfit(name, "inputs with labels", description)
    if name in ("cnn", "resnet") and len(shape) != 3:
        raise _unfit(name, "images [height, width, channels]", description)
    return model(shape, description.classes, rngs=rngs, **options)


def _unfit(name: str, expected: str, description: Description) -> ValueError:
    what = "text" if description.vocab is not None else "labeled" if description.classes is not None else "unlabeled"
    return ValueError(
        f"The {name} needs {expected}, but the samples of {description.name} are {what}, each of shape "
        f"{description.input_shape}. Choose another model or dataset."
    )


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

    norm: 'batch' for hetjax's count-weighted BatchNorm or 'group' for GroupNorm, in models that normalize.
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
    build = lambda: make_model(model, train.description, nnx.Rngs(seed), **options)
    _check_fits(model, nnx.eval_shape(build), train.description.classes)
    network = build()
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
    score = classification(model(example["image"], rngs=rngs), example["label"])
    return Example(score.loss, None, {"accuracy": score.correct})


def _shifted_image_loss(model: Any, example: dict[str, Any], rngs: nnx.Rngs | None) -> Example:
    """In training (where there are random streams) on an image moved by chance, in evaluation as it is."""
    if rngs is not None:
        example = {**example, "image": shift(example["image"], rngs.augment())}
    return _image_loss(model, example, rngs)


def _text_loss(model: Any, example: dict[str, Any], rngs: nnx.Rngs | None) -> Example:
    """Summed over the window's targets and weighted by their number, so that the loss divides by tokens."""
    score = next_token(model(example["tokens"], rngs=rngs), example["targets"], example["weights"])
    return Example(score.loss, score.weight, {"accuracy": score.correct})
