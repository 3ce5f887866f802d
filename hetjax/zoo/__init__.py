"""Small Flax NNX models for examples and benchmarks: mlp, cnn, resnet and transformer."""

from hetjax.zoo.images import CNN, MLP, ResNet
from hetjax.zoo.layers import shift
from hetjax.zoo.tasks import MODELS, Score, classification, make_model, next_token
from hetjax.zoo.transformer import Transformer

__all__ = [
    "CNN",
    "MLP",
    "MODELS",
    "ResNet",
    "Score",
    "Transformer",
    "classification",
    "make_model",
    "next_token",
    "shift",
]
