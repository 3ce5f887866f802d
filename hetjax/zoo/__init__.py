"""Small Flax NNX models to train and to compare with: mlp, cnn, resnet and transformer."""

from hetjax.zoo.augment import shift
from hetjax.zoo.cnn import CNN
from hetjax.zoo.losses import Score, classification, next_token
from hetjax.zoo.mlp import MLP
from hetjax.zoo.registry import MODELS, make
from hetjax.zoo.resnet import ResNet
from hetjax.zoo.transformer import Transformer

__all__ = ["CNN", "MLP", "MODELS", "ResNet", "Score", "Transformer", "classification", "make", "next_token", "shift"]
