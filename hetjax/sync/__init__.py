"""When and how the workers agree. The trainer asks a `Sync` (see protocol.py) for what moves its state on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hetjax.sync.allreduce import AllReduce
from hetjax.sync.daso import Daso
from hetjax.sync.decentralised import Decentralised
from hetjax.sync.hogbatch import AdaptiveHogbatch, AdaptiveSgd, Asynchronous, Hogbatch
from hetjax.sync.protocol import Rule, Setting, Sync

AnySync = Sync | Asynchronous  # with steps of all workers together, or without

REGISTRY: dict[str, Callable[..., AnySync]] = {
    "allreduce": AllReduce,
    "decentralised": Decentralised,
    "daso": Daso,
    "hogbatch": Hogbatch,
    "adaptive-hogbatch": AdaptiveHogbatch,
    "adaptive-sgd": AdaptiveSgd,
}


def make(name: str | AnySync, **options: Any) -> AnySync:
    """The sync of this name, with its own options; a sync itself is returned as it is."""
    if isinstance(name, Asynchronous | Sync):
        return name
    if not isinstance(name, str) or name not in REGISTRY:
        raise ValueError(f"There is no sync {name!r}: use one of {', '.join(REGISTRY)}.")
    return REGISTRY[name](**options)


__all__ = [
    "REGISTRY",
    "AdaptiveHogbatch",
    "AdaptiveSgd",
    "AllReduce",
    "AnySync",
    "Asynchronous",
    "Daso",
    "Decentralised",
    "Hogbatch",
    "Rule",
    "Setting",
    "Sync",
    "make",
]
