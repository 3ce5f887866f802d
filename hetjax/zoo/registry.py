"""Models by name, sized to the data that they are to learn."""

from __future__ import annotations

import inspect
from typing import Any

from flax import nnx

from hetjax.data.source import Description
from hetjax.zoo.images import CNN, MLP, ResNet
from hetjax.zoo.transformer import Transformer

MODELS: dict[str, Any] = {"mlp": MLP, "cnn": CNN, "resnet": ResNet, "transformer": Transformer}


def make(name: str, description: Description, rngs: nnx.Rngs, **options: Any) -> nnx.Module:
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
    what = "text" if description.vocab is not None else "labelled" if description.classes is not None else "unlabelled"
    return ValueError(
        f"The {name} needs {expected}, but the samples of {description.name} are {what}, each of shape "
        f"{description.input_shape}. Choose another model or dataset."
    )
