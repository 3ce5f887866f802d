"""Small Flax NNX models for examples and benchmarks: mlp, cnn, resnet and transformer."""

from hetjax.zoo.images import CNN, MLP
from hetjax.zoo.tasks import classification, make_model, next_token
from hetjax.zoo.transformer import Transformer

__all__ = [
    "CNN",
    "MLP",
    "Transformer",
    "classification",
    "make_model",
    "next_token",
]
