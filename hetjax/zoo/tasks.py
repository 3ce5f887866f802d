"""Tasks: a dataset and a model by name, with matching sizes, and the loss of one example."""

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
from hetjax.zoo.layers import ComputeDtype, shift
from hetjax.zoo.transformer import Transformer


class Score(NamedTuple):
    """Loss, weight and number of correct predictions of one example, summed over its predictions."""

    loss: jax.Array
    weight: jax.Array
    correct: jax.Array


def classification(logits_C: jax.Array, label: jax.Array) -> Score:
    """Cross-entropy -log softmax(logits)[label].

    Args:
        logits_C: Logits of one sample.
        label: Its class.

    Returns:
        The score, of weight 1.
    """
    loss = -jax.nn.log_softmax(logits_C)[label]
    correct = (jnp.argmax(logits_C) == label).astype(loss.dtype)
    return Score(loss, jnp.ones_like(loss), correct)


def next_token(logits_TxV: jax.Array, targets_T: jax.Array, weights_T: jax.Array) -> Score:
    """Weighted sum over the tokens of a window of -log softmax(logits)[target].

    Args:
        logits_TxV: Logits of each token.
        targets_T: The tokens that follow.
        weights_T: Weight of each of them.

    Returns:
        The score, of weight sum(weights).
    """
    loss_T = -jnp.take_along_axis(jax.nn.log_softmax(logits_TxV), targets_T[:, None], axis=-1)[:, 0]
    correct_T = (jnp.argmax(logits_TxV, axis=-1) == targets_T).astype(loss_T.dtype)
    return Score(jnp.sum(weights_T * loss_T), jnp.sum(weights_T), jnp.sum(weights_T * correct_T))


MODELS: dict[str, Any] = {"mlp": MLP, "cnn": CNN, "resnet": ResNet, "transformer": Transformer}


def make_model(name: str, description: Description, rngs: nnx.Rngs, **options: Any) -> nnx.Module:
    """Make a model for the samples of a source.

    Every model takes one input and optional `rngs` for dropout, and returns logits in float32 or wider.

    Args:
        name: mlp, cnn, resnet or transformer.
        description: What the samples are like.
        rngs: Initialize the parameters.
        **options: Options of its constructor: dtype, dropout, width and others.

    Returns:
        The model.

    Raises:
        TypeError: If the model has no such option.
        ValueError: If there is no such model, or if it cannot take such samples.
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
            raise _mismatch(name, "text: tokens, targets and weights (--dataset text)", description)
        return Transformer(shape[0], description.vocab, rngs=rngs, **options)
    if description.classes is None:
        raise _mismatch(name, "inputs with labels", description)
    if name in ("cnn", "resnet") and len(shape) != 3:
        raise _mismatch(name, "images [height, width, channels]", description)
    return model(shape, description.classes, rngs=rngs, **options)


def _mismatch(name: str, expected: str, description: Description) -> ValueError:
    what = "text" if description.vocab is not None else "labeled" if description.classes is not None else "unlabeled"
    return ValueError(
        f"The {name} needs {expected}, but the samples of {description.name} are {what}, each of shape "
        f"{description.input_shape}. Choose another model or dataset."
    )


@dataclass(frozen=True)
class Task:
    """Training and test samples, and the model with its initial parameters."""

    train: RowSource
    test: RowSource
    model: FlaxModel


def make_task(
    dataset: str, model: str, *, seed: int = 0, norm: str | None = None, augment: str = "none", **options: Any
) -> Task:
    """Make a task by names.

    Args:
        dataset: As in `hetjax.data.load`.
        model: One of `hetjax.zoo.MODELS`.
        seed: Of the initial parameters.
        norm: "batch" (hetjax's count-weighted BatchNorm) or "group" (GroupNorm), for models that normalize.
        augment: "shift" moves training images by up to a pixel; "none".
        **options: For the constructor of the model.
    """
    train, test = load(dataset, "train"), load(dataset, "test")
    if train.description != test.description:
        raise ValueError(
            f"The training samples of {dataset} are {train.description}, its test samples {test.description}: they "
            "have to match."
        )
    if norm is not None:
        if norm not in ("batch", "group"):
            raise ValueError(f"There is no norm {norm!r}: choose 'batch' or 'group'.")
        options["norm"] = _batch_norm if norm == "batch" else "group"
    whole("seed", seed, 0, MOST_SEED)
    build = lambda: make_model(model, train.description, nnx.Rngs(seed), **options)
    _check_fits(model, nnx.eval_shape(build), train.description.classes)
    network = build()
    if augment not in ("none", "shift"):
        raise ValueError(f"There is no augmentation {augment!r}: choose 'none' or 'shift'.")
    if augment == "shift" and len(train.description.input_shape) != 3:
        raise ValueError(f"augment='shift' is for images, and the samples of {dataset} are none: leave augment out.")
    if train.description.vocab is not None:
        return Task(train, test, from_nnx(network, _text_loss))
    return Task(train, test, from_nnx(network, _shifted_image_loss if augment == "shift" else _image_loss))


def _batch_norm(features: int, *, dtype: ComputeDtype, rngs: nnx.Rngs) -> BatchNorm:
    """BatchNorm with the short memory that runs of a few hundred steps need. Takes no keys from `rngs`."""
    return BatchNorm(features, momentum=0.9, dtype=dtype)


def _check_fits(name: str, shapes: nnx.Module, classes: int | None) -> None:
    """Raise ValueError, before allocating, if the parameters alone exceed the memory of this machine."""
    params, available = memory.size(nnx.state(shapes, nnx.Param)), memory.host()
    if available is not None and params > available:
        many = f", or renumber the labels, which make {classes:,} classes" if classes and classes > 10**6 else ""
        raise ValueError(
            f"The parameters of the {name} would take {memory.gib(params)}, and this machine has "
            f"{memory.gib(available)} of memory. Use a smaller width{many}."
        )


def _image_loss(model: Any, example: dict[str, Any], rngs: nnx.Rngs | None) -> Example:
    score = classification(model(example["image"], rngs=rngs), example["label"])
    return Example(score.loss, None, {"accuracy": score.correct})


def _shifted_image_loss(model: Any, example: dict[str, Any], rngs: nnx.Rngs | None) -> Example:
    """Shifts the image at random in training (with rngs), not in evaluation."""
    if rngs is not None:
        example = {**example, "image": shift(example["image"], rngs.augment())}
    return _image_loss(model, example, rngs)


def _text_loss(model: Any, example: dict[str, Any], rngs: nnx.Rngs | None) -> Example:
    """Summed over the targets of a window and weighted by their number: the loss is a mean over tokens."""
    score = next_token(model(example["tokens"], rngs=rngs), example["targets"], example["weights"])
    return Example(score.loss, score.weight, {"accuracy": score.correct})
