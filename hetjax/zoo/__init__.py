"""Small Flax NNX models to train and to compare with: mlp, cnn, resnet and transformer."""

from hetjax.models.augment import shift
from hetjax.models.cnn import CNN
from hetjax.models.losses import Score, classification, next_token
from hetjax.models.mlp import MLP
from hetjax.models.registry import MODELS, make
from hetjax.models.resnet import ResNet
from hetjax.models.transformer import Transformer

__all__ = ["CNN", "MLP", "MODELS", "ResNet", "Score", "Transformer", "classification", "make", "next_token", "shift"]
