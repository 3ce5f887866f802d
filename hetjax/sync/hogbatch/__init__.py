"""The Hogbatch family: asynchronous training on unlike devices of one machine."""

from hetjax.sync.hogbatch.family import AdaptiveHogbatch, AdaptiveSgd, Asynchronous, Hogbatch
from hetjax.sync.hogbatch.method import Update
from hetjax.sync.hogbatch.virtual import Schedule

__all__ = ["AdaptiveHogbatch", "AdaptiveSgd", "Asynchronous", "Hogbatch", "Schedule", "Update"]
