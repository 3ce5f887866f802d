"""The Hogbatch family: asynchronous training on unlike devices of one machine."""

from hetjax.sync.hogbatch.family import AdaptiveHogbatch, AdaptiveSgd, Asynchronous, Hogbatch
from hetjax.sync.hogbatch.method import AppliedUpdate
from hetjax.sync.hogbatch.virtual import VirtualSchedule

__all__ = ["AdaptiveHogbatch", "AdaptiveSgd", "AppliedUpdate", "Asynchronous", "Hogbatch", "VirtualSchedule"]
