"""When and how the workers agree. The trainer asks a `Sync` (see protocol.py) for what moves its state on."""

from __future__ import annotations

from typing import Any

from hetjax.sync.allreduce import AllReduce
from hetjax.sync.base import Rule, Setting, Sync
from hetjax.sync.daso import Daso
from hetjax.sync.decentralized import Decentralised
from hetjax.sync.hogbatch import AdaptiveHogbatch, AdaptiveSgd, Asynchronous, Hogbatch

REGISTRY: dict[str, type[Sync]] = {
    "allreduce": AllReduce,
    "decentralised": Decentralised,
    "daso": Daso,
    "hogbatch": Hogbatch,
    "adaptive-hogbatch": AdaptiveHogbatch,
    "adaptive-sgd": AdaptiveSgd,
}


def make(name: str, **options: Any) -> Sync:
    """The sync of this name, with its own options."""
    if not isinstance(name, str) or name not in REGISTRY:
        raise ValueError(f"There is no sync {name!r}: use one of {', '.join(REGISTRY)}.")
    return REGISTRY[name](**options)


__all__ = [
    "REGISTRY",
    "AdaptiveHogbatch",
    "AdaptiveSgd",
    "AllReduce",
    "Asynchronous",
    "Daso",
    "Decentralised",
    "Hogbatch",
    "Rule",
    "Setting",
    "Sync",
    "make",
]
