"""Small Flax NNX models to train and to compare with: mlp, cnn, resnet and transformer."""

from hetjax.zoo.images import CNN, MLP, ResNet
from hetjax.zoo.layers import shift
from hetjax.zoo.losses import Score, classification, next_token
from hetjax.zoo.registry import MODELS, make
from hetjax.zoo.transformer import Transformer

__all__ = ["CNN", "MLP", "MODELS", "ResNet", "Score", "Transformer", "classification", "make", "next_token", "shift"]
